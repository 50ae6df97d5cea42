"""One Kimi Delta Attention layer, in Kimi-K3's form, as a flax.nnx module.

    q, k, v = silu(conv(proj(x)))            width-4 causal convolution per channel
    raw_g   = f_b_proj(f_a_proj(x))          raw_beta = b_proj(x)
    o       = KDA(q, k, v, raw_g, raw_beta, A_log, dt_bias)
    y       = o_proj(RMSNorm(o) * o_norm * sigmoid(g_proj(x)))          norm per head, float32

Parameters carry the names of the published checkpoints (a projection's [out, in] weight is the
transpose of its nnx kernel). The state is an argument and a result, never an attribute, so one
layer serves any number of requests and passes through jit, scan and export unchanged.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .conv import causal_conv1d, token_positions
from .metadata import ChunkMetadata
from .ops import chunk_kda_prefill

_DTYPES = ("bfloat16", "float16", "float32", "float64")
# The range of dt_bias in the released weights: slow decay nearly everywhere.
_DT_BIAS_RANGE = (-7.8, -1.4)


@dataclasses.dataclass(frozen=True)
class KDALayerConfig:
    """Shape and numerics of a layer. The defaults are Kimi-K3's.

    hidden: channels of x. heads, head_dim: H and K == V; the low rank of the gate is head_dim too.
    conv_width: W. lower_bound: of the log decay, in [-5, 0); None: the softplus gate.
    rms_eps: inside the root of the output norm. dtype: of weights and activations (states of the
    recurrence are float32). backend: what chunk_kda_prefill is asked for unless the call says else.
    """

    hidden: int = 7168
    heads: int = 96
    head_dim: int = 128
    conv_width: int = 4
    lower_bound: float | None = -5.0
    rms_eps: float = 1e-5
    dtype: str = "bfloat16"
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "head_dim", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, want at least 1")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, want one of {', '.join(_DTYPES)}")

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


class OpInputs(NamedTuple):
    """What one layer feeds to chunk_kda_prefill, [1, T, ...], beside its A_log and dt_bias."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    raw_g: jax.Array
    raw_beta: jax.Array


class KimiDeltaAttention(nnx.Module):
    """A KDA layer with seeded random weights; see the module's docstring for the formula.

    Projections are normal with variance 1 / fan-in, dt_bias lies in the range of the released
    weights, exp(A_log) in [1, 16] as the field initialises it.
    """

    def __init__(self, config: KDALayerConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtype, channels = jnp.dtype(config.dtype), config.channels

        def linear(fan_in: int, fan_out: int) -> nnx.Linear:
            # A TF32 product is not a float32 one; for half precision the setting changes nothing.
            return nnx.Linear(
                fan_in,
                fan_out,
                use_bias=False,
                dtype=dtype,
                param_dtype=dtype,
                precision=jax.lax.Precision.HIGHEST,
                kernel_init=nnx.initializers.normal(fan_in**-0.5),
                rngs=rngs,
            )

        def conv_weight() -> nnx.Param:
            scale = config.conv_width**-0.5
            shape = (channels, config.conv_width)
            return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))

        self.q_proj = linear(config.hidden, channels)
        self.k_proj = linear(config.hidden, channels)
        self.v_proj = linear(config.hidden, channels)
        self.q_conv1d = conv_weight()
        self.k_conv1d = conv_weight()
        self.v_conv1d = conv_weight()
        self.f_a_proj = linear(config.hidden, config.head_dim)
        self.f_b_proj = linear(config.head_dim, channels)
        self.b_proj = linear(config.hidden, config.heads)
        low, high = _DT_BIAS_RANGE
        rate = jax.random.uniform(rngs.params(), (config.heads,), jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(rate))
        self.dt_bias = nnx.Param(
            jax.random.uniform(rngs.params(), (channels,), jnp.float32, low, high)
        )
        self.o_norm = nnx.Param(jnp.ones((config.head_dim,), dtype))
        self.g_proj = linear(config.hidden, channels)
        self.o_proj = linear(channels, config.hidden)

    def __call__(
        self,
        x: jax.Array,
        metadata: ChunkMetadata,
        cache: KDACache | None = None,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, LayerStates]:
        """Prefill a packed batch.

        Args:
          x: [T, hidden], floating, T >= metadata's token capacity; rows outside every sequence may
            hold anything.
          metadata: sequences and checkpoints.
          cache: where the sequences start; None: from nothing.
          backend: overrides config.backend.

        Returns:
          y [T, hidden] in the layer's dtype, zeros in rows of padding, and the states.

        Raises:
          ValueError, NotImplementedError: as chunk_kda_prefill and causal_conv1d do.
        """
        x = self._without_padding(x, metadata)
        inputs, conv_final, conv_inside = self._op_inputs(x, metadata, cache)
        result = chunk_kda_prefill(
            *inputs,
            self.A_log[...],
            self.dt_bias[...].reshape(self.config.heads, self.config.head_dim),
            metadata=metadata,
            initial_state=None if cache is None else cache.state.recurrent,
            has_initial_state=None if cache is None else cache.has_initial_state,
            lower_bound=self.config.lower_bound,
            backend=self.config.backend if backend is None else backend,
        )
        y = self.o_proj(self._gated_norm(result.out[0], x))
        states = LayerStates(
            final=KDAState(result.final_state, conv_final),
            checkpoint=KDAState(result.checkpoint_state, conv_inside),
        )
        return y, states

    def op_inputs(
        self, x: jax.Array, metadata: ChunkMetadata, cache: KDACache | None = None
    ) -> OpInputs:
        """The operator's inputs alone, e.g. to measure a backend on a real layer's values."""
        return self._op_inputs(self._without_padding(x, metadata), metadata, cache)[0]

    def empty_cache(self, sequences: int) -> KDACache:
        """A cache of zeros whose rows all start afresh; fill the rows that continue a prefix."""
        c = self.config
        state = KDAState(
            recurrent=jnp.zeros((sequences, c.heads, c.head_dim, c.head_dim), jnp.float32),
            conv=jnp.zeros((sequences, 3 * c.channels, c.conv_width - 1), c.dtype),
        )
        return KDACache(state, jnp.zeros((sequences,), jnp.bool_))

    def _without_padding(self, x: jax.Array, metadata: ChunkMetadata) -> jax.Array:
        """x in the layer's dtype, zeros in padded rows: no projection has a bias, so they stay."""
        if x.ndim != 2 or x.shape[1] != self.config.hidden:
            raise ValueError(f"x has shape {x.shape}, want (T, {self.config.hidden})")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x is {x.dtype}, want a floating dtype")
        used = token_positions(metadata, x.shape[0]) >= 0
        return jnp.where(used[:, None], x, jnp.zeros((), x.dtype)).astype(self.config.dtype)

    def _op_inputs(
        self, x: jax.Array, metadata: ChunkMetadata, cache: KDACache | None
    ) -> tuple[OpInputs, jax.Array, jax.Array]:
        """The operator's inputs, and the final and checkpoint states of the convolutions."""
        c = self.config
        has_state = None if cache is None else cache.has_initial_state
        if cache is not None:
            want = (metadata.capacity.sequences, 3 * c.channels, c.conv_width - 1)
            if cache.state.conv.shape != want:
                raise ValueError(
                    f"cache.state.conv has shape {cache.state.conv.shape}, want {want}"
                )
        convolved, final, inside = [], [], []
        parts = (
            (self.q_proj, self.q_conv1d),
            (self.k_proj, self.k_conv1d),
            (self.v_proj, self.v_conv1d),
        )
        for part, (proj, weight) in enumerate(parts):
            rows = slice(part * c.channels, (part + 1) * c.channels)
            state = None if cache is None else cache.state.conv[:, rows]
            result = causal_conv1d(
                proj(x), weight[...], metadata, initial_state=state, has_initial_state=has_state
            )
            convolved.append(result.y.reshape(1, -1, c.heads, c.head_dim))
            final.append(result.final_state)
            inside.append(result.checkpoint_state)
        raw_g = self.f_b_proj(self.f_a_proj(x)).reshape(1, -1, c.heads, c.head_dim)
        q, k, v = convolved
        inputs = OpInputs(q, k, v, raw_g, self.b_proj(x)[None])
        return inputs, jnp.concatenate(final, 1), jnp.concatenate(inside, 1)

    def _gated_norm(self, o: jax.Array, x: jax.Array) -> jax.Array:
        """RMSNorm(o) * o_norm * sigmoid(g_proj(x)), o [T, H, V] -> [T, H * V]."""
        compute = jnp.promote_types(o.dtype, jnp.float32)
        wide = o.astype(compute)
        norm = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.rms_eps)
        gate = jax.nn.sigmoid(self.g_proj(x).astype(compute)).reshape(o.shape)
        out = wide * norm * self.o_norm[...].astype(compute) * gate
        return out.astype(o.dtype).reshape(o.shape[0], -1)
