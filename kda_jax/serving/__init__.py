"""What a serving engine decides on the host: cache specs, checkpoint positions, prefix reuse."""

from ..pool_rows import StepRows, step_rows
from .cache_stats import CacheStats
from .hashing import chain_hashes
from .lease import Freed, Lease
from .plan import CheckpointPlan
from .positions import NULL_BLOCK, plan_checkpoints
from .prefix_cache import PrefixCache
from .rule import CheckpointRule
from .spec import KDACacheSpec, kda_cache_specs

__all__ = [
    "NULL_BLOCK",
    "CacheStats",
    "CheckpointPlan",
    "CheckpointRule",
    "Freed",
    "KDACacheSpec",
    "Lease",
    "PrefixCache",
    "StepRows",
    "chain_hashes",
    "kda_cache_specs",
    "plan_checkpoints",
    "step_rows",
]
