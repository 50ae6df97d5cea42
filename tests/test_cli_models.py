"""`generate` and `serve` on a model's folder: what they print, and what they say of a bad one."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import types

import ml_dtypes
import pytest
from cli_checks import one_line_error
from model_cases import k3, random_model
from safetensors.numpy import load_file, save_file

from kda_jax.cli import main
from kda_jax.models import save_pretrained


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Kimi-K3 that reads bytes; scan compiles fastest."""
    path = tmp_path_factory.mktemp("saved")
    save_pretrained(random_model(k3(1, (), vocab_size=256)), path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    """A copy, for a test to spoil."""
    return shutil.copytree(saved, tmp_path / "model")


def test_generate_continues_prompts(saved, capsys):
    argv = ["generate", "--model", str(saved), "--prompt", "ab", "--tokens", "97,98"]
    assert main([*argv, "--max-new-tokens", "2", "--backend", "scan"]) == 0
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("model    KimiK3: 1 layers, ")
    assert lines.pop(1).startswith("backend  scan: ")
    assert lines[1] == "prompt 0  2 tokens, 2 new" and "prompt 1  2 tokens, 2 new" in lines
    numbers = [int(n) for n in lines[-2].split(",")]  # the same prompt, given as numbers
    assert bytes(numbers).decode(errors="replace").splitlines() == lines[2:-3]
    assert lines[-1].startswith("4 tokens in ")


def test_generate_errors(saved, capsys):
    run = ["generate", "--model", str(saved)]
    one_line_error(capsys, run, "nothing to continue")
    one_line_error(capsys, [*run, "--tokens", "1,x"], "--tokens '1,x'", "1,2,3")
    one_line_error(capsys, [*run, "--tokens", ""], "--tokens ''", "1,2,3")
    one_line_error(capsys, [*run, "--tokens", "256"], "prompts[0] holds a token outside 0..255")
    one_line_error(capsys, [*run, "--prompt", ""], "prompts[0] is empty")
    one_line_error(capsys, [*run, "--prompt", "a", "--temperature", "-1"], "temperature is -1.0")
    one_line_error(capsys, [*run, "--prompt", "a", "--temperature", "x"], "--temperature", "'x'")
    one_line_error(capsys, [*run, "--prompt", "a", "--max-new-tokens", "0"], "at least 1")
    one_line_error(capsys, [*run, "--prompt", "a", "--dtype", "int8"], "--dtype", "bfloat16")


def refused(capsys, folder, *parts):
    """By both commands that read a model's folder."""
    one_line_error(capsys, ["generate", "--model", str(folder), "--prompt", "a"], *parts)
    one_line_error(capsys, ["serve", str(folder), "--port", "0"], *parts)


def test_an_address_that_is_taken(saved, capsys):
    """Said before the model is loaded and compiled."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_line_error(
            capsys, ["serve", str(saved), "--port", str(port)], f"--port {port}: ", "--port 0"
        )
    one_line_error(capsys, ["serve", str(saved), "--host", "no such host"], "--host no such host")


def test_no_folder_or_not_all_of_it(folder, tmp_path, capsys):
    refused(capsys, tmp_path / "none", "none'", "no such folder")
    refused(capsys, folder / "config.json", "config.json'", "no such folder")
    (folder / "model.safetensors").unlink()
    refused(capsys, folder, str(folder), "no safetensors file")
    (folder / "config.json").unlink()
    refused(capsys, folder, str(folder), "no config.json")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["no JSON or damaged", "download it again"]),
        (b'{"text_config": {"vocab', ["no JSON or damaged", "download it again"]),
        (b"\xff\xfe{}", ["no JSON or damaged", "download it again"]),
        (b"[1, 2]", ["holds a list, want a JSON object"]),
        (b"{}", ["linear_attn_config is missing"]),
        (b'{"model_type": "llama"}', ["model_type is 'llama', want kimi_linear or kimi_k3"]),
        (b'{"text_config": "x"}', ["text_config is 'x', want an object"]),
    ],
    ids=["empty", "cut off", "no text", "a list", "no fields", "another model", "a string"],
)
def test_a_config_that_is_none(folder, capsys, content, parts):
    (folder / "config.json").write_bytes(content)
    refused(capsys, folder, str(folder / "config.json"), *parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": -2}, "num_attention_heads is -2, want an integer of at least 1"),
        ({"hidden_size": "24"}, "hidden_size is '24', want an integer of at least 1"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing from the config"),
        ({"linear_attn_config": 3}, "linear_attn_config is 3, want an object"),
        ({"vocab_size": 96}, "embed_tokens.weight (256, 24), want (96, 24)"),  # before tokenizing
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_config_with_odd_values(folder, capsys, changes, message):
    """The rest of them: test_models_config.py."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    refused(capsys, folder, str(folder), message)


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=["empty", "4 bytes", "100 bytes", "one less"])
def test_a_file_that_is_cut_off(folder, capsys, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(capsys, folder, str(file), "damaged", "download it again")


def test_a_file_that_is_a_pointer(folder, capsys):
    """What a clone without Git LFS leaves."""
    file = folder / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    refused(capsys, folder, str(file), "not a safetensors file", "download it again")


def test_tensors_that_are_not_the_models(folder, capsys):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "language_model.model.norm.weight"
    save_file({key: x for key, x in tensors.items() if key != name}, file)
    refused(capsys, folder, str(folder), "1 missing: model.norm.weight")
    save_file(tensors | {"model.extra": tensors[name]}, file)
    refused(capsys, folder, "1 unexpected: model.extra")
    save_file(tensors | {name: tensors[name].astype(ml_dtypes.float8_e4m3fn)}, file)
    refused(capsys, folder, str(file), f"{name} is F8_E4M3", "want BF16, F16 or F32")


@pytest.mark.parametrize(
    ("index", "parts"),
    [
        ("{", ["no JSON or damaged", "download it again"]),
        ('{"metadata": {}}', ["weight_map is missing or damaged", "download it again"]),
        ('{"weight_map": {"a": 1}}', ["weight_map is missing or damaged"]),
        ('{"weight_map": {"a": "b.safetensors"}}', ["b.safetensors", "download"]),
    ],
    ids=["cut off", "no map", "no names", "no file"],
)
def test_a_damaged_index(folder, capsys, index, parts):
    file = folder / "model.safetensors.index.json"
    file.write_text(index)
    refused(capsys, folder, str(file), *parts)


def test_a_damaged_tokenizer(folder, capsys, monkeypatch):
    """The package `tokenizers`, where it is installed, raises no class of its own."""

    class Tokenizer:
        @staticmethod
        def from_file(path):
            raise Exception("EOF while parsing an object at line 1 column 1")

    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    (folder / "tokenizer.json").write_text("{")
    run = ["generate", "--model", str(folder), "--prompt", "a"]
    file = str(folder / "tokenizer.json")
    one_line_error(capsys, run, file, "EOF while parsing", "download it again")
