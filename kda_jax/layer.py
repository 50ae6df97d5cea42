"""One Kimi Delta Attention layer as a flax.nnx module, in Kimi-K3's and in Kimi-Linear's form.

    q, k, v = silu(conv(proj(x)))            width-4 causal convolution per channel
    raw_g   = f_b_proj(f_a_proj(x))          raw_beta = b_proj(x)
    o       = KDA(q, k, v, raw_g, raw_beta, A_log, dt_bias)
    y       = o_proj(RMSNorm(o) * o_norm * sigmoid(gate(x)))            norm per head, float32
    gate    = g_proj (Kimi-K3) | g_b_proj of g_a_proj (Kimi-Linear)

Parameters carry the names of the published checkpoints (a projection's [out, in] weight is the
transpose of its kernel). The state is an argument and a result, never an attribute, so one layer
serves any number of requests and passes through jit, scan and export unchanged.

How many heads a call computes is read from its weights: under `jax.shard_map` with weights that are
split over heads, y is this device's part of a sum over devices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .conv import causal_conv1d_parts, causal_conv1d_step, token_positions
from .decode import kda_decode_step
from .layer_types import KDACache, KDALayerConfig, KDAState, LayerStates
from .linear import Linear, normal
from .metadata import ChunkMetadata
from .ops import chunk_kda_prefill

__all__ = [
    "KDACache",
    "KDALayerConfig",
    "KDAState",
    "KimiDeltaAttention",
    "LayerStates",
    "OpInputs",
]

# The range of dt_bias in the released weights: slow decay nearly everywhere.
_DT_BIAS_RANGE = (-7.8, -1.4)


class OpInputs(NamedTuple):
    """What a layer feeds to the operator: q, k, v, raw_g [1, T, H, K]; raw_beta [1, T, H]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    raw_g: jax.Array
    raw_beta: jax.Array


class Projected(NamedTuple):
    """Of some rows of x: raw q, k and v, the raw gate, each [R, H * K], and raw_beta [R, H]."""

    qkv: tuple[jax.Array, jax.Array, jax.Array]
    raw_g: jax.Array
    raw_beta: jax.Array


class KimiDeltaAttention(nnx.Module):
    """A KDA layer with seeded random weights; see the module's docstring for the formula.

    Projections are normal with variance 1 / fan-in, dt_bias lies in the range of the released
    weights, exp(A_log) in [1, 16] as the field initialises it.
    """

    def __init__(self, config: KDALayerConfig, *, rngs: nnx.Rngs | None):
        self.config = config
        dtype, channels = jnp.dtype(config.dtype), config.channels

        def linear(fan_in: int, fan_out: int) -> Linear:
            return Linear(fan_in, fan_out, config.dtype, rngs=rngs)

        # As published: float32 whatever the projections are. They are computed with in float32.
        wide = jnp.promote_types(dtype, jnp.float32)

        def conv(*shape: int) -> nnx.Param:
            return normal(rngs, (*shape, config.conv_width), wide, config.conv_width**-0.5)

        def uniform(size: int, low: float, high: float) -> jax.Array:
            if rngs is None:  # only the shapes matter
                return jnp.ones((size,), jnp.float32)
            return jax.random.uniform(rngs.params(), (size,), jnp.float32, low, high)

        if config.fused_projections:
            shape = (config.hidden, 3, channels)
            self.qkv_proj = normal(rngs, shape, dtype, config.hidden**-0.5)
            self.qkv_conv1d = conv(3, channels)
        else:
            self.q_proj = linear(config.hidden, channels)
            self.k_proj = linear(config.hidden, channels)
            self.v_proj = linear(config.hidden, channels)
            self.q_conv1d = conv(channels)
            self.k_conv1d = conv(channels)
            self.v_conv1d = conv(channels)
        self.f_a_proj = linear(config.hidden, config.head_dim)
        self.f_b_proj = linear(config.head_dim, channels)
        self.b_proj = linear(config.hidden, config.heads)
        self.A_log = nnx.Param(jnp.log(uniform(config.heads, 1.0, 16.0)))
        self.dt_bias = nnx.Param(uniform(channels, *_DT_BIAS_RANGE))
        self.o_norm = nnx.Param(jnp.ones((config.head_dim,), wide))
        if config.full_rank_gate:
            self.g_proj = linear(config.hidden, channels)
        else:
            self.g_a_proj = linear(config.hidden, config.head_dim)
            self.g_b_proj = linear(config.head_dim, channels)
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
        y, states, _ = self.step(x, metadata, cache, None, backend=backend)
        assert states is not None
        return y, states

    def step(
        self,
        x: jax.Array,
        metadata: ChunkMetadata | None,
        cache: KDACache | None,
        decode: KDAState | None,
        *,
        active: jax.Array | None = None,
        backend: str | None = None,
    ) -> tuple[jax.Array, LayerStates | None, KDAState | None]:
        """Decode rows first, then a packed prefill; either part may be missing.

        Args:
          x: [D + T, hidden] in the layer's dtype, zeros in padded rows of the prefill.
          metadata: of the last T rows; None: there are none.
          cache: as in `__call__`, for the prefill.
          decode: the states of the first D rows, one token each; None: there are none.
          active: bool [D]; a False row keeps its state. None: all.
          backend: of the prefill; the decode rows take the recurrent step.

        Returns:
          y [D + T, hidden], the states of the prefill, and the new states of the decode rows.

        Raises:
          ValueError, NotImplementedError: as in `__call__`.
        """
        D = 0 if decode is None else decode.recurrent.shape[0]
        raw = self.project(x)
        A_log, dt_bias = self.A_log[...], self.dt_bias_by_head()
        out, after, states = [], None, None
        if decode is not None:
            inputs, conv = self._decode_inputs(jax.tree.map(lambda r: r[:D], raw), decode, active)
            o, recurrent = kda_decode_step(
                *inputs,
                A_log,
                dt_bias,
                decode.recurrent,
                active=active,
                lower_bound=self.config.lower_bound,
            )
            out.append(o)
            after = KDAState(recurrent, conv)
        if metadata is not None:
            packed = jax.tree.map(lambda r: r[D:], raw)
            packed_inputs, conv_final, conv_inside = self._op_inputs(packed, metadata, cache)
            result = chunk_kda_prefill(
                *packed_inputs,
                A_log,
                dt_bias,
                metadata=metadata,
                initial_state=None if cache is None else cache.state.recurrent,
                has_initial_state=None if cache is None else cache.has_initial_state,
                lower_bound=self.config.lower_bound,
                backend=self.config.backend if backend is None else backend,
            )
            out.append(result.out[0])
            states = LayerStates(
                final=KDAState(result.final_state, conv_final),
                checkpoint=KDAState(result.checkpoint_state, conv_inside),
            )
        o = out[0] if len(out) == 1 else jnp.concatenate(out)
        return self.o_proj(self.gated_norm(o, x)), states, after

    def op_inputs(
        self, x: jax.Array, metadata: ChunkMetadata, cache: KDACache | None = None
    ) -> OpInputs:
        """The operator's inputs alone, e.g. to measure a backend on a real layer's values."""
        raw = self.project(self._without_padding(x, metadata))
        return self._op_inputs(raw, metadata, cache)[0]

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

    def dt_bias_by_head(self) -> jax.Array:
        """[H, K]."""
        return self.dt_bias[...].reshape(-1, self.config.head_dim)

    def project(self, x: jax.Array) -> Projected:
        """All that the layer makes of its rows before the convolutions, but for the gate of o."""
        if self.config.fused_projections:
            weight = self.qkv_proj[...]
            together = jnp.einsum(
                "th,hpc->ptc", x.astype(weight.dtype), weight, precision=jax.lax.Precision.HIGHEST
            )
            qkv = together[0], together[1], together[2]
        else:
            qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        raw_g = self.f_b_proj(self.f_a_proj(x))
        return Projected(qkv, raw_g, self.b_proj(x))

    def conv_weights(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of q, k and v, [H * K, W] each."""
        if self.config.fused_projections:
            weight = self.qkv_conv1d[...]
            return weight[0], weight[1], weight[2]
        return self.q_conv1d[...], self.k_conv1d[...], self.v_conv1d[...]

    def _op_inputs(
        self, raw: Projected, metadata: ChunkMetadata, cache: KDACache | None
    ) -> tuple[OpInputs, jax.Array, jax.Array]:
        """The operator's inputs, and the final and checkpoint states of the convolutions."""
        c, channels = self.config, raw.raw_g.shape[1]
        has_state = None if cache is None else cache.has_initial_state
        if cache is not None:
            want = (metadata.capacity.sequences, 3 * channels, c.conv_width - 1)
            if cache.state.conv.shape != want:
                raise ValueError(
                    f"cache.state.conv has shape {cache.state.conv.shape}, want {want}"
                )
        result = causal_conv1d_parts(
            raw.qkv,
            self.conv_weights(),
            metadata,
            initial_state=None if cache is None else cache.state.conv,
            has_initial_state=has_state,
        )
        shape = 1, raw.raw_g.shape[0], -1, c.head_dim
        q, k, v = (y.reshape(shape) for y in result.ys)
        inputs = OpInputs(q, k, v, raw.raw_g.reshape(q.shape), raw.raw_beta[None])
        return inputs, result.final_state, result.checkpoint_state

    def _decode_inputs(
        self, raw: Projected, state: KDAState, active: jax.Array | None
    ) -> tuple[OpInputs, jax.Array]:
        """The inputs of `kda_decode_step`, [D, H, ...], and the convolutions' new states."""
        channels, shape = raw.raw_g.shape[1], (raw.raw_g.shape[0], -1, self.config.head_dim)
        convolved, after = [], []
        for part, (x, weight) in enumerate(zip(raw.qkv, self.conv_weights(), strict=True)):
            old = state.conv[:, part * channels : (part + 1) * channels]
            y, new = causal_conv1d_step(x, weight, old, active=active)
            convolved.append(y.reshape(shape))
            after.append(new)
        q, k, v = convolved
        inputs = OpInputs(q, k, v, raw.raw_g.reshape(shape), raw.raw_beta)
        return inputs, jnp.concatenate(after, 1)

    def gated_norm(self, o: jax.Array, x: jax.Array) -> jax.Array:
        """RMSNorm(o) * o_norm * sigmoid(gate(x)), o [T, H, V] -> [T, H * V]."""
        compute = jnp.promote_types(o.dtype, jnp.float32)
        gate = self.g_proj(x) if self.config.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        wide = o.astype(compute)
        norm = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.rms_eps)
        gate = jax.nn.sigmoid(gate.astype(compute)).reshape(o.shape)
        out = wide * norm * self.o_norm[...].astype(compute) * gate
        return out.astype(o.dtype).reshape(o.shape[0], -1)
