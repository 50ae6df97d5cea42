"""Which backend a command's calls go to, and how it says so."""

from __future__ import annotations

from ..backends import Support, supports
from ..layer import KDALayerConfig
from .documents import CHUNK_SIZE
from .errors import CliError


def which(config: KDALayerConfig, backend: str, *, checkpoints: bool = False) -> Support:
    """The backend that a layer's call goes to and why, or an error that says why not."""
    support = supports(
        backend,
        dtype=config.dtype,
        K=config.head_dim,
        V=config.head_dim,
        H=config.heads,
        lower_bound=config.lower_bound,
        chunk_size=CHUNK_SIZE,
        checkpoints=checkpoints,
    )
    if not support:
        raise CliError(f"--backend {backend}: {support.reason} (see `python -m kda_jax doctor`)")
    return support


def text(asked: str, support: Support) -> str:
    """Says it in a line; 'auto' may mean plain JAX, and why should be seen."""
    return (
        f"{'' if asked == support.backend else f'{asked} -> '}{support.backend}: {support.reason}"
    )
