"""Models over devices: heads, experts and batches split, the same numbers as on one device.

The checks run in one process of their own, on 8 virtual CPU devices: this file, as a script.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

CHECKS = {}


def check(fn):
    CHECKS[fn.__name__] = fn
    return fn


class Setting:
    """A small Kimi-K3 on a mesh of 2 data, 2 expert and 2 model devices, and its steps' results."""

    def __init__(self):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from model_cases import k3, random_model, text

        from kda_jax import Capacity, ChunkMetadata, models, supports
        from kda_jax.models import sharding

        self.backend = "fused" if supports("fused") else "chunked"
        self.model = random_model(k3(2, (2,)), backend=self.backend)
        config = self.model.config
        self.mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "model"))
        self.sharded = sharding.shard_model(jax.tree.map(np.asarray, self.model), self.mesh)
        self.steps = sharding.ShardedSteps(config, self.mesh)
        lengths = ([20, 30], [5, 50])
        self.metadata = [
            ChunkMetadata.from_seq_lens(
                n, capacity=Capacity(64, 2, 4, 1), checkpoint_offsets=[[], [16]]
            )
            for n in lengths
        ]
        tokens = np.stack([text(64, seed=i) for i in range(2)])
        stacked = sharding.stack_metadata(self.metadata)
        cache = sharding.sharded_cache(config, self.mesh, 2, 64)
        arguments = (self.sharded, tokens, stacked, cache)
        self.prefill = self.steps.prefill.lower(*arguments).compile()
        self.logits, self.checkpoints, after = self.prefill(*arguments)
        nexts, active = jnp.array([[3, 4], [5, 6]]), jnp.array([[True, True], [False, True]])
        arguments = (self.sharded, nexts, after, active)
        self.decode = self.steps.decode_step.lower(*arguments).compile()
        self.recurrent = np.asarray(after.layers[0].recurrent)
        self.next_logits, self.after = self.decode(*arguments)

        def one(tokens, metadata, nexts, active):
            empty = models.empty_cache(config, 2, 64)
            out, cache = models.prefill(self.model, tokens, metadata, empty)
            before = jax.device_get(cache)  # the step takes the cache
            return out, before, models.decode_step(self.model, nexts, cache, active)

        self.single = [
            one(*part) for part in zip(tokens, self.metadata, nexts, active, strict=True)
        ]


def setting():
    global _setting
    if _setting is None:
        _setting = Setting()
    return _setting


_setting: Setting | None = None


@check
def prefill_and_decode_equal_one_device():
    import numpy as np

    s = setting()
    logits, next_logits, lengths, saved = map(
        np.asarray,
        (s.logits, s.next_logits, s.after.length, s.checkpoints.layers[0].recurrent),
    )
    for d, (out, cache, (next_out, after)) in enumerate(s.single):
        np.testing.assert_allclose(logits[d], out.logits, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(next_logits[d], next_out.logits, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(lengths[d], after.length)
        np.testing.assert_allclose(s.recurrent[d], cache.layers[0].recurrent, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            saved[d],
            out.checkpoints.layers[0].recurrent,
            rtol=1e-4,
            atol=1e-5,
        )


@check
def nothing_is_gathered():
    """In the compiled programs, devices only sum: around the operator nothing moves."""
    s = setting()
    for program in (s.prefill, s.decode):
        kinds = set(
            re.findall(
                r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\b",
                program.as_text(),
            )
        )
        assert kinds == {"all-reduce"}, kinds
    if s.backend == "fused":
        calls = [line for line in s.prefill.as_text().splitlines() if "kda_prefill_v1" in line]
        assert calls and all("f32[64,1,64]" in line for line in calls), calls  # one head of two


@check
def every_array_lies_as_its_spec_says():
    import jax

    from kda_jax.models.names import parameters
    from kda_jax.models.sharding import device_bytes

    s = setting()
    held = {}
    for leaf in jax.tree.leaves(s.sharded):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    assert set(held.values()) == {device_bytes(s.model, s.mesh)}
    specs = {name: tuple(leaf.sharding.spec) for name, leaf in parameters(s.sharded).items()}
    assert specs["layers.0.self_attn.q_proj.kernel"] == (None, "model")
    assert specs["layers.1.mlp.experts.gate"] == ("expert", None, "model")
    assert specs["layers.1.mlp.experts.down"] == ("expert", "model")
    assert specs["embed_tokens.weight"] == ("model",)
    assert s.after.layers[0].recurrent.sharding.shard_shape((2, 2, 2, 64, 64)) == (1, 2, 1, 64, 64)


@check
def files_are_read_into_shards():
    import tempfile

    import jax
    import numpy as np

    from kda_jax import models

    s = setting()
    with tempfile.TemporaryDirectory() as folder:
        models.save_pretrained(s.sharded, folder)
        loaded = models.from_pretrained(folder, mesh=s.mesh, backend=s.backend)
    jax.tree.map(np.testing.assert_array_equal, loaded, s.model)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(s.sharded), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim)


@check
def errors_name_the_parameter():
    import jax

    from kda_jax import ChunkMetadata
    from kda_jax.models import sharding

    s = setting()
    mesh = jax.make_mesh((8,), ("model",))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.A_log has 2 rows or columns"):
        sharding.parameter_spec("layers.0.self_attn.A_log", (2,), mesh)
    with pytest.raises(ValueError, match="build all parts with the same capacity"):
        sharding.stack_metadata([s.metadata[0], ChunkMetadata.from_seq_lens([3])])


@pytest.fixture(scope="module")
def results():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(CHECKS))
def test_on_8_devices(results, name):
    assert results[name] == "ok", results[name]


def main():
    found = {}
    for name, fn in CHECKS.items():
        try:
            fn()
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
