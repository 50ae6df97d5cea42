"""What `jax.export` needs to know of this library.

Importing the package makes `ChunkMetadata`, `StepRows` and all results and states serializable, so
that they may be arguments and results of an exported function, and registers the
custom calls, so that a process that only loads an exported program can run it. A program that may
contain one needs a safety check off when it is exported, since JAX promises stability for its own
calls only::

    checks = kda_jax.export_checks()
    jax.export.export(fn, platforms=["cpu", "cuda", "rocm"], disabled_checks=checks)

The names of the calls carry a version (`kda_prefill_v1`, `kda_prefill_pool_v1` for states in a
pool, `kda_conv_v1` for the short convolutions): under that name their operands never change their
meaning.
"""

from __future__ import annotations

import dataclasses
import json

from jax import export as jax_export

from .conv import ConvPoolResult, ConvResult
from .conv_parts import ConvPartsPoolResult, ConvPartsResult
from .layer_types import KDACache, KDAState, LayerStates
from .metadata import Capacity, ChunkMetadata
from .native import CONV_TARGET, POOL_TARGET, TARGET, status
from .pool_rows import StepRows
from .types import KDAPoolResult, KDAResult


def export_checks() -> list[jax_export.DisabledSafetyCheck]:
    """The ``disabled_checks`` with which `jax.export.export` accepts the custom calls."""
    names = (TARGET, POOL_TARGET, CONV_TARGET)
    return [jax_export.DisabledSafetyCheck.custom_call(name) for name in names]


def _pack(static: tuple[int, Capacity]) -> bytes:
    chunk_size, capacity = static
    return json.dumps([chunk_size, *dataclasses.astuple(capacity)]).encode()


def _unpack(data: bytes) -> tuple[int, Capacity]:
    chunk_size, *sizes = json.loads(data)
    return chunk_size, Capacity(*sizes)


for _kind in (
    *(KDAResult, KDAPoolResult, StepRows, KDAState, KDACache, LayerStates),
    *(ConvResult, ConvPoolResult, ConvPartsResult, ConvPartsPoolResult),
):
    jax_export.register_namedtuple_serialization(_kind, serialized_name=f"kda_jax.{_kind.__name__}")
jax_export.register_pytree_node_serialization(
    ChunkMetadata,
    serialized_name="kda_jax.ChunkMetadata",
    serialize_auxdata=_pack,
    deserialize_auxdata=_unpack,
)
status()  # never raises
