"""Configs and checkpoints: what is read, what is written, and what is refused."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_cases import LINEAR, k3, random_model
from safetensors.numpy import load_file, save_file

from kda_jax import models
from kda_jax.models.names import WeightsError, parameters
from kda_jax.models.views import FP4, View, mxfp4, part, stacked, transposed
from kda_jax.models.weights import abstract_model


def assert_same(got, want):
    assert got.config == want.config
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]


@pytest.fixture
def saved(tmp_path):
    """A small Kimi-K3 and its folder."""
    model = random_model(k3(), dtype="bfloat16")
    models.save_pretrained(model, tmp_path / "k3")
    return model, tmp_path / "k3"


def rewrite(folder, change):
    """Replaces the tensors of a one-file checkpoint."""
    file = folder / "model.safetensors"
    tensors = change(dict(load_file(file)))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, file)


@pytest.mark.parametrize("hf", [k3(), LINEAR, LINEAR | {"tie_word_embeddings": True}])
@pytest.mark.parametrize("shard_bytes", [10**9, 20000])
def test_round_trip(tmp_path, hf, shard_bytes):
    model = random_model(hf)
    files = models.save_pretrained(model, tmp_path, max_shard_bytes=shard_bytes)
    assert (len(files) == 1) == (shard_bytes == 10**9)
    assert_same(models.from_pretrained(tmp_path), model)


def test_files_have_the_published_names_and_shapes(saved):
    _, folder = saved
    shapes = {name: t.shape for name, t in load_file(folder / "model.safetensors").items()}
    base = "language_model.model.layers."
    for name, shape in {
        "language_model.model.embed_tokens.weight": (96, 24),
        "language_model.lm_head.weight": (96, 24),
        "language_model.model.output_attn_res_proj.weight": (1, 24),
        "language_model.model.output_attn_res_norm.weight": (24,),
        f"{base}0.self_attention_res_proj.weight": (1, 24),
        f"{base}0.mlp_res_norm.weight": (24,),
        f"{base}0.mlp.gate_proj.weight": (32, 24),
        f"{base}0.self_attn.q_conv1d.weight": (128, 1, 4),
        f"{base}0.self_attn.f_a_proj.weight": (64, 24),
        f"{base}0.self_attn.g_proj.weight": (128, 24),
        f"{base}0.self_attn.A_log": (2,),
        f"{base}1.self_attn.kv_a_proj_with_mqa.weight": (20, 24),
        f"{base}1.self_attn.q_b_proj.weight": (32, 10),
        f"{base}1.block_sparse_moe.gate.e_score_correction_bias": (8,),
        f"{base}1.block_sparse_moe.experts.7.w1.weight": (16, 12),
        f"{base}1.block_sparse_moe.experts.7.w2.weight": (12, 16),
        f"{base}1.block_sparse_moe.routed_expert_norm.weight": (12,),
        f"{base}1.block_sparse_moe.shared_experts.down_proj.weight": (24, 32),
    }.items():
        assert shapes[name] == shape


def test_names_of_transformers_older_names_and_padded_a_log(saved):
    model, folder = saved

    def change(tensors):
        out = {}
        for name, t in tensors.items():
            name = name.replace("block_sparse_moe", "mlp").replace("_res_proj.", "_res.proj_")
            name = name.replace("_res_norm.", "_res.norm_")
            if name.endswith("A_log"):
                t = np.pad(t, (0, 6)) if ".0." in name else t.reshape(1, 1, -1, 1)
            if name.split(".")[-1] in ("A_log", "dt_bias") or ".f_" in name:
                name = name.replace("self_attn.", "self_attn.forget_gate.")
            out[name] = t
        for base in {
            n.removesuffix("q_conv1d.weight") for n in out if n.endswith("q_conv1d.weight")
        }:
            parts = [out.pop(f"{base}{x}_conv1d.weight") for x in "qkv"]
            out[f"{base}conv1d.weight"] = np.concatenate(parts)
        for base in {n[: n.index("experts.0")] for n in out if "experts.0.w1" in n}:
            w1, w2, w3 = (
                np.stack([out.pop(f"{base}experts.{i}.{w}.weight") for i in range(8)])
                for w in ("w1", "w2", "w3")
            )
            out[f"{base}experts.gate_up_proj"] = np.concatenate([w1, w3], 1)
            out[f"{base}experts.down_proj"] = w2
        return out

    rewrite(folder, change)
    assert_same(models.from_pretrained(folder), model)


def test_vision_tensors_are_left_out_and_counted(saved, capsys):
    model, folder = saved
    extra = {"vision_tower.patch.weight": np.ones(3, "f"), "mm_projector.0.bias": np.ones(2, "f")}
    rewrite(folder, lambda tensors: tensors | extra)
    assert_same(models.from_pretrained(folder), model)
    assert "left out 2 vision tensors" in capsys.readouterr().out


def test_all_problems_at_once_by_name(saved):
    _, folder = saved

    def change(tensors):
        del tensors["language_model.model.norm.weight"]
        tensors["language_model.model.layers.0.self_attn.q_bias"] = np.ones(3, "f")
        name = "language_model.model.layers.2.self_attn.o_proj.weight"
        tensors[name] = tensors[name][:, :5]
        name = "language_model.model.layers.0.self_attn.A_log"
        tensors[name] = np.ones(5, "f")  # the padding must be zeros
        return tensors

    rewrite(folder, change)
    with pytest.raises(WeightsError) as error:
        models.from_pretrained(folder)
    message = str(error.value)
    for part_ in (
        "1 missing: model.norm.weight",
        "1 unexpected: model.layers.0.self_attn.q_bias",
        "2 misshapen: model.layers.0.self_attn.A_log (5,), want (2,)",
        "model.layers.2.self_attn.o_proj.weight (24, 5), want (24, 128)",
    ):
        assert part_ in message


def pack_fp4(weight):
    """A matrix in MXFP4, and the values it then stands for."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, -1, 32)
    scale = np.ceil(np.log2(np.abs(blocks).max(-1) / 6)).astype(int)
    scaled = blocks / 2.0 ** scale[..., None]
    code = np.abs(scaled[..., None] - FP4).argmin(-1).reshape(rows, columns)
    values = FP4[code].reshape(blocks.shape) * 2.0 ** scale[..., None]
    packed = (code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)
    return packed, (scale + 127).astype(np.uint8), values.reshape(rows, columns)


def test_mxfp4_experts(tmp_path):
    hf = k3(moe_intermediate_size=32, routed_expert_hidden_size=64)
    model = random_model(hf)
    models.save_pretrained(model, tmp_path)
    values = {}

    def change(tensors):
        for name in [n for n in tensors if ".experts." in n and "shared" not in n]:
            packed, scale, values[name] = pack_fp4(tensors.pop(name))
            tensors |= {f"{name}_packed": packed, f"{name}_scale": scale}
        return tensors

    rewrite(tmp_path, change)
    loaded = models.from_pretrained(tmp_path)
    base = "language_model.model.layers.1.block_sparse_moe.experts"
    experts = loaded.layers[1].mlp.experts
    for part_, name in ((experts.gate, "w1"), (experts.down, "w2"), (experts.up, "w3")):
        for i in range(8):
            np.testing.assert_array_equal(part_[...][i], values[f"{base}.{i}.{name}.weight"].T)
    with pytest.raises(AssertionError):
        assert_same(loaded, model)  # four bits are not enough for these


def test_views_read_only_what_is_asked_for():
    array = np.arange(6 * 64, dtype="f").reshape(6, 64)
    asked = []

    def read(index):
        asked.append(index)
        return array[index]

    view = View(array.shape, read)
    both = stacked([transposed(view), transposed(part(view, 0, 0, 6))], 0)
    got = both.read((slice(1, 2), slice(3, 5), slice(2, 6)))
    np.testing.assert_array_equal(got, array[2:6, 3:5].T[None])
    assert asked == [(slice(2, 6), slice(3, 5))]
    packed, scale, values = pack_fp4(np.random.default_rng(0).standard_normal((4, 96)))
    matrix = mxfp4(*(View(a.shape, lambda i, a=a: a[i]) for a in (packed, scale)))
    np.testing.assert_array_equal(matrix.read((slice(1, 3), slice(40, 70))), values[1:3, 40:70])


def test_folder_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        models.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LINEAR))
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        models.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        models.save_pretrained(random_model(LINEAR), tmp_path, max_shard_bytes=0)


def test_fused_projections_come_from_and_go_to_the_same_files(tmp_path):
    fused = random_model(k3(), fused_projections=True)
    models.save_pretrained(fused, tmp_path)
    assert_same(models.from_pretrained(tmp_path, fused_projections=True), fused)
    apart = models.from_pretrained(tmp_path).layers[0].self_attn
    together = fused.layers[0].self_attn
    for i, (proj, conv) in enumerate(
        [
            (apart.q_proj, apart.q_conv1d),
            (apart.k_proj, apart.k_conv1d),
            (apart.v_proj, apart.v_conv1d),
        ]
    ):
        np.testing.assert_array_equal(proj.kernel[...], together.qkv_proj[...][:, i])
        np.testing.assert_array_equal(conv[...], together.qkv_conv1d[...][i])


def test_dtype_can_be_chosen(saved):
    model, folder = saved
    wide = models.from_pretrained(folder, dtype="float32")
    for name, leaf in parameters(wide).items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, np.asarray(parameters(model)[name], np.float32))
    assert parameters(abstract_model(model.config))["norm.weight"].dtype == ml_dtypes.bfloat16


def test_a_second_save_replaces_the_first(tmp_path):
    first, second = (random_model(LINEAR, seed=seed) for seed in (0, 7))
    models.save_pretrained(first, tmp_path, max_shard_bytes=20000)
    models.save_pretrained(second, tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    loaded = models.from_pretrained(tmp_path, quiet=True)
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_tensor_that_is_given_twice_is_refused(tmp_path):
    models.save_pretrained(random_model(LINEAR), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"given twice, in b\.safetensors"):
        models.from_pretrained(tmp_path)


def test_save_pretrained_wants_a_folder(tmp_path):
    model, file = models.abstract_model(models.from_config(LINEAR)), tmp_path / "model"
    file.write_text("precious")
    for path in (file, file / "deeper"):
        with pytest.raises(NotADirectoryError, match=r"but '.*/model' is a file: want a folder"):
            models.save_pretrained(model, path)
    assert file.read_text() == "precious"
    with pytest.raises(TypeError, match="max_shard_bytes is '5GB', want an integer"):
        models.save_pretrained(model, tmp_path / "new", max_shard_bytes="5GB")
    with pytest.raises(TypeError, match="model is a dict, want a KimiLinear or KimiK3"):
        models.save_pretrained(LINEAR, tmp_path / "new")
    assert not (tmp_path / "new").exists()
