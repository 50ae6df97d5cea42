"""The CPU's FFI handler, called past the library: what it writes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handler_call import LENGTHS, H, K, V, assert_works, make_call
from programs import assert_trees_equal, needs_fused

from kda_jax import chunk_kda_prefill
from kda_jax.testing import make_case

pytestmark = [needs_fused, pytest.mark.usefixtures("on_cpu")]


def test_the_call_itself() -> None:
    assert_works()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 3},
        {"dtype": "bfloat16"},
        {"state_kv": True},
        {"lengths": (0, 0, 0), "offsets": None},
        {"lengths": (1, 1, 1), "offsets": [[1], [], [1]], "groups": 2},
        {"lengths": (64,), "offsets": [[5, 6, 7]], "spare_rows": 0},
        {"lengths": (64, 0), "offsets": [[64], []]},
    ],
    ids=str,
)
def test_results_in_poisoned_memory(options: dict[str, Any]) -> None:
    """XLA does not clear results or workspace; here they hold NaN, then something else."""
    call = make_call(**options)
    clean = call.run()
    for byte in (0xFF, 0x3F):  # NaN in every float type; about 0.75
        got = call.run_on(byte)
        for name in ("out", "final_state", "checkpoint_state"):
            assert np.isfinite(np.asarray(got[name], np.float32)).all(), name
            np.testing.assert_array_equal(got[name], clean[name], err_msg=name)


def test_operator_in_poisoned_memory() -> None:
    """The same through the operator, into donated arrays."""
    case = make_case("random", seq_lens=LENGTHS, H=H, K=K, V=V, capacity="bucket")
    want = chunk_kda_prefill(*case.args, **case.kwargs, backend="fused")
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), want)

    def step(_: Any, args: Any) -> Any:
        return chunk_kda_prefill(*args, **case.kwargs, backend="fused")

    got = jax.jit(step, donate_argnums=0, keep_unused=True)(nan, case.args)
    assert nan.out.is_deleted() and nan.final_state.is_deleted()
    assert_trees_equal(got, want)
