"""A decode step in a pool on JAX's device against the float64 recurrence.

On a GPU whose kernel takes chunks of one token that is the kernel, which the compiled program must
call; elsewhere plain JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPE

from kda_jax.backends import current_platform
from kda_jax.decode import kda_decode_step
from kda_jax.fused import takes_tokens
from kda_jax.testing import make_case, relative_error, scan_in_float64
from kda_jax.testing_pool import pool_case

# What the inputs' dtype rounds of an output; the rest is float32.
OUT = {"bfloat16": 2.5e-3, "float16": 4e-4, "float32": 2e-6}
STATE = 2e-6
SIZES: dict[str, dict[str, Any]] = {
    "a head of the model": {"H": 3, "K": 128, "V": 128},
    "K = 64, V = 48": {"H": 2, "K": 64, "V": 48},
    "one tile": {"H": 1, "K": 128, "V": 16},
}


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("size", SIZES)
def test_step_in_a_pool(size: str, rows: int, lower_bound: float | None) -> None:
    """Rows in any order, one without a state, one that is idle; the rest keeps its bits."""
    p = pool_case(
        make_case(
            "random",
            seq_lens=[1] * rows,
            dtype=DTYPE,
            lower_bound=lower_bound,
            initial_state=[i % 5 != 2 for i in range(rows)],
            **SIZES[size],
        )
    )
    active = np.arange(rows) % 7 != 3
    q, k, v, raw_g, raw_beta, A_log, dt_bias = p.case.args
    token = [jnp.asarray(x[0, :rows]) for x in (q, k, v, raw_g, raw_beta)]

    def step(pool: jax.Array, *token: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kda_decode_step(
            *token,
            jnp.asarray(A_log),
            jnp.asarray(dt_bias),
            state_cache=pool,
            state_indices=p.rows.state_indices,
            has_initial_state=jnp.asarray(p.rows.has_initial_state),
            active=jnp.asarray(active),
            lower_bound=lower_bound,
        )

    run = jax.jit(step, donate_argnums=0).lower(jnp.asarray(p.pool), *token).compile()
    by_kernel = takes_tokens(current_platform()) and DTYPE != "float32"
    assert ("kda_prefill_pool" in run.as_text()) == by_kernel
    out, pool = jax.device_get(run(jnp.asarray(p.pool), *token))
    want = scan_in_float64(p.case)
    assert not np.any(out[~active])
    assert relative_error(out[active], want.out[0, :rows][active]) <= OUT[DTYPE]
    after, written = p.after(want), set()
    for row, (_, n) in p.written.items():
        if active[n]:
            assert relative_error(pool[row], after[row]) <= STATE
            written.add(row)
    rest = sorted(set(range(pool.shape[0])) - written)
    np.testing.assert_array_equal(pool[rest].view(np.uint32), p.pool[rest].view(np.uint32))
