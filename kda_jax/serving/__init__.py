"""What a serving engine decides on the host: cache specs, checkpoint positions, prefix reuse."""

from .positions import NULL_BLOCK, CheckpointPlan, CheckpointRule, plan_checkpoints
from .spec import KDACacheSpec, kda_cache_specs

__all__ = [
    "NULL_BLOCK",
    "CheckpointPlan",
    "CheckpointRule",
    "KDACacheSpec",
    "kda_cache_specs",
    "plan_checkpoints",
]
