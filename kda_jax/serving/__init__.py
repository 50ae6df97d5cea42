"""What a serving engine decides on the host: cache specs, checkpoint positions, prefix reuse."""

from .spec import KDACacheSpec, kda_cache_specs

__all__ = [
    "KDACacheSpec",
    "kda_cache_specs",
]
