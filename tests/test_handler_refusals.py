"""The CPU's FFI handler, called past the library: what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handler_call import CHUNK, Call, assert_right, assert_works, make_call
from programs import needs_fused

from kda_jax.native import TARGET

pytestmark = [needs_fused, pytest.mark.usefixtures("on_cpu")]


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
