"""config.json: the published fields and transformers', read into a `ModelConfig` and written.

A field that is absent means the Kimi-Linear form. Kimi-K3's fields sit in `text_config` of a
multimodal wrapper. Layer lists in configs count from 1; in a `ModelConfig` layers count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import Activation, ModelConfig

# Fields that keep their name and may be absent.
_SAME = (
    "q_lora_rank",
    "mla_use_output_gate",
    "num_experts",
    "moe_intermediate_size",
    "moe_router_activation_func",
    "topk_group",
    "routed_scaling_factor",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "attn_res_block_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "pad_token_id",
)
# Published name, and the names that transformers also takes.
_ALIASES = {
    "num_experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "moe_renormalize": ("moe_renormalize", "norm_topk_prob"),
    "num_expert_group": ("num_expert_group", "n_group"),
    "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
    "num_experts": ("num_experts", "num_local_experts"),
}


def from_config(hf_config: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """The config of a model from the dict in its config.json.

    Args:
      hf_config: Kimi-Linear's, transformers' kimi_linear, Kimi-K3's (fields in `text_config`) or
        its text part alone.
      **overrides: fields of `ModelConfig` that win, e.g. dtype or backend.

    Raises:
      ValueError: a field is missing or has a value that the models do not have; names it.
    """
    text = {**hf_config.get("text_config", {})} or dict(hf_config)
    for name in ("linear_attn_config", *_REQUIRED):
        if text.get(name) is None and not (name == "linear_attn_config" and "layer_types" in text):
            raise ValueError(f"{name} is missing from the config; is this a Kimi model's?")
    _refuse(text)
    fields: dict[str, Any] = {name: text[name] for name in _REQUIRED}
    fields |= {name: text[name] for name in _SAME if text.get(name) is not None}
    for name, aliases in _ALIASES.items():
        found = next((text[alias] for alias in aliases if text.get(alias) is not None), None)
        if found is not None:
            fields[name] = found
    fields |= _linear_fields(text)
    act = fields.pop("hidden_act", text.get("hidden_act", "silu"))
    fields["activation"] = Activation(
        act,
        float(text.get("activation_situ_beta") or 4.0),
        float(text.get("activation_situ_linear_beta") or 25.0),
    )
    eos = text.get("eos_token_id", hf_config.get("eos_token_id"))
    fields["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    is_k3 = "text_config" in hf_config or fields.get("attn_res_block_size") is not None
    fields["model_type"] = "kimi_k3" if is_k3 else "kimi_linear"
    dtype = text.get("dtype") or text.get("torch_dtype") or hf_config.get("dtype")
    fields["dtype"] = str(dtype or "bfloat16").removeprefix("torch.")
    return ModelConfig(**{**fields, **overrides})


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def _linear_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """What linear_attn_config and the rules for the kinds of layers say."""
    linear = dict(text.get("linear_attn_config") or {})
    layers = text["num_hidden_layers"]
    if "full_attn_layers" in linear:
        full = sorted(i - 1 for i in linear["full_attn_layers"])
        kda = sorted(i - 1 for i in linear.get("kda_layers", ()))
        if kda and sorted(full + kda) != list(range(layers)):
            raise ValueError(
                f"linear_attn_config: kda_layers and full_attn_layers name {len(full + kda)}"
                f" layers, want each of 1..{layers} once (num_hidden_layers)"
            )
    elif "layer_types" in text:
        full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    else:
        raise ValueError("linear_attn_config.full_attn_layers is missing from the config")
    if text.get("mlp_layer_types") is not None:
        moe = [i for i, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    else:
        first = text.get("first_k_dense_replace", 1)
        every = text.get("moe_layer_freq", 1)
        has_experts = any(text.get(name) for name in _ALIASES["num_experts"])
        moe = [i for i in range(layers) if i >= first and i % every == 0 and has_experts]
    return {
        "full_attn_layers": tuple(full),
        "moe_layers": tuple(moe),
        "linear_num_heads": linear.get("num_heads", text.get("linear_num_heads", 32)),
        "linear_head_dim": linear.get("head_dim", text.get("linear_head_dim", 128)),
        "short_conv_kernel_size": linear.get(
            "short_conv_kernel_size", text.get("linear_conv_kernel_dim", 4)
        ),
        "gate_lower_bound": linear.get("gate_lower_bound"),
        "use_full_rank_gate": bool(linear.get("use_full_rank_gate", False)),
    }


def _refuse(text: Mapping[str, Any]) -> None:
    """Values with which a model would be another one than those built here."""
    if text.get("mla_use_nope") is False:
        raise ValueError("mla_use_nope is False: MLA with rotary positions is not built here")
    if text.get("attention_bias"):
        raise ValueError("attention_bias is True: no projection has a bias here")
    if text.get("num_nextn_predict_layers"):
        raise ValueError(
            f"num_nextn_predict_layers is {text['num_nextn_predict_layers']}: multi-token"
            " prediction layers are not built here"
        )
    if (
        text.get("num_experts") is None
        and text.get("num_local_experts") is None
        and text.get("n_routed_experts") is not None
    ):
        raise ValueError(
            f"n_routed_experts is {text['n_routed_experts']}: give the number of experts as"
            " num_experts"
        )


def to_config(config: ModelConfig) -> dict[str, Any]:
    """The dict of a config.json from which `from_config` makes the same config."""
    kda = [i + 1 for i in range(config.num_hidden_layers) if not config.is_full_attention(i)]
    linear = {
        "kda_layers": kda,
        "full_attn_layers": [i + 1 for i in config.full_attn_layers],
        "num_heads": config.linear_num_heads,
        "head_dim": config.linear_head_dim,
        "short_conv_kernel_size": config.short_conv_kernel_size,
        "gate_lower_bound": config.gate_lower_bound,
        "use_full_rank_gate": config.use_full_rank_gate,
    }
    text: dict[str, Any] = {name: getattr(config, name) for name in (*_REQUIRED, *_SAME)}
    text |= {aliases[0]: getattr(config, name) for name, aliases in _ALIASES.items()}
    text |= {
        "num_key_value_heads": config.num_attention_heads,
        "linear_attn_config": linear,
        "mlp_layer_types": [
            "sparse" if config.is_moe(i) else "dense" for i in range(config.num_hidden_layers)
        ],
        "hidden_act": config.activation.name,
        "activation_situ_beta": config.activation.beta,
        "activation_situ_linear_beta": config.activation.linear_beta,
        "eos_token_id": list(config.eos_token_id) or None,
        "dtype": config.dtype,
        "mla_use_nope": True,
    }
    if config.model_type == "kimi_k3":
        return {"model_type": "kimi_k3", "text_config": {**text, "model_type": "kimi_linear"}}
    return {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], **text}
