"""Mixture of experts with a sigmoid router, at full width or in a latent space (Kimi-K3).

scores = sigmoid(x W^T)                                          float32, on the full width
choice = top k of scores + e_score_correction_bias               the bias only chooses
weight = scores[choice] / sum * routed_scaling_factor            DeepSeek-V3 (arXiv:2412.19437)
routed = sum of weight * expert(x)
       | up_proj(RMSNorm(sum of weight * expert(down_proj(x))))  latent
y      = routed + shared_experts(x)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..linear import Linear, normal
from .batch import Axes
from .config import ModelConfig
from .experts import Experts
from .mlp import MLP
from .norm import RMSNorm


class Router(nnx.Module):
    """weight: [E, hidden]; e_score_correction_bias: [E]; both float32."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.groups, self.top_groups = config.num_expert_group, config.topk_group
        self.renormalize = config.moe_renormalize
        self.softmax = config.moe_router_activation_func == "softmax"
        shape = (config.num_experts, config.hidden_size)
        wide = jnp.promote_types(jnp.dtype(config.dtype), jnp.float32)
        self.weight = normal(rngs, shape, wide, config.hidden_size**-0.5)
        self.e_score_correction_bias = nnx.Param(jnp.zeros(shape[:1], wide))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [R, hidden] -> choice int32 [R, k] and weight float32 [R, k]."""
        weight = self.weight[...]
        logits = jnp.matmul(x.astype(weight.dtype), weight.T, precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits, axis=-1) if self.softmax else jax.nn.sigmoid(logits)
        favour = scores + self.e_score_correction_bias[...]
        if self.groups > 1:
            favour = self._best_groups(favour)
        _, choice = lax.top_k(lax.stop_gradient(favour), self.top_k)
        chosen = jnp.take_along_axis(scores, choice, axis=-1)
        if self.renormalize:
            chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
        return choice.astype(jnp.int32), chosen * self.scaling

    def _best_groups(self, favour: jax.Array) -> jax.Array:
        """-inf outside the topk_group groups whose two best experts sum highest."""
        grouped = favour.reshape(favour.shape[0], self.groups, -1)
        best = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        _, kept = lax.top_k(best, self.top_groups)
        keep = jnp.any(kept[:, :, None] == jnp.arange(self.groups), axis=1)
        return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(favour.shape)


class MoE(nnx.Module):
    """See the module's docstring."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        hidden, dtype, act = config.hidden_size, config.dtype, config.activation
        inner, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
        self.num_experts, self.latent = config.num_experts, latent is not None
        self.shared = config.num_shared_experts > 0
        self.use_norm = latent is not None and config.latent_moe_use_norm
        self.gate = Router(config, rngs=rngs)
        self.experts = Experts(config.num_experts, latent or hidden, inner, act, dtype, rngs=rngs)
        if latent is not None:
            self.routed_expert_down_proj = Linear(hidden, latent, dtype, rngs=rngs)
            self.routed_expert_up_proj = Linear(latent, hidden, dtype, rngs=rngs)
        if self.use_norm:
            self.routed_expert_norm = RMSNorm(latent or hidden, config.rms_norm_eps, dtype)
        if self.shared:
            width = inner * config.num_shared_experts
            self.shared_experts = MLP(hidden, width, act, dtype, rngs=rngs)

    def __call__(self, x: jax.Array, valid: jax.Array, axes: Axes) -> jax.Array:
        """x [R, hidden], valid bool [R] (padding chooses no expert) -> [R, hidden], summed."""
        choice, weight = self.gate(x)
        choice = jnp.where(valid[:, None], choice, self.num_experts)
        inside = self.routed_expert_down_proj(x) if self.latent else x
        routed = axes.sum_experts(self.experts(inside, choice, weight, axes)).astype(x.dtype)
        if not self.latent:
            return routed + axes.sum_model(self.shared_experts(x)) if self.shared else routed
        if self.use_norm:
            routed = self.routed_expert_norm(routed)
        # The rows of the up projection may be split: each device then takes its part of the latent.
        kernel_rows = self.routed_expert_up_proj.kernel.shape[0]
        if kernel_rows != routed.shape[1]:
            first = axes.first(axes.model, kernel_rows)
            routed = lax.dynamic_slice_in_dim(routed, first, kernel_rows, axis=1)
        y = self.routed_expert_up_proj(routed)
        return axes.sum_model(y + self.shared_experts(x) if self.shared else y)
