"""The edge cases of the CUDA kernel, for compute-sanitizer: small shapes, every path once.

    tools/cuda/sanitize.sh                 memcheck, racecheck and initcheck over this file
    python tools/cuda/edge_cases.py        without the sanitizer
    python tools/cuda/edge_cases.py --plant   an access out of bounds, which memcheck must find

Each result is compared with the scan backend in float32 on the CPU, so that a run that does nothing
cannot pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import ChunkMetadata, chunk_kda_prefill
from kda_jax.conv import causal_conv1d_parts
from kda_jax.decode import kda_decode_step
from kda_jax.testing import make_case, relative_error
from kda_jax.testing_pool import pool_case

# Lengths, options of make_case, groups.
CASES: list[tuple[list[int], dict, int | None]] = [
    ([130], {"checkpoint_offsets": [[70]]}, None),
    ([1, 64, 65, 0, 17], {"K": 64, "V": 32}, None),
    ([1, 64, 65, 0, 17], {"K": 64, "V": 16, "lower_bound": None}, None),
    ([200, 0, 64], {"K": 64, "V": 32}, 2),
    ([300], {"K": 64, "V": 64, "checkpoint_offsets": [[100, 300]]}, 4),
    ([130], {"H": 20, "checkpoint_offsets": [[70]]}, None),  # wider blocks of the walk on Hopper
    ([70, 65], {"H": 20}, None),
    ([70, 65], {"H": 40}, None),
    ([1700], {"H": 16}, None),  # more tasks than blocks of the prologue; the walk runs beside it
    ([900, 800], {"H": 16}, None),  # and behind it
    ([33], {"chunk_size": 32}, None),
    ([70], {"dtype": "float16", "K": 64, "V": 48}, None),
]


def run_all() -> None:
    cpu = jax.devices("cpu")[0]
    for seq_lens, options, groups in CASES:
        options = {"dtype": "bfloat16", "V": 128, "H": 1, "initial_state": True} | options
        case = make_case("random", seq_lens=seq_lens, **options)
        args = (case.q, case.k, case.v, case.raw_g, case.raw_beta, case.A_log, case.dt_bias)
        kwargs = {
            "metadata": case.metadata,
            "initial_state": case.initial_state,
            "has_initial_state": case.has_initial_state,
            "lower_bound": case.lower_bound,
        }
        fused = functools.partial(chunk_kda_prefill, backend="fused", groups=groups, **kwargs)
        got = [np.asarray(x) for x in jax.jit(fused)(*args)]
        with jax.default_device(cpu):
            want = chunk_kda_prefill(*args, backend="scan", **kwargs)
        errors = [relative_error(x, y) if x.size else 0.0 for x, y in zip(got, want, strict=True)]
        print(seq_lens, options, groups, [f"{e:.1e}" for e in errors], flush=True)
        assert max(errors) < 1e-2, "wrong result"
    for groups in (None, 2):
        in_a_pool(groups)
    decode_step()
    convolutions()
    print("edge cases ok", flush=True)


def decode_step() -> None:
    """A step in a pool, one row without a state."""
    rows, V = 5, 48
    case = make_case("random", seq_lens=[1] * rows, H=2, V=V, dtype="bfloat16", initial_state=True)
    tensors = [x[0] for x in case.args[:5]]
    indices = np.array([3, -1, 0, 6, 2], np.int32)
    pool = np.random.default_rng(0).standard_normal((7, 2, V, 128)).astype(np.float32)

    def step(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kda_decode_step(*args[:7], state_cache=args[7], state_indices=indices)

    args = (*tensors, case.A_log, case.dt_bias, pool)
    got = jax.jit(step)(*args)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(step)(*args)
    errors = [relative_error(x, y) for x, y in zip(got, want, strict=True)]
    print("decode step", [f"{e:.1e}" for e in errors], flush=True)
    assert max(errors) < 1e-2, "wrong result"


def convolutions() -> None:
    """Parts of different widths, with states and checkpoints, and rows of no sequence."""
    rng = np.random.default_rng(0)
    metadata = ChunkMetadata.from_seq_lens([1, 0, 33, 16], checkpoint_offsets=[[], [], [2, 20], []])
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    xs, weights = [draw(70, C) for C in (8, 40)], [draw(C, 4) for C in (8, 40)]
    args = xs, weights, metadata
    got = causal_conv1d_parts(*args, initial_state=draw(4, 48, 3))
    rng = np.random.default_rng(0)
    with jax.default_device(jax.devices("cpu")[0]):
        xs, weights = [draw(70, C) for C in (8, 40)], [draw(C, 4) for C in (8, 40)]
        want = causal_conv1d_parts(xs, weights, metadata, initial_state=draw(4, 48, 3))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = [relative_error(x, y) for x, y in pairs]
    print("convolutions", [f"{e:.1e}" for e in errors], flush=True)
    assert max(errors) < 1e-2, "wrong result"


def in_a_pool(groups: int | None) -> None:
    """The bits of states by sequence, also where a second pass replaces the row it starts from."""
    case = make_case(
        "random",
        seq_lens=[70, 0, 130],
        H=1,
        K=64,
        V=64,
        dtype="bfloat16",
        initial_state=[True, False, True],
        checkpoint_offsets=[[64], [], [7]],
    )
    for factor in (1.0, 1e6):
        state = case.initial_state.copy()
        state[:, :, 17] *= factor
        p = pool_case(dataclasses.replace(case, initial_state=state), dropped=[1])
        fused = functools.partial(chunk_kda_prefill, backend="fused", groups=groups)
        want = fused(*p.case.args, **p.case.kwargs)
        got = fused(*p.case.args, state_cache=jnp.array(p.pool), **p.options)
        same = np.array_equal(got.state_cache, p.after(want), equal_nan=True)
        print("in a pool", groups, factor, same, flush=True)
        assert same and np.array_equal(got.out, want.out), "wrong result"


def plant() -> None:
    """A chunk table that points far outside of every array."""
    case = make_case("random", seq_lens=[64], H=1, K=64, V=16, dtype="bfloat16")
    chunks = case.metadata.chunks.copy()
    chunks[0, 1] = 1 << 26
    broken = dataclasses.replace(case.metadata, chunks=chunks)
    assert isinstance(broken, ChunkMetadata)
    args = (case.q, case.k, case.v, case.raw_g, case.raw_beta, case.A_log, case.dt_bias)
    jax.block_until_ready(
        jax.jit(lambda m: chunk_kda_prefill(*args, metadata=m, backend="fused"))(broken)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plant", action="store_true", help="an access out of bounds instead")
    plant() if parser.parse_args().plant else run_all()
