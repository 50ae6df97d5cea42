"""What a model is: the fields of a published config.json, checked and under one set of names."""

from __future__ import annotations

import dataclasses

import jax

from ..layer_types import KDALayerConfig
from .fields import check


@dataclasses.dataclass(frozen=True)
class Activation:
    """Of every MLP: ``silu(gate) * up``, or SiTU with its two bounds (float32)."""

    name: str = "silu"
    beta: float = 4.0
    linear_beta: float = 25.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Kimi model's text part. The field names are those of config.json unless said.

    full_attn_layers: the layers (from 0) with MLA; all others have KDA.
    moe_layers: the layers (from 0) with experts; all others have a dense MLP.
    linear_num_heads, linear_head_dim, short_conv_kernel_size, gate_lower_bound,
    use_full_rank_gate: from linear_attn_config. gate_lower_bound None: the softplus gate.
    attn_res_block_size: None: a plain residual stream (Kimi-Linear).
    routed_expert_hidden_size: None: experts at full width.
    dtype: of weights and activations. backend: of the KDA prefill, unless a call says else.
    fused_projections: q, k and v of a KDA layer as one product (not a field of config.json).

    Raises:
      ValueError: a field has a value that the models do not have; names it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    full_attn_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    linear_num_heads: int
    linear_head_dim: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    num_expert_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    attn_res_block_size: int | None = None
    activation: Activation = Activation()
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    max_position_embeddings: int = 1048576
    dtype: str = "bfloat16"
    backend: str = "auto"
    fused_projections: bool = False

    def __post_init__(self) -> None:
        parts = {f"activation.{name}": x for name, x in vars(self.activation).items()}
        check(vars(self) | parts, {})
        for name in ("full_attn_layers", "moe_layers"):
            for layer in getattr(self, name):
                if not 0 <= layer < self.num_hidden_layers:
                    raise ValueError(
                        f"{name} names layer {layer} (from 0); num_hidden_layers is"
                        f" {self.num_hidden_layers}"
                    )
        if not self.moe_layers:
            return
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_token is {self.num_experts_per_token}, want 1.."
                f"{self.num_experts} (num_experts)"
            )
        if self.moe_intermediate_size < 1:
            raise ValueError(
                f"moe_intermediate_size is {self.moe_intermediate_size}, want at least 1:"
                " layers with experts need it"
            )
        if self.num_expert_group < 1 or self.num_experts % self.num_expert_group:
            raise ValueError(
                f"num_expert_group is {self.num_expert_group}, want a divisor of num_experts,"
                f" {self.num_experts}"
            )
        if not 1 <= self.topk_group <= self.num_expert_group:
            raise ValueError(
                f"topk_group is {self.topk_group}, want 1..{self.num_expert_group}"
                " (num_expert_group)"
            )
        reachable = self.num_experts // self.num_expert_group * self.topk_group
        if self.num_experts_per_token > reachable:
            raise ValueError(
                f"num_experts_per_token is {self.num_experts_per_token}, want at most {reachable}:"
                f" the experts in topk_group = {self.topk_group} groups"
            )

    @property
    def kda(self) -> KDALayerConfig:
        """The config of a KDA layer."""
        return KDALayerConfig(
            hidden=self.hidden_size,
            heads=self.linear_num_heads,
            head_dim=self.linear_head_dim,
            conv_width=self.short_conv_kernel_size,
            lower_bound=self.gate_lower_bound,
            rms_eps=self.rms_norm_eps,
            dtype=self.dtype,
            backend=self.backend,
            full_rank_gate=self.use_full_rank_gate,
            fused_projections=self.fused_projections,
        )

    def is_full_attention(self, layer: int) -> bool:
        """Whether the layer (from 0) has MLA rather than KDA."""
        return layer in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether the layer (from 0) has experts rather than a dense MLP."""
        return layer in self.moe_layers


def check_x64(dtype: str) -> None:
    """Refuses float64 where JAX would make float32 of it, with no more than a warning.

    Raises:
      ValueError: says what to turn on, or which dtype to take.
    """
    x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    if dtype == "float64" and not x64:
        raise ValueError(
            "dtype is 'float64', which needs jax_enable_x64: turn it on with"
            " jax.config.update('jax_enable_x64', True), or take dtype='float32'"
        )
