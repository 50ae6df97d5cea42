"""What a KDA layer is told (its config) and what it keeps of a prefix (its states)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class KDALayerConfig:
    """Shape and numerics of a layer. The defaults are Kimi-K3's.

    hidden: channels of x. heads, head_dim: H and K == V; the low rank of the gate is head_dim too.
    conv_width: W. lower_bound: of the log decay, in [-5, 0); None: the softplus gate.
    full_rank_gate: g_proj; False: g_a_proj and g_b_proj. fused_projections: q, k and v as one
    product and one convolution (qkv_proj [hidden, 3, H * K], qkv_conv1d [3, H * K, W]).
    rms_eps: inside the root of the output norm. dtype: of weights and activations (states of the
    recurrence are float32). backend: what chunk_kda_prefill is asked for unless the call says else.

    Raises:
      ValueError: a size is below 1, or there is no such dtype; names it.
    """

    hidden: int = 7168
    heads: int = 96
    head_dim: int = 128
    conv_width: int = 4
    lower_bound: float | None = -5.0
    rms_eps: float = 1e-5
    dtype: str = "bfloat16"
    backend: str = "auto"
    full_rank_gate: bool = True
    fused_projections: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "head_dim", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, want at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, want one of {', '.join(DTYPES)}")

    @property
    def channels(self) -> int:
        """Channels of each of q, k, v: heads * head_dim."""
        return self.heads * self.head_dim


class KDAState(NamedTuple):
    """All that the layer knows of a prefix, one row per sequence or per checkpoint.

    recurrent: [R, H, V, K] float32. conv: [R, 3 * H * K, W-1] in the layer's dtype, the last raw
    rows of the q, k and v projections, in this order.
    """

    recurrent: jax.Array
    conv: jax.Array


class KDACache(NamedTuple):
    """Where the sequences of a batch start.

    state: N = capacity.sequences rows. has_initial_state: bool [N]; a False row starts from zeros,
    whatever its state holds. None: all rows continue.
    """

    state: KDAState
    has_initial_state: jax.Array | None = None


class LayerStates(NamedTuple):
    """final: N rows, the end of each sequence. checkpoint: M rows, in the metadata's order."""

    final: KDAState
    checkpoint: KDAState
