"""The command line, mostly through main(argv); a process of its own where that matters."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cli_checks import fits, one_line_error
from safetensors import safe_open
from safetensors.flax import load_file, save_file

from kda_jax.cli import main

# scan compiles fastest; what another backend computes is the business of its own tests.
SMALL = ["--heads", "2", "--head-dim", "16", "--hidden", "24", "--backend", "scan"]
TEXT = "It was the best of times, it was the worst of times. " * 8


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """Three documents: 150 tokens, none, 40 tokens (no checkpoint at 64)."""
    folder = tmp_path_factory.mktemp("docs")
    for name, text in (("a.txt", TEXT[:150]), ("empty.txt", ""), ("short.txt", TEXT[:40])):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def states(docs):
    """A states file of the three documents, checkpoints at 64 and 128 of the first."""
    path = docs / "states.safetensors"
    files = [str(docs / name) for name in ("a.txt", "empty.txt", "short.txt")]
    code = main(["prefill", *files, "--checkpoint-every", "64", "--save", str(path), *SMALL])
    assert code == 0
    return path


def changed(states, target, tensors=(), strings=()):
    """A copy of the states file with some tensors and strings replaced."""
    with safe_open(states, framework="flax") as file:
        metadata = file.metadata()
    save_file(load_file(states) | dict(tensors), target, metadata | dict(strings))
    return str(target)


def test_prefill_table(docs, capsys):
    files = [str(docs / name) for name in ("a.txt", "empty.txt", "short.txt")]
    argv = ["prefill", *files, "--checkpoint-every", "64", *SMALL, "--backend", "chunked"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    # Paths are shortened to fit; everything else must fit by itself.
    assert fits(out)
    cells = {}
    for line in out.splitlines():
        row = [cell.strip() for cell in line.strip("│").split("│")]
        if len(row) == 7 and row[0].endswith(".txt"):
            cells[row[0].split("/")[-1]] = row[1:]
    assert cells["a.txt"][:3] == ["150", "3", "2"]
    assert cells["empty.txt"] == ["0", "0", "0", "exact", "exact", "-"]
    assert cells["short.txt"][:3] == ["40", "1", "0"]
    for value in (*cells["a.txt"][3:], *cells["short.txt"][3:5]):
        assert value == "exact" or float(value) < 2e-6
    assert "tokens/s" in out and "backend  chunked: " in out


def test_all_documents_empty(docs, tmp_path, capsys):
    path = str(tmp_path / "s.safetensors")
    assert main(["prefill", str(docs / "empty.txt"), "--save", path, *SMALL]) == 0
    assert load_file(path)["final.recurrent"].shape == (1, 2, 16, 16)
    capsys.readouterr()
    one_line_error(
        capsys,
        ["resume", str(docs / "empty.txt"), "--states", path],
        "(0 tokens) has no checkpoints",
    )


def test_saved_file_is_complete(docs, states):
    tensors = load_file(states)
    assert {name: (t.shape, str(t.dtype)) for name, t in tensors.items()} == {
        "final.recurrent": ((3, 2, 16, 16), "float32"),
        "final.conv": ((3, 96, 3), "float32"),
        "checkpoint.recurrent": ((2, 2, 16, 16), "float32"),
        "checkpoint.conv": ((2, 96, 3), "float32"),
        "seq_lens": ((3,), "int32"),
        "checkpoints": ((2, 2), "int32"),
    }
    np.testing.assert_array_equal(tensors["seq_lens"], [150, 0, 40])
    np.testing.assert_array_equal(tensors["checkpoints"], [[0, 64], [0, 128]])
    assert not np.any(tensors["final.recurrent"][1])
    with safe_open(states, framework="np") as file:
        strings = file.metadata()
    assert strings["format"] == "kda_jax.states" and strings["version"] == "1"
    config = json.loads(strings["config"])
    assert (config["hidden"], config["heads"], config["head_dim"]) == (24, 2, 16)
    assert config["backend"] == "scan" and strings["seed"] == "0"
    first = json.loads(strings["documents"])[0]
    assert first["sha256"] == hashlib.sha256((docs / "a.txt").read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_round_trip(docs, tmp_path, capsys, dtype):
    path = str(tmp_path / "s.safetensors")
    file = str(docs / "a.txt")
    prefill = ["prefill", file, "--checkpoint-every", "50", "--save", path, "--dtype", dtype]
    assert main([*prefill, *SMALL]) == 0
    assert load_file(path)["checkpoint.conv"].dtype == jnp.dtype(dtype)
    assert main(["resume", file, "--states", path]) == 0
    assert fits(capsys.readouterr().out.replace(path, ""))


@pytest.mark.parametrize(
    ("options", "offset"),
    [
        ([], 128),  # the last checkpoint
        (["--checkpoint", "64", "--document", "a.txt"], 64),
        (["--checkpoint", "128", "--document", "0", "--backend", "chunked"], 128),
    ],
)
def test_resume_equals_the_one_shot_run(docs, states, capsys, options, offset):
    assert main(["resume", str(docs / "a.txt"), "--states", str(states), *options]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"Resumed at token {offset} of 150" in out
    assert out.count(" yes ") == 5 and "NO" not in out
    table = [line for line in out.splitlines() if not line.startswith("document")]
    assert fits("\n".join(table))


@pytest.mark.parametrize("part", ["checkpoint.recurrent", "checkpoint.conv", "final.recurrent"])
def test_resume_tells_a_wrong_state(docs, states, tmp_path, capsys, part):
    wrong = jnp.asarray(load_file(states)[part]) * 1.01
    path = changed(states, tmp_path / "wrong.safetensors", {part: wrong})
    assert main(["resume", str(docs / "a.txt"), "--states", path]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_resume_tells_nan(docs, states, tmp_path, capsys):
    nan = jnp.full_like(load_file(states)["checkpoint.recurrent"], jnp.nan)
    path = changed(states, tmp_path / "nan.safetensors", {"checkpoint.recurrent": nan})
    assert main(["resume", str(docs / "a.txt"), "--states", path]) == 1
    assert "NO" in capsys.readouterr().out


def test_resume_errors(docs, states, tmp_path, capsys):
    a, with_states = str(docs / "a.txt"), ["--states", str(states)]

    other = tmp_path / "a.txt"
    other.write_text(TEXT[:149] + "!")
    one_line_error(capsys, ["resume", str(other), *with_states], "differs from what was prefilled")
    one_line_error(capsys, ["resume", a, *with_states, "--checkpoint", "65"], "available: 64, 128")
    one_line_error(
        capsys,
        ["resume", str(docs / "short.txt"), *with_states],
        "(40 tokens) has no checkpoints",
        "smaller --checkpoint-every",
    )
    one_line_error(
        capsys,
        ["resume", a, *with_states, "--document", "nope"],
        "'nope' is not a document",
        "short.txt",
    )
    one_line_error(capsys, ["resume", a, *with_states, "--document", "3"], "not a document")
    one_line_error(capsys, ["resume", str(tmp_path / "none"), *with_states], "no such file")
    one_line_error(capsys, ["resume", a, "--states", str(tmp_path / "none")], "no such file")
    one_line_error(capsys, ["resume", a, "--states", a], "not a safetensors file")
    one_line_error(capsys, ["resume", a], "--states")
    one_line_error(capsys, ["resume", a, *with_states, "--checkpoint", "0"], "at least 1")


def test_resume_refuses_files_it_cannot_trust(docs, states, tmp_path, capsys):
    a, path = str(docs / "a.txt"), tmp_path / "s.safetensors"

    def refused(*parts):
        one_line_error(capsys, ["resume", a, "--states", str(path)], *parts)

    save_file({"x": jnp.zeros(3)}, path)
    refused("without kda_jax states")
    changed(states, path, strings={"version": "2"})
    refused("version 2", "reads version 1")
    changed(states, path, strings={"weights_sha256": "0"})
    refused("gives other weights here", "run prefill again")
    changed(states, path, strings={"config": '{"no_such_field": 1}'})
    refused("damaged states")
    changed(states, path, {"checkpoint.conv": jnp.zeros((1, 96, 3))})
    refused("damaged states")
    path.write_bytes(states.read_bytes()[:-100])
    refused("damaged")


def test_same_name_twice_asks_for_the_index(docs, tmp_path, capsys):
    other = tmp_path / "a.txt"
    other.write_text(TEXT[:100])
    path = str(tmp_path / "s.safetensors")
    files = [str(docs / "a.txt"), str(other)]
    prefill = ["prefill", *files, "--checkpoint-every", "50", "--save", path, *SMALL]
    assert main(prefill) == 0
    capsys.readouterr()
    one_line_error(
        capsys,
        ["resume", str(other), "--states", path, "--document", "a.txt"],
        "more than one document",
    )
    assert main(["resume", str(other), "--states", path]) == 0
    assert main(["resume", str(other), "--states", path, "--document", "1"]) == 0


def test_prefill_errors(docs, tmp_path, capsys):
    a = str(docs / "a.txt")
    one_line_error(capsys, ["prefill", str(tmp_path / "none")], "no such file")
    one_line_error(capsys, ["prefill", str(tmp_path)], "not a file")
    one_line_error(capsys, ["prefill"], "FILE")
    one_line_error(capsys, ["prefill", a, "--checkpoint-every", "-1"], "at least 0")
    one_line_error(capsys, ["prefill", a, "--head-dim", "257"], "1..256")
    one_line_error(capsys, ["prefill", a, "--heads", "x"], "'x' is not an integer")
    one_line_error(capsys, ["prefill", a, "--backend", "triton"], "auto", "chunked")
    one_line_error(capsys, ["prefill", a, "--save", a, *SMALL], "is one of the documents")
    missing = str(tmp_path / "no" / "s")
    one_line_error(capsys, ["prefill", a, "--save", missing, *SMALL], "create it first")
    one_line_error(capsys, ["prefill", a, "--plot", str(tmp_path), *SMALL], "is a folder")
    # 24 channels per head are no shape of the fused kernel, wherever it is built.
    odd = ["--head-dim", "24", "--backend", "fused"]
    one_line_error(capsys, ["prefill", a, *odd], "--backend fused: ", "doctor")
    one_line_error(capsys, ["nope"], "prefill")
    one_line_error(capsys, [], "COMMAND")


def test_plot(docs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from kda_jax.cli import plot

    monkeypatch.setattr(plot, "LENGTHS", (8, 80))
    path = tmp_path / "p.png"
    assert main(["prefill", str(docs / "a.txt"), "--plot", str(path), *SMALL]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    one_line_error(
        capsys,
        ["prefill", str(docs / "empty.txt"), "--plot", str(path), *SMALL],
        "all documents are empty",
    )


def test_plot_without_matplotlib_is_said_before_the_work(docs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "kda_jax.cli.plot", raising=False)
    save = tmp_path / "states.safetensors"
    one_line_error(
        capsys,
        ["prefill", str(docs / "a.txt"), "--plot", str(tmp_path / "p.png"), "--save", str(save)],
        "'matplotlib'",
        "pip install 'kda-jax[plot]'",
    )
    assert not save.exists()


def test_as_a_process(docs, tmp_path):
    """The module entry, plain output at 80 columns, silence on stderr, exit codes."""
    root = Path(__file__).resolve().parent.parent
    search = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": search, "COLUMNS": "200"}

    def run(*argv):
        command = [sys.executable, "-m", "kda_jax", *argv]
        return subprocess.run(command, cwd=docs, env=env, capture_output=True, text=True)

    path = str(tmp_path / "s.safetensors")
    done = run("prefill", "a.txt", "--checkpoint-every", "64", "--save", path, *SMALL)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert fits(done.stdout.replace(path, ""))
    done = run("resume", "a.txt", "--states", path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    env["JAX_PLATFORMS"] = "no_such_platform"
    done = run("prefill", "short.txt")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "no device for JAX_PLATFORMS=no_such_platform" in done.stderr
