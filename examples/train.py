"""Trains a tiny Kimi-K3 on text, on the CPU, and compares the kernel's run with the reference's.

    python examples/train.py README.md BUILD.md              # 200 steps with fused, and with scan

The text is read as bytes. Losses of both runs are printed; at the end, how far the loss fell, and
how far the runs are apart.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from tiny import CONFIG

from kda_jax import ChunkMetadata
from kda_jax.models import KimiK3, from_config
from kda_jax.models.training import next_token_loss

LENGTHS = [100, 28, 64]  # uneven sequences, one after the other


def train(text: np.ndarray, steps: int, backend: str, hf_config: dict = CONFIG) -> list[float]:
    """The loss before each step; both backends see the same weights and the same text."""
    model = KimiK3(from_config(hf_config, dtype="float32"), rngs=nnx.Rngs(0))
    optimizer = optax.adamw(3e-3, weight_decay=0.01)
    metadata = ChunkMetadata.from_seq_lens(LENGTHS)
    loss = functools.partial(next_token_loss, max_length=max(LENGTHS), backend=backend)

    @jax.jit
    def step(model, state, tokens):
        value, gradient = jax.value_and_grad(loss)(model, tokens, metadata)
        updates, state = optimizer.update(gradient, state, model)
        return optax.apply_updates(model, updates), state, value

    random, state, losses = np.random.default_rng(0), optimizer.init(model), []
    for _ in range(steps):
        starts = random.integers(0, len(text) - max(LENGTHS), len(LENGTHS))
        parts = [text[s : s + n] for s, n in zip(starts, LENGTHS, strict=True)]
        model, state, value = step(model, state, np.concatenate(parts).astype(np.int32))
        losses.append(float(value))
    return losses


def read(parser: argparse.ArgumentParser, files: list[Path]) -> np.ndarray:
    """The bytes of all files, uint8; ends the program where sequences cannot be cut from them."""
    parts = []
    for file in files:
        try:
            parts.append(file.read_bytes())
        except OSError as error:
            parser.error(f"{file} cannot be read: {error.strerror}; name text files")
    text = np.frombuffer(b"\n".join(parts), np.uint8)
    if len(text) <= max(LENGTHS):
        names = ", ".join(map(str, files))
        parser.error(
            f"{names}: {len(text)} bytes, want more than {max(LENGTHS)}, the longest sequence of a"
            " step; name a longer text, or more of them"
        )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="text to learn")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backends", nargs=2, default=["fused", "scan"])
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, want at least 1")
    text = read(parser, options.files)
    runs = []
    for backend in options.backends:
        begin = time.perf_counter()
        runs.append(train(text, options.steps, backend))
        print(f"{backend}: {options.steps} steps in {time.perf_counter() - begin:.0f} s")
    first, second = map(np.array, runs)
    for i in range(0, options.steps, max(1, options.steps // 20)):
        pair = zip(options.backends, (first[i], second[i]), strict=True)
        print(f"step {i:4}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in pair))
    start, end = first[:10].mean(), first[-10:].mean()
    apart = abs(second[-10:].mean() - end)
    print(f"loss {start:.3f} -> {end:.3f} nats per byte; the runs end {apart:.4f} apart")
    return 0 if end < 0.75 * start and apart < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
