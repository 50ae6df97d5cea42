"""Calls of one capacity that the tests of JAX's transformations share, and how they compare."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from programs import quick_jit

from kda_jax import ChunkMetadata, KDAResult, chunk_kda_prefill
from kda_jax.testing import make_case, relative_error

H, K, V = 2, 64, 16
NAMES = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")
ARGUMENTS = (*NAMES, "initial_state", "has_initial_state", "metadata")
LENGTHS = ([33, 0, 1, 20], [10, 30, 0, 13], [64], [1, 2, 3, 40])
OFFSETS = ([[16], [], [], [5]], [[10], [7], [], []], [[64, 3]], [[1], [], [], []])
HAS = ([True, True, False, True], [False, True, True, True], [True], [True, False, False, True])
Values = dict[str, Any]
# In a loss each element of a result has a weight of its own.
WEIGHTS = np.random.default_rng(5).standard_normal(1 << 14).astype(np.float32)


@functools.cache
def examples() -> tuple[Values, ...]:
    """Calls of one capacity on different lengths; NaN in padding and in rows that do not count."""
    found = []
    for seed, (lengths, offsets, has) in enumerate(zip(LENGTHS, OFFSETS, HAS, strict=True)):
        case = make_case(
            "random",
            seq_lens=lengths,
            H=H,
            K=K,
            V=V,
            seed=seed,
            chunk_size=16,
            checkpoint_offsets=offsets,
            initial_state=has,
            capacity=ChunkMetadata.from_seq_lens(
                LENGTHS[0], chunk_size=16, checkpoint_offsets=OFFSETS[0], capacity="bucket"
            ).capacity,
        )
        found.append({name: getattr(case, name) for name in ARGUMENTS})
    return tuple(found)


def finite(values: Values) -> Values:
    """Without NaN, so that any argument goes with any layout."""
    return jax.tree.map(lambda x: np.nan_to_num(x, nan=0.5) if x.dtype == np.float32 else x, values)


def call(values: Values, backend: str, **options: Any) -> KDAResult:
    args = [values[name] for name in NAMES]
    rest = {name: x for name, x in values.items() if name not in NAMES}
    return chunk_kda_prefill(*args, **rest, backend=backend, **options)


def assert_close(got: Any, want: Any, rtol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = jax.tree_util.tree_leaves_with_path(want)
    for (path, ref), x in zip(paths, jax.tree.leaves(got), strict=True):
        assert relative_error(x, ref) < rtol, jax.tree_util.keystr(path)


def stack(trees: Any) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


one_call = quick_jit(call, static_argnames="backend")


def mix(batch: list[Values], batched: Collection[str]) -> tuple[list[Values], Values, Values]:
    """A loop's arguments, where those not in ``batched`` are the first's; vmap's; and in_axes."""
    first = batch[0]
    loop = [{n: x[n] if n in batched else first[n] for n in ARGUMENTS} for x in batch]
    stacked = {n: stack([x[n] for x in batch]) if n in batched else first[n] for n in ARGUMENTS}
    return loop, stacked, {n: 0 if n in batched else None for n in ARGUMENTS}
