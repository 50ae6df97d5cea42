"""The model: Kimi-K3's parts, each tiny. KDA and MLA 3:1, experts in a latent space."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "vocab_size": 256,  # bytes
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_output_gate": True,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "attn_res_block_size": 2,
        "eos_token_id": 10,  # the end of a line ends an answer
        "max_position_embeddings": 8192,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 2,
            "head_dim": 64,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    },
}
