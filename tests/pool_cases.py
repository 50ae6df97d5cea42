"""How the tests of pools call, and what they compare with; the cases are kda_jax.testing_pool's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import assert_same_bits

from kda_jax import KDAPoolResult
from kda_jax.testing import relative_error, scan_in_float64
from kda_jax.testing_pool import PoolCase


def call_in_pool(fn: Callable[..., Any], p: PoolCase, **options: Any) -> KDAPoolResult:
    """The results of one call, as NumPy arrays; the pool is not donated, and must stay as it is."""
    pool = jnp.asarray(p.pool)
    got = fn(*p.case.args, state_cache=pool, **p.options | options)
    assert isinstance(got, KDAPoolResult)
    assert_same_bits(pool, p.pool, "the caller's pool")
    return KDAPoolResult(*jax.device_get(tuple(got)))


def assert_right(
    got: KDAPoolResult, p: PoolCase, rtol_out: float, rtol_state: float, **options: Any
) -> None:
    """Against the recurrence in float64: out, every row written; all other rows bit for bit."""
    want = scan_in_float64(p.case, **options)
    used = p.case.metadata.num_tokens
    assert not np.asarray(got.out[:, used:], np.float32).any(), "rows of padding"
    error = relative_error(got.out[:, :used], want.out[:, :used])
    assert error <= rtol_out, f"out: relative error {error:.2e}, bound {rtol_out:.1e}"
    for row, (name, i) in p.written.items():
        error = relative_error(got.state_cache[row], getattr(want, name)[i])
        assert error <= rtol_state, f"{name}[{i}] in row {row}: relative error {error:.2e}"
    assert_same_bits(got.state_cache[p.others], p.pool[p.others], f"rows {p.others} of the pool")
