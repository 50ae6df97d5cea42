"""Serving: cache specs, checkpoint positions, prefix reuse, and an engine that uses them."""

from ..pool_rows import StepRows, step_rows
from .build import build_engine
from .cache_stats import CacheStats
from .engine import Engine, EngineBusyError, EngineClosedError
from .engine_config import EngineConfig, PoolSizes
from .hashing import chain_hashes
from .lease import Freed, Lease
from .plan import CheckpointPlan
from .pools import Pools
from .positions import NULL_BLOCK, plan_checkpoints
from .prefix_cache import PrefixCache
from .request import Output, Request, SamplingParams
from .rule import CheckpointRule
from .running import StepPlan
from .scheduler import Scheduler, SchedulerStats
from .spec import KDACacheSpec, kda_cache_specs
from .warm import warm

__all__ = [
    "NULL_BLOCK",
    "CacheStats",
    "CheckpointPlan",
    "CheckpointRule",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "Freed",
    "KDACacheSpec",
    "Lease",
    "Output",
    "PoolSizes",
    "Pools",
    "PrefixCache",
    "Request",
    "SamplingParams",
    "Scheduler",
    "SchedulerStats",
    "StepPlan",
    "StepRows",
    "build_engine",
    "chain_hashes",
    "kda_cache_specs",
    "plan_checkpoints",
    "step_rows",
    "warm",
]
