"""config.json into a ModelConfig and back, and what is said of values that no model has."""

from __future__ import annotations

import json
import re

import jax
import pytest
from model_cases import DATA, LINEAR, k3

from kda_jax import models
from kda_jax.models.published import KIMI_K3, KIMI_LINEAR_48B_A3B


def test_config_of_published_files():
    """Fields that are absent mean Kimi-Linear; config.json round-trips through ours."""
    plain = models.from_config(LINEAR)
    assert plain.model_type == "kimi_linear" and plain.gate_lower_bound is None
    assert plain.full_attn_layers == (1,) and plain.moe_layers == (1, 2)
    assert not plain.use_full_rank_gate and plain.activation.name == "silu"
    big = models.from_config(k3())
    assert big.model_type == "kimi_k3" and big.gate_lower_bound == -5.0
    assert big.activation == models.config.Activation("situ", 4.0, 25.0)
    for config in (plain, big):
        again = json.loads(json.dumps(models.to_config(config)))
        assert models.from_config(again) == config
    theirs = json.loads((DATA / "kimi_linear" / "config.json").read_text())
    assert models.from_config(theirs).num_experts_per_token == 2
    every_other = models.from_config(LINEAR | {"moe_layer_freq": 2})
    assert every_other.moe_layers == (2,)


LAYERS = LINEAR["linear_attn_config"]


def linear(**changes):
    return {"linear_attn_config": LAYERS | changes}


COUNT = "want an integer of at least 1"
ERRORS = [
    ({"hidden_size": None}, "hidden_size is missing from the config"),
    ({"hidden_size": 0}, f"hidden_size is 0, {COUNT}"),
    ({"hidden_size": True}, f"hidden_size is True, {COUNT}"),
    ({"hidden_size": 24.0}, f"hidden_size is 24.0, {COUNT}"),
    ({"vocab_size": [96]}, f"vocab_size is [96], {COUNT}"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', want an integer from 1 to 10000"),
    ({"num_hidden_layers": 10**15}, "num_hidden_layers is 1000000000000000, want an integer from"),
    ({"num_hidden_layers": 4}, "name 3 layers, want each of 1..4 once"),
    ({"q_lora_rank": 0}, f"q_lora_rank is 0, {COUNT}, or null"),
    ({"attn_res_block_size": -1}, f"attn_res_block_size is -1, {COUNT}, or null"),
    ({"model_max_length": 1e30}, f"model_max_length is 1e+30, {COUNT}"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', want one of silu, situ"),
    ({"hidden_act": 1}, "hidden_act is 1, want one of silu, situ"),
    ({"activation_situ_beta": 0}, "activation_situ_beta is 0, want a finite number above 0"),
    ({"activation_situ_linear_beta": "25"}, "activation_situ_linear_beta is '25', want a finite"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, want a finite number above 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', want a finite number above 0"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf, want a finite number"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', want true or false"),
    ({"norm_topk_prob": 1, "moe_renormalize": None}, "norm_topk_prob is 1, want true or false"),
    ({"eos_token_id": "</s>"}, "eos_token_id is ('</s>',), want an integer or a list of integers"),
    ({"eos_token_id": [2, None]}, "eos_token_id is (2, None), want an integer or a list"),
    ({"pad_token_id": "0"}, "pad_token_id is '0', want an integer, or null"),
    ({"dtype": "float8"}, "dtype is 'float8', want one of bfloat16, float16, float32, float64"),
    ({"mla_use_nope": False}, "mla_use_nope is False, want True: MLA with rotary"),
    ({"mla_use_nope": "yes"}, "mla_use_nope is 'yes', want True"),
    ({"attention_bias": True}, "attention_bias is True, want False: no projection"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, want 0: multi-token"),
    ({"num_experts": None, "n_routed_experts": 8}, "n_routed_experts is 8: give"),
    ({"num_experts": "8"}, "num_experts is '8', want an integer of at least 0"),
    ({"num_experts_per_token": 9}, "num_experts_per_token is 9, want 1..8 (num_experts)"),
    (
        {"num_experts_per_token": None, "num_experts_per_tok": -1},
        "num_experts_per_tok is -1, want an integer of at least 0",
    ),
    ({"moe_intermediate_size": None}, "moe_intermediate_size is 0, want at least 1"),
    ({"num_expert_group": 3}, "num_expert_group is 3, want a divisor of num_experts, 8"),
    (
        {"num_expert_group": 4, "topk_group": 1},
        "num_experts_per_token is 3, want at most 2: the experts in topk_group = 1 groups",
    ),
    ({"topk_group": 2}, "topk_group is 2, want 1..1 (num_expert_group)"),
    ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func is 'tanh', want one of"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, want an integer of at least 0"),
    ({"moe_layer_freq": 0}, f"moe_layer_freq is 0, {COUNT}"),
    ({"moe_layer_freq": [1]}, f"moe_layer_freq is [1], {COUNT}"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1, want 3 names"),
    ({"mlp_layer_types": 3}, "mlp_layer_types is 3, want 3 names (num_hidden_layers)"),
    ({"mlp_layer_types": ["dense", "moe", 1]}, "mlp_layer_types is 'moe', want one of sparse"),
    ({"linear_attn_config": None}, "linear_attn_config is missing from the config"),
    ({"linear_attn_config": []}, "linear_attn_config is [], want an object"),
    (
        {"linear_attn_config": None, "layer_types": ["full_attention", "mamba", "x"]},
        "layer_types is 'mamba', want one of full_attention, linear_attention",
    ),
    (linear(full_attn_layers=None), "linear_attn_config.full_attn_layers is missing"),
    (linear(full_attn_layers=4), "full_attn_layers is 4, want a list of layers from 1 to 3"),
    (linear(full_attn_layers=[0]), "full_attn_layers holds 0, want layers from 1 to 3"),
    (linear(full_attn_layers=["2"]), "full_attn_layers holds '2', want layers from 1 to 3"),
    (linear(kda_layers=[1, 4]), "linear_attn_config.kda_layers holds 4, want layers from 1 to 3"),
    (linear(kda_layers=[1, 2]), "name 3 layers, want each of 1..3 once"),
    (linear(kda_layers=[]), "name 1 layers, want each of 1..3 once"),
    (linear(num_heads=-2), f"linear_attn_config.num_heads is -2, {COUNT}"),
    (linear(head_dim="8"), f"linear_attn_config.head_dim is '8', {COUNT}"),
    (linear(gate_lower_bound=-6), "linear_attn_config.gate_lower_bound is -6, want a number in"),
    (linear(gate_lower_bound=0), "linear_attn_config.gate_lower_bound is 0, want a number in"),
    (linear(use_full_rank_gate="no"), "linear_attn_config.use_full_rank_gate is 'no', want true"),
    (
        linear(num_heads=None) | {"linear_num_heads": 1.5},
        f"linear_num_heads is 1.5, {COUNT}",
    ),
    ({"model_type": "llama"}, "model_type is 'llama', want kimi_linear or kimi_k3"),
    ({"model_type": 3}, "model_type is 3, want kimi_linear or kimi_k3"),
    ({"text_config": [1]}, "text_config is [1], want an object"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_config_errors(changes, message):
    """The key, as it is called in the file, its value, and what it should be."""
    with pytest.raises(ValueError, match=re.escape(message)):
        models.from_config(LINEAR | changes)


def test_an_override_wins_over_an_odd_value():
    config = models.from_config(LINEAR | {"dtype": "float8"}, dtype="float32")
    assert config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype is 'int8', want one of"):
        models.from_config(LINEAR, dtype="int8")


def test_null_is_absent():
    """As the published files write it."""
    names = ("activation_situ_beta", "first_k_dense_replace", "moe_layer_freq", "text_config")
    assert models.from_config(LINEAR | dict.fromkeys(names)) == models.from_config(LINEAR)


MISSPELT = [
    ({"hiden_size": 24}, "hiden_size is 24, but there is no such field: rename it to hidden_size"),
    (
        {"num_experts_per_tokens": 4},
        "is 4, but there is no such field: rename it to num_experts",
    ),
    (
        {"rms_norm_epss": 1e-6},
        "rms_norm_epss is 1e-06, but there is no such field: rename it to",
    ),
    ({"tie_word_embedding": True}, "rename it to tie_word_embeddings, or remove it"),
    ({"eso_token_id": 2}, "eso_token_id is 2, but there is no such field: rename it to eos_token"),
    ({"first_dense_replace": 2}, "rename it to first_k_dense_replace, or remove it"),
    (linear(gate_lower_bounds=-5), "linear_attn_config.gate_lower_bounds is -5, but there is no"),
]


@pytest.mark.parametrize(("changes", "message"), MISSPELT, ids=[name for _, name in MISSPELT])
def test_a_misspelt_field_is_not_passed_over(changes, message):
    for hf in (LINEAR | changes, k3(**changes)):
        with pytest.raises(ValueError, match=re.escape(message)):
            models.from_config(hf)


def test_fields_that_shape_no_model_are_passed_over():
    """As published configs and transformers have them, and what newer releases may add."""
    others = {
        **dict.fromkeys(("architectures", "auto_map", "quantization_config", "id2label"), "any"),
        **dict.fromkeys(("head_dim", "num_key_value_heads", "qk_head_dim", "rope_head_dim"), 72),
        **dict.fromkeys(("rope_theta", "initializer_range", "attention_dropout"), 0.1),
        **dict.fromkeys(("use_cache", "output_router_logits", "use_grouped_topk"), True),
        **dict.fromkeys(("transformers_version", "topk_method", "scoring_func"), "4.57.1"),
        **dict.fromkeys(("rope_scaling", "sep_token_id", "decoder_start_token_id"), 3),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 3),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 3),
        **dict.fromkeys(("n_positions", "pretraining_tp", "ep_size", "aux_loss_alpha"), 1),
        # Closer to a known one than many a misspelling, with a word more or another short one.
        **dict.fromkeys(("boi_token_id", "eoi_token_id", "eod_token_id", "tts_pad_token_id"), 7),
        **dict.fromkeys(("o_lora_rank", "k_head_dim", "kv_head_dim", "linear_v_head_dim"), 7),
        **dict.fromkeys(("moe_num_shared_experts", "moe_routed_scaling_factor"), 7),
        **dict.fromkeys(("mtp_layer_types", "num_position_embeddings"), 7),
        "hiden_size": None,  # null is absent
    }
    assert models.from_config(LINEAR | others) == models.from_config(LINEAR)
    assert models.from_config(k3(**others)) == models.from_config(k3())
    for published in (KIMI_LINEAR_48B_A3B, KIMI_K3):
        models.from_config(published)


@pytest.mark.parametrize("config", [[], None, "config.json", 3], ids=str)
def test_a_config_is_a_dict(config):
    message = f"hf_config is {config!r}, want the dict in a config.json"
    with pytest.raises(TypeError, match=re.escape(message)):
        models.from_config(config)


def test_float64_needs_x64():
    """JAX would make float32 of it, and warn for each array."""
    config = models.from_config(LINEAR, dtype="float64")
    message = "dtype is 'float64', which needs jax_enable_x64: turn it on with"
    for make in (
        lambda: models.abstract_model(config),
        lambda: models.KimiLinear(config, rngs=None),
        lambda: models.empty_cache(config, 1, 64),
    ):
        with jax.enable_x64(True):
            leaves = jax.tree.leaves(jax.eval_shape(make))
            assert "float64" in {x.dtype.name for x in leaves}
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
