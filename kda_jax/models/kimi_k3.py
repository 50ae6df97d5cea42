"""Kimi-K3's text model: the layers of Kimi-Linear, with attention residuals over blocks of layers.

The stream p is the running sum of the current block of `attn_res_block_size` layers; a bank holds
the sums of the blocks before it, and the embedding as the first. Every sublayer, and the head,
reads a mix of both (attention_residual.py). In layer l, counted from 0:

    p_attn = attention(norm(mix(p, bank)))
    at the first layer of a block:  bank gets p, p = p_attn          else: p += p_attn
    p     += mlp(norm(mix(p, bank)))
"""

from __future__ import annotations

import jax
from flax import nnx

from .attention_residual import AttentionResidual
from .batch import Axes, Batch
from .cache import LayerState
from .config import ModelConfig
from .decoder import LanguageModel, States


class KimiK3(LanguageModel):
    """See the module's docstring."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        if config.attn_res_block_size is None:
            raise ValueError(
                "attn_res_block_size is None: that is Kimi-Linear's stream; use KimiLinear"
            )
        super().__init__(config, rngs=rngs)

        def residual() -> AttentionResidual:
            eps, dtype = config.rms_norm_eps, config.dtype
            return AttentionResidual(config.hidden_size, eps, dtype, rngs=rngs)

        self.self_attention_res = nnx.List([residual() for _ in self.layers])
        self.mlp_res = nnx.List([residual() for _ in self.layers])
        self.output_attn_res = residual()

    def stack(
        self,
        x: jax.Array,
        batch: Batch,
        prefill: tuple[LayerState | None, ...],
        decode: tuple[LayerState | None, ...],
        backend: str | None,
        axes: Axes,
    ) -> tuple[jax.Array, States, list[jax.Array]]:
        block = self.config.attn_res_block_size
        assert block is not None
        bank: list[jax.Array] = []
        streams, states = [], []
        for i, layer in enumerate(self.layers):
            streams.append(x)
            mixed = self.self_attention_res[i](x, bank)
            attended = layer.attention(mixed, batch, prefill[i], decode[i], backend, axes)
            if i % block == 0:
                bank.append(x)
                x = attended.y
            else:
                x = x + attended.y
            x = x + layer.feed_forward(self.mlp_res[i](x, bank), batch, axes)
            states.append(attended[1:])
        return self.output_attn_res(x, bank), States(*zip(*states, strict=True)), streams
