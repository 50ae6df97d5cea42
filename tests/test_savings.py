"""The benchmark of what checkpoints save: counts, page, and a mismatch is a failure."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
from flax import nnx
from model_cases import k3

from benchmarks import prefill_steps, savings, serving_model
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
    assert "| 200 | 2 -> 1 |" in page and "| 40 | 1 -> 1 |" in page
    assert "is the predicted one" in page


def test_a_number_of_steps_that_was_not_predicted_is_a_failure(folder, tmp_path, monkeypatch):
    def predict(*args):
        right = prefill_steps.predict(*args)
        return dataclasses.replace(right, split_steps=right.split_steps + 1)

    monkeypatch.setattr(savings, "predict", predict)
    assert command(folder, tmp_path) == 1
    page = (tmp_path / "x.md").read_text()
    assert "without checkpoints, cold: (steps, cached) [(2, 0)], predicted (3, 0)" in page


def test_the_random_model_has_the_shape_of_kimi_k3():
    def make():
        return serving_model.random_k3(
            layers=4, hidden=256, heads=2, experts=8, vocab=512, dtype="bfloat16"
        )

    facts = serving_model.describe(jax.eval_shape(make))
    assert serving_model.line(facts) == (
        "3 KDA and 1 MLA layer(s), hidden 256, 2 KDA heads of 128, 8 experts, bfloat16"
    )
