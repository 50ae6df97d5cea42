"""The CPU's FFI handler, called past the library: what it writes, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import assert_trees_equal, needs_fused

from kda_jax import chunk_kda_prefill
from kda_jax.native import TARGET
from kda_jax.testing import make_case, relative_error
from kda_jax.workspace import workspace

pytestmark = needs_fused

H, K, V, CHUNK = 2, 64, 32, 16
LENGTHS, OFFSETS = (40, 0, 1, 30), [[7, 32], [], [], [16]]
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def on_cpu() -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


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


def test_the_call_itself() -> None:
    assert_works()


# ---------- every result element is written ----------


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


# ---------- refusals ----------


def assert_refused(call: Call, *words: str) -> None:
    """An error of XLA's, with these words, after which the process goes on."""
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        call.run()
    for word in words:
        assert word in str(caught.value)
    assert_works()


SHAPES = {
    "k": ("k", lambda x: x[1:]),
    "v": ("v", lambda x: x[:, :1]),
    "g": ("g", lambda x: x[:, :, :32]),
    "beta": ("beta", lambda x: x[..., None]),
    "A_log": ("A_log", lambda x: np.concatenate([x, x])),
    "dt_bias": ("dt_bias", lambda x: x[:, 1:]),
    "no A_log": ("A_log", lambda x: x[:0]),
    "initial_state": ("initial_state", lambda x: x[1:]),
    "state of kv": ("initial_state", lambda x: x.swapaxes(2, 3)),
    "has_initial_state": ("has_initial_state", lambda x: x[1:]),
    "seqs": ("seqs", lambda x: x[:, :3]),
    "flat seqs": ("seqs", lambda x: x.ravel()),
    "chunks": ("chunks", lambda x: x[:, :2]),
    "checkpoints": ("checkpoints", lambda x: x[:, :1]),
}


@pytest.mark.parametrize("what", SHAPES)
def test_wrong_operand_shape(what: str) -> None:
    name, change = SHAPES[what]
    call = make_call()
    call.operands[name] = np.ascontiguousarray(change(call.operands[name]))
    assert_refused(call, TARGET, f"{name} has shape [", ", want [")


def test_wrong_rank_of_q() -> None:
    call = make_call()
    call.operands["q"] = call.operands["q"][None]
    assert_refused(call, TARGET, "q", "rank 3")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("q", "int32"),
        ("g", "int8"),
        ("A_log", "bfloat16"),
        ("dt_bias", "float16"),
        ("initial_state", "bfloat16"),
        ("has_initial_state", "int8"),
        ("seqs", "uint32"),
        ("chunks", "float32"),
        ("checkpoints", "int16"),
    ],
)
def test_wrong_operand_type(name: str, dtype: str) -> None:
    call = make_call()
    call.operands[name] = np.nan_to_num(call.operands[name]).astype(jnp.dtype(dtype))
    assert_refused(call, TARGET, name)


@pytest.mark.parametrize("name", ["out", "final_state", "checkpoint_state"])
def test_wrong_result(name: str) -> None:
    call = make_call()
    good = call.results[name]
    call.results[name] = jax.ShapeDtypeStruct((good.shape[0] + 1, *good.shape[1:]), good.dtype)
    assert_refused(call, TARGET, f"{name} has shape [")
    call.results[name] = jax.ShapeDtypeStruct(good.shape, jnp.float16)
    assert_refused(call, TARGET, f"{name} has another element type")


def test_workspace_of_another_size() -> None:
    for groups in (1, 3):
        call = make_call(groups=groups)
        size = call.results["workspace"].shape[0]
        for smaller in (0, size - 1):
            call.results["workspace"] = jax.ShapeDtypeStruct((smaller,), jnp.uint8)
            assert_refused(call, f"workspace has {smaller} bytes, want {size}")
        call.results["workspace"] = jax.ShapeDtypeStruct((size + 64,), jnp.uint8)
        assert_right(call.run())


@pytest.mark.parametrize(
    ("name", "value", "groups"),
    [
        ("gate", 3, 1),
        ("gate", -1, 1),
        ("chunk_size", 48, 1),
        ("chunk_size", 0, 1),
        ("groups", 0, 1),
        ("groups", 65, 1),
        ("slab_chunks", 0, 1),
        ("slab_chunks", 1, 2),
    ],
)
def test_wrong_attribute(name: str, value: int, groups: int) -> None:
    call = make_call(groups=groups)
    call.attributes[name] = np.int32(value)
    assert_refused(call, name)


def test_channels_that_the_kernel_has_not() -> None:
    call = make_call()
    for name in ("q", "k", "g", "dt_bias", "initial_state"):
        call.operands[name] = call.operands[name][..., :32]
    for name in ("final_state", "checkpoint_state"):
        x = call.results[name]
        call.results[name] = jax.ShapeDtypeStruct((*x.shape[:-1], 32), x.dtype)
    assert_refused(call, "K is 32")


@pytest.mark.parametrize("name", ["scale", "gate", "l2norm"])
def test_attributes_of_another_program(name: str) -> None:
    """Missing, or of another type: a program of another version."""
    call = make_call()
    del call.attributes[name]
    assert_refused(call, "attributes")
    call.attributes[name] = np.float64(1)
    assert_refused(call, "expected", "got F64")


def test_too_few_operands() -> None:
    call = make_call()
    del call.operands["checkpoints"]
    assert_refused(call, "argument")


def corrupt(table: str, row: int, column: int, value: int) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        call.operands[table][row, column] = value

    return change


SEQUENCE, FIRST, ROWS, CHECKPOINT = range(4)  # columns of chunks
BIG = 2**31 - 1
TABLES: dict[str, Callable[[Call], None]] = {
    "chunk past the end": corrupt("chunks", 0, FIRST, 10_000),
    "chunk before the start": corrupt("chunks", 0, FIRST, -1),
    "chunk in another place": corrupt("chunks", 1, FIRST, 8),
    "chunk of no rows": corrupt("chunks", 1, ROWS, 0),
    "chunk of too many rows": corrupt("chunks", 1, ROWS, CHUNK + 1),
    "rows that overflow": corrupt("chunks", 0, ROWS, BIG),
    "chunk of another sequence": corrupt("chunks", 1, SEQUENCE, 2),
    "chunk of a sequence that is not": corrupt("chunks", 1, SEQUENCE, 9),
    "chunk of no sequence": corrupt("chunks", 1, SEQUENCE, -1),
    "checkpoint past the end": corrupt("chunks", 0, CHECKPOINT, 4),
    "checkpoint before the start": corrupt("chunks", 0, CHECKPOINT, -2),
    "padding that is not": corrupt("chunks", 7, SEQUENCE, 3),
    "too many chunks": corrupt("seqs", 0, 3, 100),
    "chunks that overflow": corrupt("seqs", 0, 3, BIG),
    "negative chunks": corrupt("seqs", 0, 3, -1),
    "first chunk past the end": corrupt("seqs", 3, 2, 1000),
    "first chunk of another": corrupt("seqs", 3, 2, 0),
    "a sequence left out": corrupt("seqs", 0, 3, 0),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("what", TABLES)
def test_corrupted_table(what: str, groups: int) -> None:
    """A table that ChunkMetadata did not make is an error, not an access out of bounds."""
    call = make_call(groups=groups)
    TABLES[what](call)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        call.run()
    assert re.search(r"metadata: (sequence \d|chunk row \d)", str(caught.value))


def test_works_after_all_that() -> None:
    assert_works()
    assert_right(make_call(groups=2).run())
