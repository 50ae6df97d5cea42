"""config.json: the published fields and transformers', read into a `ModelConfig` and written.

A field that is absent means the Kimi-Linear form. Kimi-K3's fields sit in `text_config` of a
multimodal wrapper. Layer lists in configs count from 1; in a `ModelConfig` layers count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import Activation, ModelConfig
from .fields import COUNT, LAYERS, check, expect, integer, one_of, shown
from .spelling import check_spelling

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

    A field that no model here has is passed over, as published configs hold many of them, unless
    it is almost called as one that they have.

    Args:
      hf_config: Kimi-Linear's, transformers' kimi_linear, Kimi-K3's (fields in `text_config`) or
        its text part alone.
      **overrides: fields of `ModelConfig` that win, e.g. dtype or backend.

    Raises:
      ValueError: a field is missing or has a value that the models do not have; says which, by its
        name in hf_config, and what it should be. Or a field is misspelt.
      TypeError: hf_config is no dict.
    """
    if not isinstance(hf_config, Mapping):
        raise TypeError(
            f"hf_config is {shown(hf_config)}, want the dict in a config.json:"
            " json.load(open('config.json')), or from_pretrained(folder) for the model"
        )
    text = _text_part(hf_config)
    check_spelling(text, _KNOWN)
    for name in ("linear_attn_config", *_REQUIRED):
        if text.get(name) is None and not (name == "linear_attn_config" and "layer_types" in text):
            raise ValueError(
                f"{name} is missing from the config: want all fields of Kimi-Linear's or Kimi-K3's"
            )
    _refuse(text)
    fields: dict[str, Any] = {name: text[name] for name in _REQUIRED}
    fields |= {name: text[name] for name in _SAME if text.get(name) is not None}
    names: dict[str, str] = {}
    for name, aliases in _ALIASES.items():
        found = next((alias for alias in aliases if text.get(alias) is not None), None)
        if found is not None:
            fields[name], names[name] = text[found], found
    expect("num_hidden_layers", text["num_hidden_layers"], LAYERS)
    fields |= _linear_fields(text, names)
    fields |= _layer_kinds(text)
    for name, key, default in (
        ("name", "hidden_act", "silu"),
        ("beta", "activation_situ_beta", 4.0),
        ("linear_beta", "activation_situ_linear_beta", 25.0),
    ):
        fields[f"activation.{name}"] = _value(text, key, default)
        names[f"activation.{name}"] = key
    eos = text.get("eos_token_id", hf_config.get("eos_token_id"))
    fields["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    is_k3 = text is not hf_config or fields.get("attn_res_block_size") is not None
    fields["model_type"] = "kimi_k3" if is_k3 else "kimi_linear"
    dtype = text.get("dtype") or text.get("torch_dtype") or hf_config.get("dtype")
    fields["dtype"] = str(dtype or "bfloat16").removeprefix("torch.")
    check({name: x for name, x in fields.items() if name not in overrides}, names)
    parts = [fields.pop(f"activation.{name}") for name in ("name", "beta", "linear_beta")]
    fields["activation"] = Activation(parts[0], *map(float, parts[1:]))
    return ModelConfig(**{**fields, **overrides})


def _text_part(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text model, of a model that is built here."""
    text = hf_config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ValueError(f"text_config is {shown(text)}, want an object with the model's fields")
    text = text or hf_config
    for each in (hf_config, text):
        # The wrapper's name differs between releases; whether the model is one of those built here
        # is decided by its fields. This is to name another model by its name.
        kind = each.get("model_type", "kimi")
        if not isinstance(kind, str) or not kind.startswith("kimi"):
            raise ValueError(f"model_type is {shown(kind)}, want kimi_linear or kimi_k3")
    return text


def _value(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """null is as good as absent."""
    value = fields.get(name)
    return default if value is None else value


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


_LINEAR = (
    "kda_layers",
    "full_attn_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "gate_lower_bound",
    "use_full_rank_gate",
)
_KNOWN = frozenset(
    (
        *_SAME,
        *_REQUIRED,
        *(alias for aliases in _ALIASES.values() for alias in aliases),
        "text_config",
        "model_type",
        "dtype",
        "torch_dtype",
        "eos_token_id",
        "linear_attn_config",
        "layer_types",
        "mlp_layer_types",
        "linear_num_heads",
        "linear_head_dim",
        "linear_conv_kernel_dim",
        "first_k_dense_replace",
        "moe_layer_freq",
        "hidden_act",
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "mla_use_nope",
        "attention_bias",
        "num_nextn_predict_layers",
        "n_routed_experts",
    )
)


def _linear_fields(text: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """What linear_attn_config says, or transformers' fields; names gets where each was found."""
    linear = _value(text, "linear_attn_config", {})
    if not isinstance(linear, Mapping):
        raise ValueError(f"linear_attn_config is {shown(linear)}, want an object with its fields")
    check_spelling(linear, _LINEAR, "linear_attn_config.")
    found = {}
    for name, key, theirs, default in (
        ("linear_num_heads", "num_heads", "linear_num_heads", 32),
        ("linear_head_dim", "head_dim", "linear_head_dim", 128),
        ("short_conv_kernel_size", "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        ("gate_lower_bound", "gate_lower_bound", "", None),
        ("use_full_rank_gate", "use_full_rank_gate", "", False),
    ):
        inside = linear.get(key) is not None or not theirs
        found[name] = _value(linear, key, default) if inside else _value(text, theirs, default)
        names[name] = f"linear_attn_config.{key}" if inside else theirs
    return found


def _layer_kinds(text: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have full attention and which have experts, counted from 0."""
    count, linear = text["num_hidden_layers"], _value(text, "linear_attn_config", {})
    if linear.get("full_attn_layers") is not None:
        full, kda = (
            _from_one(f"linear_attn_config.{name}", _value(linear, name, []), count)
            for name in ("full_attn_layers", "kda_layers")
        )
        listed = linear.get("kda_layers") is not None
        if listed and (len(full + kda) != count or len({*full, *kda}) != count):
            raise ValueError(
                f"linear_attn_config: kda_layers and full_attn_layers name {len(full + kda)}"
                f" layers, want each of 1..{count} once (num_hidden_layers)"
            )
    elif text.get("layer_types") is not None:
        full = _of_kind("layer_types", text, "full_attention", "linear_attention")
    else:
        raise ValueError(
            "linear_attn_config.full_attn_layers is missing from the config: want a list of the"
            " layers, from 1, that have full attention"
        )
    if text.get("mlp_layer_types") is not None:
        moe = _of_kind("mlp_layer_types", text, "sparse", "dense")
    else:
        first, every = _value(text, "first_k_dense_replace", 1), _value(text, "moe_layer_freq", 1)
        expect("first_k_dense_replace", first, integer(0))
        expect("moe_layer_freq", every, COUNT)
        has_experts = any(text.get(name) for name in _ALIASES["num_experts"])
        moe = [i for i in range(first, count) if i % every == 0 and has_experts]
    return {"full_attn_layers": tuple(full), "moe_layers": tuple(moe)}


def _from_one(name: str, layers: Any, count: int) -> list[int]:
    """The layers of a list that counts from 1, counted from 0."""
    want = f"layers from 1 to {count} (num_hidden_layers)"
    if not isinstance(layers, list | tuple):
        raise ValueError(f"{name} is {shown(layers)}, want a list of {want}")
    for layer in layers:
        if not COUNT.accepts(layer) or layer > count:
            raise ValueError(f"{name} holds {shown(layer)}, want {want}")
    return sorted(layer - 1 for layer in layers)


def _of_kind(name: str, text: Mapping[str, Any], this: str, other: str) -> list[int]:
    """The layers, from 0, that a list with one name for each layer says are `this`."""
    kinds, count = text[name], text["num_hidden_layers"]
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        have = f"has {len(kinds)}" if isinstance(kinds, list | tuple) else f"is {shown(kinds)}"
        raise ValueError(f"{name} {have}, want {count} names (num_hidden_layers)")
    for kind in kinds:
        expect(name, kind, one_of(this, other))
    return [i for i, kind in enumerate(kinds) if kind == this]


def _refuse(text: Mapping[str, Any]) -> None:
    """Values with which a model would be another one than those built here."""
    for name, want, why in (
        ("mla_use_nope", True, "MLA with rotary positions is not built here"),
        ("attention_bias", False, "no projection has a bias here"),
        ("num_nextn_predict_layers", 0, "multi-token prediction layers are not built here"),
    ):
        if _value(text, name, want) != want:
            raise ValueError(f"{name} is {shown(text[name])}, want {want}: {why}")
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
