"""Small models for the tests: configs, random weights of which no part is 0 or 1."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from programs import quick_jit

from kda_jax import models
from kda_jax.models import decoder, generation
from kda_jax.models.names import canonical, parameter_name, parameter_view, source
from kda_jax.models.views import View

DATA = Path(__file__).parent / "data"

LINEAR = {
    "model_type": "kimi_linear",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 16,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
}


def k3(layers: int = 3, full: tuple[int, ...] = (2,), **changes: Any) -> dict[str, Any]:
    """A small Kimi-K3: all that sets it apart from Kimi-Linear; full counts from 1.

    K = V = 64 is the least that the native kernel takes.
    """
    linear = {
        "kda_layers": [i + 1 for i in range(layers) if i + 1 not in full],
        "full_attn_layers": list(full),
        "num_heads": 2,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    }
    text = LINEAR | {
        "num_hidden_layers": layers,
        "q_lora_rank": 10,
        "mla_use_output_gate": True,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "routed_expert_hidden_size": 12,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "num_shared_experts": 2,
        "linear_attn_config": linear,
    }
    return {"model_type": "kimi_k3", "text_config": text | changes}


def random_model(hf_config: dict[str, Any], seed: int = 0, **overrides: Any) -> Any:
    """A model whose norms, biases and gates are random too."""
    config = models.from_config(hf_config, **overrides)
    random = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_name(path)
        noise = random.standard_normal(leaf.shape)
        if name.endswith(("norm.weight", "o_norm", ".norm", "layernorm.weight")):
            noise = 1 + 0.2 * noise
        elif name.endswith("e_score_correction_bias"):
            noise = 0.1 * noise
        elif name.endswith("A_log"):
            noise = 0.5 * noise + 1
        elif name.endswith("dt_bias"):
            noise = noise - 4
        elif name.endswith("conv1d"):
            noise = 0.5 * noise
        elif name == "lm_head.weight" or leaf.ndim == 1:
            noise = noise * leaf.shape[-1] ** -0.5
        elif leaf.ndim > 1 and name != "embed_tokens.weight":
            fan_in = leaf.shape[-1] if name.endswith("gate.weight") else leaf.shape[-2]
            fan_in = leaf.shape[0] if name.endswith("qkv_proj") else fan_in
            noise = noise * fan_in**-0.5
        return jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, models.abstract_model(config))


def layer_from(layer: Any, tensors: dict[str, np.ndarray]) -> Any:
    """A KDA layer with the tensors of a published (or transformers') self_attn."""
    prefix = "layers.0.self_attn."
    views = {
        f"model.{prefix}{name}": View(array.shape, lambda index, array=array: array[index])
        for name, array in tensors.items()
    }
    found, _ = canonical(views)

    def load(path: Any, leaf: jax.Array) -> jax.Array:
        src = source(prefix + parameter_name(path), leaf.shape)
        value = parameter_view(src.kind, [found.pop(name) for name in src.names]).all()
        assert value.shape == leaf.shape
        return jnp.asarray(value, leaf.dtype)

    layer = jax.tree_util.tree_map_with_path(load, layer)
    assert not found, f"unused: {sorted(found)}"
    return layer


def text(length: int, vocab: int = 96, seed: int = 1) -> np.ndarray:
    """Token numbers without the end of text."""
    return np.random.default_rng(seed).integers(3, vocab, length).astype(np.int32)


# Sublayers as programs of their own, compiled without optimization: whatever the number of layers
# and whichever test asks, each kind of sublayer is compiled once.
_attention, _feed_forward = decoder._attention.__wrapped__, decoder._feed_forward.__wrapped__
_quick = {
    "_attention": quick_jit(_attention, static_argnames=("backend", "axes")),
    "_feed_forward": quick_jit(_feed_forward, static_argnames=("axes",)),
}
_quick["_last_rows"] = quick_jit(decoder._last_rows)
_quick["_checkpoints"] = quick_jit(decoder._checkpoints)
_quick_methods = [
    (decoder.RMSNorm, "__call__", ()),
    (decoder.Vocab, "embed", ("axes",)),
    (decoder.Vocab, "logits", ()),
    (decoder.Batch, "valid", ("rows",)),
]
_quick_methods = [
    (owner, name, jax.jit(getattr(owner, name), static_argnames=static))
    for owner, name, static in _quick_methods
]


def by_layer(step: Any) -> Any:
    """A step of kda_jax.models run eagerly, one sublayer after the other."""

    @functools.wraps(step)
    def run(*args: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.multiple(decoder, **_quick))
            for owner, name, quick in _quick_methods:
                patches.enter_context(mock.patch.object(owner, name, quick))
            outputs, *caches = step.__wrapped__(*args, **options)
        # NumPy arrays: slicing them in a test compiles nothing.
        return jax.device_get(outputs), *caches

    return run


prefill, decode_step, mixed_step = map(
    by_layer, (generation.prefill, generation.decode_step, generation.mixed_step)
)
