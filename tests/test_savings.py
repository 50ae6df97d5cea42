"""The benchmark of what checkpoints save: counts, page, and a mismatch is a failure."""

from __future__ import annotations

import dataclasses
import json
from unittest import mock

import jax
import pytest
from flax import nnx
from model_cases import k3

from benchmarks import prefill_steps, savings, savings_rows, serving_model
from kda_jax import warming
from kda_jax.models import from_config, save_pretrained
from kda_jax.models.weights import model_class


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = from_config(k3(2, (2,)), dtype="float32", backend="chunked")
    path = tmp_path_factory.mktemp("model")
    save_pretrained(model_class(config)(config, rngs=nnx.Rngs(0)), path)
    return path


def command(folder, tmp_path, *more):
    options = ["--lengths", "40", "200", "--budgets", "256", "--block", "64", "--repeats", "1"]
    where = ["--model", str(folder), "--output", str(tmp_path), "--name", "x"]
    return savings.main([*options, *where, *more])


def test_steps_and_cached_tokens_are_the_predicted_ones(folder, tmp_path):
    assert command(folder, tmp_path) == 0
    results = json.loads((tmp_path / "x.json").read_text())
    short, long = results["rows"]
    assert short["unchanged"] == "no whole block before the last token" and not long["unchanged"]
    counts = {
        (name, kind): (cell["steps"], cell["cached"])
        for name, kinds in long["times"].items()
        for kind, cell in kinds.items()
    }
    assert counts == {
        ("with", "cold"): (1, 0),
        ("without", "cold"): (2, 0),
        ("with", "warm"): (1, 192),
        ("without", "warm"): (1, 192),
    }
    assert (long["same_tokens"], long["tokens"]) == (2, 2)
    page = (tmp_path / "x.md").read_text()
    assert "| 200 | 1 | 2 -> 1 |" in page and "| 40 | 1 | 1 -> 1 |" in page
    assert "is the predicted one" in page


def test_a_number_of_steps_that_was_not_predicted_is_a_failure(folder, tmp_path, monkeypatch):
    def predict(*args):
        right = prefill_steps.predict(*args)
        return dataclasses.replace(right, split_steps=right.split_steps + 1)

    monkeypatch.setattr(savings_rows, "predict", predict)
    assert command(folder, tmp_path) == 1
    page = (tmp_path / "x.md").read_text()
    assert "without checkpoints, cold: (steps, cached) [(2, 0)], predicted (3, 0)" in page


def test_a_run_that_is_cut_off_leaves_its_rows_and_goes_on_from_them(folder, tmp_path):
    """There is time for the short prompts; the long ones would take as long again, and more."""
    more = ["--budgets", "256", "512"]

    def slow(*args):
        row = savings_rows.row(*args)
        row["times"]["with"]["cold"]["median"] = 1e9
        return row

    with mock.patch.object(savings, "row", slow):
        assert command(folder, tmp_path, *more, "--seconds", "1000") == 0
    results = json.loads((tmp_path / "x.json").read_text())
    assert [(r["length"], r["budget"]) for r in results["rows"]] == [(40, 256), (40, 512)]
    assert results["left_out"] == [[200, 256], [200, 512]]
    assert "Left out for want of time: 200 at 256, 200 at 512" in (tmp_path / "x.md").read_text()
    first = results["rows"][0]
    assert command(folder, tmp_path, *more, "--resume") == 0
    results = json.loads((tmp_path / "x.json").read_text())
    pairs = [(r["length"], r["budget"]) for r in results["rows"]]
    assert pairs == [(40, 256), (200, 256), (40, 512), (200, 512)] and not results["left_out"]
    assert results["rows"][0] == first
    with pytest.raises(SystemExit, match=r"x\.json has another block: 64"):
        command(folder, tmp_path, "--resume", "--block", "128")


def test_a_row_that_takes_long_gets_one_prompt_and_a_compiling_round_none(folder, tmp_path):
    """Of the second row of a length nothing is compiled, so its first prompt counts."""
    more = ["--budgets", "256", "512", "--lengths", "300"]
    compiled = []

    def timed(call):
        seconds, source = warming.timed(call)
        compiled.append(source)
        return seconds, source

    with mock.patch.object(savings_rows, "timed", timed):
        assert command(folder, tmp_path, *more, "--repeats", "3", "--row-seconds", "0") == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [r["prompts"] for r in rows] == [1, 1]
    assert compiled[:2] == ["compiled", "memory"] and compiled[-1] == "memory"


def test_the_random_model_has_the_shape_of_kimi_k3():
    def make():
        return serving_model.random_k3(
            layers=4, hidden=256, heads=2, experts=8, vocab=512, dtype="bfloat16"
        )

    facts = serving_model.describe(jax.eval_shape(make))
    assert serving_model.line(facts) == (
        "3 KDA and 1 MLA layer(s), hidden 256, 2 KDA heads of 128, 8 experts, bfloat16"
    )
