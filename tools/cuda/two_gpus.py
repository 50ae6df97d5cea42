"""A small Kimi-K3 on two GPUs, split over heads, experts and batches in turn, against one GPU.

    python tools/cuda/two_gpus.py

Runs on any machine where JAX sees two devices; on GPUs with the fused kernel in bfloat16. Prints
one line for each mesh; exit code 1 if one is off or if a program gathers anything.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from model_cases import k3, random_model, text

from kda_jax import Capacity, ChunkMetadata, models, supports
from kda_jax.models import sharding
from kda_jax.testing import relative_error

AXES = ("data", "expert", "model")
COLLECTIVE = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\b"


def main() -> int:
    if len(jax.devices()) < 2:
        raise SystemExit(f"JAX sees one device here: {jax.devices()}")
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    backend = "fused" if supports("fused", dtype=dtype, K=64, V=64) else "chunked"
    limit = 2e-2 if dtype == "bfloat16" else 1e-4
    model = random_model(k3(3, (2,)), backend=backend, dtype=dtype)
    config = model.config
    print(f"{jax.devices()[0].device_kind}, {dtype}, {backend}")
    lengths = ([200, 30], [5, 150])
    capacity = Capacity(256, 2, 8, 1)
    metadata = [
        ChunkMetadata.from_seq_lens(n, capacity=capacity, checkpoint_offsets=[[], [4]])
        for n in lengths
    ]
    tokens = np.stack([text(256, seed=i) for i in range(2)])
    single = [
        models.prefill(model, t, m, models.empty_cache(config, 2, 256))
        for t, m in zip(tokens, metadata, strict=True)
    ]
    failed = False
    host = jax.tree.map(np.asarray, model)
    for shape in ((1, 1, 2), (1, 2, 1), (2, 1, 1)):
        mesh = jax.make_mesh(shape, AXES, devices=jax.devices()[:2])
        batches = shape[0]
        prefill = sharding.ShardedSteps(config, mesh).prefill
        arguments = (
            sharding.shard_model(host, mesh),
            jnp.asarray(tokens[:batches]),
            sharding.stack_metadata(metadata[:batches]),
            sharding.sharded_cache(config, mesh, 2, 256),
        )
        program = prefill.lower(*arguments).compile()
        logits, _, cache = program(*arguments)
        logits, states = np.asarray(logits), np.asarray(cache.layers[0].recurrent)
        errors = [
            max(
                relative_error(logits[d], out.logits),
                relative_error(states[d], after.layers[0].recurrent),
            )
            for d, (out, after) in enumerate(single[:batches])
        ]
        found = sorted(set(re.findall(COLLECTIVE, program.as_text())))
        ok = max(errors) <= limit and set(found) <= {"all-reduce"}
        failed |= not ok
        split = ", ".join(f"{n} {a}" for n, a in zip(shape, AXES, strict=True))
        print(f"{split}: error {max(errors):.1e}, collectives {found} {'ok' if ok else 'FAILED'}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
