"""What `jax.export` needs to know of this library.

Importing the package makes `KDAResult`, `KDAPoolResult` and `ChunkMetadata` serializable, so that
they may be results and arguments of an exported function, and registers the custom call, so that a
process that only loads an exported program can run it. A program that may contain the custom call
needs one safety check off when it is exported, since JAX promises stability for its own calls
only::

    checks = kda_jax.export_checks()
    jax.export.export(fn, platforms=["cpu", "cuda", "rocm"], disabled_checks=checks)

The call's name carries a version (`kda_prefill_v1`): under that name its operands never change
their meaning.
"""

from __future__ import annotations

import dataclasses
import json

from jax import export as jax_export

from .metadata import Capacity, ChunkMetadata
from .native import TARGET, status
from .types import KDAPoolResult, KDAResult


def export_checks() -> list[jax_export.DisabledSafetyCheck]:
    """The ``disabled_checks`` with which `jax.export.export` accepts the custom call."""
    return [jax_export.DisabledSafetyCheck.custom_call(TARGET)]


def _pack(static: tuple[int, Capacity]) -> bytes:
    chunk_size, capacity = static
    return json.dumps([chunk_size, *dataclasses.astuple(capacity)]).encode()


def _unpack(data: bytes) -> tuple[int, Capacity]:
    chunk_size, *sizes = json.loads(data)
    return chunk_size, Capacity(*sizes)


jax_export.register_namedtuple_serialization(KDAResult, serialized_name="kda_jax.KDAResult")
jax_export.register_namedtuple_serialization(KDAPoolResult, serialized_name="kda_jax.KDAPoolResult")
jax_export.register_pytree_node_serialization(
    ChunkMetadata,
    serialized_name="kda_jax.ChunkMetadata",
    serialize_auxdata=_pack,
    deserialize_auxdata=_unpack,
)
status()  # never raises
