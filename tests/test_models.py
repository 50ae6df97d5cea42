"""The models against NumPy references, stored cases of transformers, and themselves."""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import model_reference as reference
import numpy as np
import pytest
from model_cases import DATA, LINEAR, decode_step, k3, layer_from, prefill, random_model, text
from programs import quick_jit
from safetensors.numpy import load_file

from kda_jax import Capacity, ChunkMetadata, models
from kda_jax.layer import KDALayerConfig, KimiDeltaAttention
from kda_jax.models.attention_residual import AttentionResidual
from kda_jax.models.batch import Axes, Batch
from kda_jax.models.mla import MLA, MLACache
from kda_jax.models.mlp import gated
from kda_jax.models.moe import MoE
from kda_jax.models.names import parameters, published_arrays, source

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def published(model, stem=""):
    """The weights in float64 under their published names, of a model or of a part of one."""
    out = {}
    for name, leaf in parameters(model).items():
        src = source(stem + name, leaf.shape)
        arrays = published_arrays(src.kind, np.asarray(leaf, np.float64))
        for key, array in zip(src.names, arrays, strict=True):
            moe = ".experts." in key or "expert" in key or ".mlp.gate." in key
            out[key.replace(".mlp.", ".block_sparse_moe.") if moe else key] = array
    return out


def rows(count, width, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype("f")


# --- parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "situ"])
def test_activations(name):
    gate, up = 8 * rows(5, 7, 1), 40 * rows(5, 7, 2)  # into the bounds of SiTU
    wide = gate.astype(float), up.astype(float)
    want = reference.situ(*wide) if name == "situ" else reference.silu_gate(*wide)
    close(gated(gate, up, models.config.Activation(name)), want, atol=1e-4)


def test_attention_residual():
    layer = random_model(k3()).mlp_res[0]
    assert isinstance(layer, AttentionResidual)
    layer.norm[...] = 1 + 0.3 * rows(1, 24, 9)[0]
    stream, *bank = (rows(6, 24, seed) for seed in range(4))
    norm, proj = (np.asarray(p[...], float) for p in (layer.norm, layer.proj))
    want = reference.attention_residual(stream.astype(float), bank, norm, proj)
    close(quick_jit(lambda m, s, b: m(s, b))(layer, stream, bank), want)
    np.testing.assert_array_equal(layer(stream, []), stream)


@pytest.mark.parametrize(("latent", "groups"), [(True, (1, 1)), (False, (4, 2))])
def test_mixture_of_experts(latent, groups):
    changes = {"num_expert_group": groups[0], "topk_group": groups[1]}
    changes |= {} if latent else {"routed_expert_hidden_size": None}
    hf = k3(**changes)
    model = random_model(hf, seed=3)
    layer = model.layers[1].mlp
    assert isinstance(layer, MoE)
    x, valid = rows(20, 24), np.arange(20) < 17
    y = quick_jit(lambda m, x: m(x, valid, Axes()))(layer, x)
    w = published(layer, "layers.1.mlp.")
    name = "model.layers.1.block_sparse_moe"
    want = reference.moe(w, name, x.astype(float), hf["text_config"], reference.situ)
    close(y[:17], want[:17], atol=3e-5)
    choice, _ = reference.route(w, name, x.astype(float), hf["text_config"])
    bias = layer.gate.e_score_correction_bias[...]
    layer.gate.e_score_correction_bias[...] = jnp.zeros_like(bias)
    unbiased, _ = layer.gate(x)
    assert (np.sort(unbiased) != np.sort(choice)).any()  # the bias matters for the choice


def test_mla_in_parts_and_by_token():
    hf = k3()
    layer = random_model(hf).layers[1].self_attn
    assert isinstance(layer, MLA)
    x = rows(90, 24)
    w = published(layer, "layers.0.self_attn.")
    want = reference.mla(w, "model.layers.0.self_attn", x.astype(float), hf["text_config"])

    @quick_jit
    def run(layer, x, metadata, start, cache):
        y, cache, _ = layer(x, Batch(metadata=metadata, start=start), cache, None)
        return y, cache

    @quick_jit
    def step(layer, x, start, cache):
        batch = Batch(active=jnp.array([True, False]), decode_start=start)
        y, _, cache = layer(x, batch, None, cache)
        return y, cache

    cache = MLACache(jnp.full((2, 128, 20), jnp.nan).at[:].set(7.0))  # what is behind has no effect
    done = 0
    for n in (1, 70, 10):
        metadata = ChunkMetadata.from_seq_lens([n, 80 - n], capacity=Capacity(80, 2, 5))
        packed = np.concatenate([x[done : done + n], rows(80 - n, 24, 5)])
        y, cache = run(layer, packed, metadata, jnp.array([done, 0]), cache)
        close(y[:n], want[done : done + n])
        done += n
    other = np.asarray(cache.rows[1])
    for t in range(done, 90):
        y, cache = step(layer, x[[t, 0]], jnp.array([t, 70]), cache)
        close(y[0], want[t])
    np.testing.assert_array_equal(cache.rows[1], other)


@pytest.mark.parametrize("fused_projections", [False, True])
def test_kda_layer_of_both_gates(fused_projections):
    """Low-rank output gate and softplus gate, against the reference; fused or not."""
    hf = LINEAR | {"dtype": "float32"}
    model = random_model(hf, fused_projections=fused_projections, backend="scan")
    layer = model.layers[0].self_attn
    x = rows(64, 24)
    w = published(layer, "layers.0.self_attn.")
    want = reference.kda(w, "model.layers.0.self_attn", x.astype(float), hf)
    y, _ = quick_jit(lambda m, x, d: m(x, d))(layer, x, ChunkMetadata.from_seq_lens([64]))
    close(y, want)


# --- whole models ----------------------------------------------------------------------------


CAPACITY = Capacity(128, 4, 6)  # of test_models_steps.py too


def in_parts(model, tokens, sizes):
    """The last logits after each part, then after each of the tokens that are left."""
    cache, done, got = models.empty_cache(model.config, 4, 128), 0, {}
    for n in sizes:
        metadata = ChunkMetadata.from_seq_lens([n], capacity=CAPACITY)
        packed = metadata.pad_tokens(tokens[done : done + n], 0)
        out, cache = prefill(model, packed, metadata, cache)
        done += n
        got[done - 1] = np.asarray(out.logits)[0]
    while done < len(tokens):
        out, cache = decode_step(model, np.full(4, tokens[done]), cache)
        got[done] = np.asarray(out.logits)[0]
        done += 1
    return got


def test_k3_of_13_layers_against_numpy():
    """Crosses a block of 12 layers; MLA at 4, 8, 12 and 13, as the rule of the real one has it."""
    hf = k3(13, (4, 8, 12, 13), attn_res_block_size=12)
    model = random_model(hf, seed=5, backend="scan")
    tokens = text(40)
    want = reference.forward(published(model), tokens, hf["text_config"])
    for position, logits in in_parts(model, tokens, (30, 7)).items():
        close(logits, want[position], atol=1e-4)


@pytest.fixture(scope="module")
def stored():
    return load_file(DATA / "kimi_linear_outputs.safetensors")


def test_stored_logits_of_transformers(stored):
    """Made by tests/transformers_models.py with transformers 5.24.0 and torch 2.13.0."""
    model = models.from_pretrained(DATA / "kimi_linear")
    metadata = ChunkMetadata.from_seq_lens([80, 33], capacity=CAPACITY)
    tokens = metadata.pad_tokens(np.concatenate([stored["tokens"], stored["tokens"][:33]]), 0)
    cache = models.empty_cache(model.config, 4, 128)
    out, _ = prefill(model, tokens, metadata, cache, all_logits=True, hidden_states=True)
    for start, n in ((0, 80), (80, 33)):
        for i, hidden in enumerate(out.hidden_states):
            near(hidden[start : start + n], stored[f"hidden.{i}"][:n])
        near(out.logits[start : start + n], stored["logits"][:n])
    tied = models.from_pretrained(DATA / "kimi_linear", tie_word_embeddings=True)
    out, _ = prefill(tied, tokens, metadata, cache, all_logits=True)
    table = np.asarray(model.embed_tokens.weight)
    near(out.logits[:80], stored["hidden.3"] @ table.T)


def test_stored_bounded_layer_of_transformers():
    """glm5_next's KDA layer, with Kimi-K3's gate."""
    tensors = load_file(DATA / "bounded_layer.safetensors")
    x, want = tensors.pop("x"), tensors.pop("y")
    config = KDALayerConfig(hidden=16, heads=2, head_dim=16, dtype="float32", full_rank_gate=False)
    layer = layer_from(KimiDeltaAttention(config, rngs=None), tensors)
    run = quick_jit(lambda m, x, d: m(x, d, backend="scan"))
    y, _ = run(layer, x, ChunkMetadata.from_seq_lens([len(x)]))
    near(y, want)


def test_stored_case_is_of_this_format():
    config = json.loads((DATA / "kimi_linear" / "config.json").read_text())
    assert config["model_type"] == "kimi_linear"
    sizes = {f: f.stat().st_size for f in DATA.rglob("*") if f.is_file()}
    recall = sum(size for f, size in sizes.items() if f.parent.name == "recall")
    assert recall < 2_000_000 and sum(sizes.values()) - recall < 1_000_000
