"""Kimi Delta Attention for JAX: chunk prefill with states exported inside the prompt."""

from .backends import checkpoint_alignment, register_backend, supports
from .export import export_checks
from .metadata import Capacity, ChunkMetadata
from .ops import chunk_kda, chunk_kda_prefill
from .types import Backend, CallSpec, KDAPoolResult, KDAResult, PoolBackend, StatePool
from .warming import warmup

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CallSpec",
    "Capacity",
    "ChunkMetadata",
    "KDAPoolResult",
    "KDAResult",
    "PoolBackend",
    "StatePool",
    "__version__",
    "checkpoint_alignment",
    "chunk_kda",
    "chunk_kda_prefill",
    "export_checks",
    "register_backend",
    "supports",
    "warmup",
]
