"""A custom call of the CPU's FFI handler, made past the library, and what it should give."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import chunk_kda_prefill
from kda_jax.native import TARGET
from kda_jax.testing import make_case, relative_error
from kda_jax.workspace import workspace

H, K, V, CHUNK = 2, 64, 32, 16
LENGTHS, OFFSETS = (40, 0, 1, 30), [[7, 32], [], [], [16]]
Arrays = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Call:
    """One custom call: operands and results in order, and attributes."""

    operands: Arrays
    results: dict[str, jax.ShapeDtypeStruct]
    attributes: Arrays

    def __call__(self, *operands: Any) -> dict[str, jax.Array]:
        call = jax.ffi.ffi_call(TARGET, tuple(self.results.values()))
        values = call(*operands, **self.attributes)
        return dict(zip(self.results, values, strict=True))

    def run(self) -> dict[str, Any]:
        """Compiled and run, with results in memory that XLA gave it."""
        return jax.device_get(jax.jit(lambda *args: self(*args))(*self.operands.values()))

    def run_on(self, byte: int) -> dict[str, Any]:
        """With each result, the workspace too, in memory that is full of ``byte``."""
        full = {
            name: np.full(x.size * x.dtype.itemsize, byte, np.uint8).view(x.dtype).reshape(x.shape)
            for name, x in self.results.items()
        }
        # Computed arrays: what borrows a NumPy buffer cannot be donated.
        given = {name: jnp.copy(jnp.asarray(x)) for name, x in full.items()}
        where = {name: x.unsafe_buffer_pointer() for name, x in given.items() if x.size}
        into = jax.jit(lambda _, *args: self(*args), donate_argnums=0, keep_unused=True)
        got = into(given, *self.operands.values())
        for name, address in where.items():
            assert got[name].unsafe_buffer_pointer() == address, f"{name} lies elsewhere"
        return jax.device_get(got)


def make_call(
    groups: int = 1,
    dtype: str = "float32",
    state_kv: bool = False,
    lengths: Any = LENGTHS,
    offsets: Any = OFFSETS,
    spare_rows: int = 5,
) -> Call:
    case = make_case(
        "random",
        seq_lens=lengths,
        H=H,
        K=K,
        V=V,
        dtype=dtype,
        chunk_size=CHUNK,
        checkpoint_offsets=offsets,
        initial_state=[i % 3 != 2 for i in range(len(lengths))],
        capacity="bucket",
    )
    metadata = case.metadata
    tokens = [np.concatenate([x[0], x[0, :spare_rows]]) for x in case.args[:5]]
    state = case.initial_state
    state = np.ascontiguousarray(state.swapaxes(2, 3)) if state_kv else state
    slab, num_bytes = workspace("cpu", H, K, V, metadata, groups)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "has_initial_state")
    operands = dict(
        zip(names, [*tokens, *case.args[5:], state, case.has_initial_state], strict=True)
    )
    operands |= {n: getattr(metadata, n).copy() for n in ("seqs", "chunks", "checkpoints")}
    shape = jax.ShapeDtypeStruct
    M = metadata.capacity.checkpoints
    return Call(
        operands,
        {
            "out": shape(tokens[2].shape, tokens[2].dtype),
            "final_state": shape(state.shape, jnp.float32),
            "checkpoint_state": shape((M, *state.shape[1:]), jnp.float32),
            "workspace": shape((num_bytes,), jnp.uint8),
        },
        {
            "scale": np.float32(K**-0.5),
            "lower_bound": np.float32(-5),
            "gate": np.int32(0),
            "chunk_size": np.int32(CHUNK),
            "groups": np.int32(groups),
            "slab_chunks": np.int32(slab),
            "l2norm": True,
            "state_kv": state_kv,
            "mixed": False,
        },
    )


@functools.cache
def expected() -> tuple[Any, Any, Any]:
    case = make_case(
        "random",
        seq_lens=LENGTHS,
        H=H,
        K=K,
        V=V,
        chunk_size=CHUNK,
        checkpoint_offsets=OFFSETS,
        initial_state=[True, True, False, True],
        capacity="bucket",
    )
    return jax.device_get(tuple(chunk_kda_prefill(*case.args, **case.kwargs, backend="scan")))


def assert_right(got: dict[str, Any]) -> None:
    out, final, saved = expected()
    tokens = out.shape[1]
    assert relative_error(got["out"][:tokens], out[0]) < 1e-5
    assert not got["out"][tokens:].any()
    assert relative_error(got["final_state"], final) < 1e-5
    assert relative_error(got["checkpoint_state"], saved) < 1e-5


@functools.cache
def good() -> tuple[Call, Callable[..., Any]]:
    call = make_call()
    return call, jax.jit(lambda *args: call(*args))


def assert_works() -> None:
    call, compiled = good()
    assert_right(jax.device_get(compiled(*call.operands.values())))
