"""Kimi-K3's parts, and the whole, as plain NumPy in float64: written from the formulas, one token
or one row at a time, sharing no line with the library. Weights come under their published names.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def situ(gate, up, b=4.0, c=25.0):
    return b * np.tanh(gate / b) * sigmoid(gate) * (c * np.tanh(up / c))


def silu_gate(gate, up):
    return gate * sigmoid(gate) * up


def mlp(w, name, x, act):
    gate = x @ w[f"{name}.gate_proj.weight"].T
    up = x @ w[f"{name}.up_proj.weight"].T
    return act(gate, up) @ w[f"{name}.down_proj.weight"].T


def attention_residual(stream, bank, norm, proj):
    """Every row on its own: candidates are the bank's rows and the stream's."""
    out = np.empty_like(stream)
    for t in range(len(stream)):
        candidates = np.array([*(block[t] for block in bank), stream[t]])
        logits = rms_norm(candidates, norm) @ proj
        mix = np.exp(logits - logits.max())
        out[t] = mix / mix.sum() @ candidates
    return out


def route(w, name, x, config):
    """The chosen experts and their weights, per row; groups as in DeepSeek-V3."""
    choices, weights = [], []
    scores = sigmoid(x @ w[f"{name}.gate.weight"].T)
    favour = scores + w[f"{name}.gate.e_score_correction_bias"]
    groups, kept = config["num_expert_group"], config["topk_group"]
    for row, score in zip(favour, scores, strict=True):
        grouped = row.reshape(groups, -1)
        best = np.argsort(-np.sort(grouped, 1)[:, -2:].sum(1), kind="stable")[:kept]
        allowed = np.isin(np.arange(row.size) // grouped.shape[1], best)
        order = np.argsort(-np.where(allowed, row, -np.inf), kind="stable")
        chosen = order[: config["num_experts_per_token"]]
        weight = score[chosen]
        if config["moe_renormalize"]:
            weight = weight / weight.sum()
        choices.append(chosen)
        weights.append(weight * config["routed_scaling_factor"])
    return np.array(choices), np.array(weights)


def moe(w, name, x, config, act):
    latent = config.get("routed_expert_hidden_size") is not None
    inside = x @ w[f"{name}.routed_expert_down_proj.weight"].T if latent else x
    routed = np.zeros_like(inside)
    for t, (choice, weight) in enumerate(zip(*route(w, name, x, config), strict=True)):
        for expert, p in zip(choice, weight, strict=True):
            base = f"{name}.experts.{expert}"
            gate = w[f"{base}.w1.weight"] @ inside[t]
            up = w[f"{base}.w3.weight"] @ inside[t]
            routed[t] += p * (w[f"{base}.w2.weight"] @ act(gate, up))
    if latent:
        if config["latent_moe_use_norm"]:
            routed = rms_norm(routed, w[f"{name}.routed_expert_norm.weight"])
        routed = routed @ w[f"{name}.routed_expert_up_proj.weight"].T
    return routed + mlp(w, f"{name}.shared_experts", x, act)


def mla(w, name, x, config):
    """Keys and values expanded per head; every token sees itself and those before it."""
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    v_dim, lora = config["v_head_dim"], config["kv_lora_rank"]
    if config["q_lora_rank"] is None:
        q = x @ w[f"{name}.q_proj.weight"].T
    else:
        low = rms_norm(x @ w[f"{name}.q_a_proj.weight"].T, w[f"{name}.q_a_layernorm.weight"])
        q = low @ w[f"{name}.q_b_proj.weight"].T
    q = q.reshape(len(x), heads, nope + rope)
    kv = x @ w[f"{name}.kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(kv[:, :lora], w[f"{name}.kv_a_layernorm.weight"])
    expanded = (latent @ w[f"{name}.kv_b_proj.weight"].T).reshape(len(x), heads, nope + v_dim)
    out = np.zeros((len(x), heads, v_dim))
    for h in range(heads):
        keys = np.concatenate([expanded[:, h, :nope], kv[:, lora:]], 1)
        for t in range(len(x)):
            logits = keys[: t + 1] @ q[t, h] * (nope + rope) ** -0.5
            mix = np.exp(logits - logits.max())
            out[t, h] = mix / mix.sum() @ expanded[: t + 1, h, nope:]
    out = out.reshape(len(x), -1)
    if config.get("mla_use_output_gate"):
        out = out * sigmoid(x @ w[f"{name}.g_proj.weight"].T)
    return out @ w[f"{name}.o_proj.weight"].T


def kda(w, name, x, config):
    linear = config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    shape = (len(x), heads, dim)

    def convolved(which):
        raw = x @ w[f"{name}.{which}_proj.weight"].T
        taps = w[f"{name}.{which}_conv1d.weight"][:, 0]
        raw = np.concatenate([np.zeros((taps.shape[1] - 1, raw.shape[1])), raw])
        rows = [(raw[t : t + taps.shape[1]] * taps.T).sum(0) for t in range(len(x))]
        rows = np.array(rows)
        return (rows * sigmoid(rows)).reshape(shape)

    q, k, v = map(convolved, "qkv")
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * dim**-0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    raw_g = x @ w[f"{name}.f_a_proj.weight"].T @ w[f"{name}.f_b_proj.weight"].T
    raw_g = (raw_g + w[f"{name}.dt_bias"]).reshape(shape)
    rate = np.exp(w[f"{name}.A_log"].reshape(-1))[:, None]
    if linear.get("gate_lower_bound") is None:
        decay = np.exp(-rate * np.logaddexp(0, raw_g))
    else:
        decay = np.exp(linear["gate_lower_bound"] * sigmoid(rate * raw_g))
    beta = sigmoid(x @ w[f"{name}.b_proj.weight"].T)
    out, state = np.zeros(shape), np.zeros((heads, dim, dim))
    for t in range(len(x)):
        for h in range(heads):
            state[h] = state[h] * decay[t, h]
            state[h] += beta[t, h] * np.outer(v[t, h] - state[h] @ k[t, h], k[t, h])
            out[t, h] = state[h] @ q[t, h]
    if linear.get("use_full_rank_gate"):
        gate = x @ w[f"{name}.g_proj.weight"].T
    else:
        gate = x @ w[f"{name}.g_a_proj.weight"].T @ w[f"{name}.g_b_proj.weight"].T
    out = rms_norm(out, w[f"{name}.o_norm.weight"]) * sigmoid(gate.reshape(shape))
    return out.reshape(len(x), -1) @ w[f"{name}.o_proj.weight"].T


def forward(w, tokens, config):
    """Logits [T, V] of one prompt; w: published names without `language_model.`."""
    act = situ if config["hidden_act"] == "situ" else silu_gate
    full = config["linear_attn_config"]["full_attn_layers"]
    block = config.get("attn_res_block_size")
    p, bank = w["model.embed_tokens.weight"][tokens], []

    def mix(name, bank):
        if block is None:
            return p
        return attention_residual(p, bank, w[f"{name}_norm.weight"], w[f"{name}_proj.weight"][0])

    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}"
        # ceil(l / block) blocks count before the attention of layer l
        h = mix(f"{base}.self_attention_res", bank[: -(-i // block)] if block else [])
        h = rms_norm(h, w[f"{base}.input_layernorm.weight"])
        attention = mla if i + 1 in full else kda
        y = attention(w, f"{base}.self_attn", h, config)
        if block is not None and i % block == 0:
            bank.append(p)
            p = y
        else:
            p = p + y
        h = rms_norm(mix(f"{base}.mlp_res", bank), w[f"{base}.post_attention_layernorm.weight"])
        if i < config["first_k_dense_replace"]:
            p = p + mlp(w, f"{base}.mlp", h, act)
        else:
            p = p + moe(w, f"{base}.block_sparse_moe", h, config, act)
    out = rms_norm(mix("model.output_attn_res", bank), w["model.norm.weight"])
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return out @ w[f"{head}.weight"].T
