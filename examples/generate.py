"""Writes a tiny random Kimi-K3 to a folder and lets the command line continue two prompts with it.

    python examples/generate.py [FOLDER]

The same command takes the folder of a published model; a random one writes noise.
"""

from __future__ import annotations

import sys
import tempfile

from flax import nnx
from tiny import CONFIG

from kda_jax.cli import main
from kda_jax.models import KimiK3, from_config, save_pretrained


def run(folder: str) -> int:
    model = KimiK3(from_config(CONFIG, dtype="float32"), rngs=nnx.Rngs(0))
    for file in save_pretrained(model, folder, max_shard_bytes=500_000):
        print(f"wrote {file.name}")
    prompts = ["--prompt", "Kimi Delta Attention", "--prompt", "keeps one matrix state per head"]
    return main(["generate", "--model", folder, *prompts, "--max-new-tokens", "16"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(sys.argv[1]))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(run(temporary))
