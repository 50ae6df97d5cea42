"""The accuracy table: its cells, its page, and when it says that a peer is better."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy
from kda_jax import supports
from kda_jax.testing import scan_in_float64


def exact(case: Any) -> tuple[Any, Any]:
    result = scan_in_float64(case)
    return result.out, result.final_state


def off(case: Any) -> tuple[Any, Any]:
    out, state = exact(case)
    return out * 1.01, state * 1.02


def test_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    monkeypatch.setattr(accuracy, "runs", lambda: {"fused": off, "chunked": exact})
    arguments = ["--tokens", "20", "--seeds", "2", "--output", str(tmp_path)]
    assert accuracy.main(arguments) == 0
    found = json.loads((tmp_path / "accuracy_cpu.json").read_text())
    assert [row["case"] for row in found["rows"]] == list(accuracy.CASES)
    for row in found["rows"]:
        np.testing.assert_allclose(row["errors"]["fused"], [0.01, 0.02], rtol=1e-9)
        assert row["errors"]["chunked"] == [0, 0]
        assert 1e-3 < row["errors"]["rounding alone"][0] < 3e-3  # bfloat16
    page = (tmp_path / "accuracy_cpu.md").read_text()
    assert "1.00e-02 / 2.00e-02" in page and "| slow decay |" in page
    assert page.strip() in capsys.readouterr().out.strip()

    monkeypatch.setattr(accuracy, "runs", lambda: {"fused": off, accuracy.PEER: exact})
    monkeypatch.setattr(accuracy, "_peer_versions", lambda: {"fla-core": "0.6.0"})
    assert accuracy.main(arguments) == 1
    assert "WORSE THAN FLA: slow decay: state of fused 2.00e-02" in capsys.readouterr().out
    monkeypatch.setattr(accuracy, "runs", lambda: {"fused": exact, accuracy.PEER: off})
    assert accuracy.main(arguments) == 0


def test_queries_near_the_keys() -> None:
    far, near = (
        accuracy.make(name, 0, 30)
        for name in ("near-equal keys", "near-equal keys, queries near them")
    )
    np.testing.assert_array_equal(far.k, near.k)
    assert np.abs(near.q - near.k).max() < 0.2 < np.abs(far.q - far.k).max()


def test_what_runs_here(registry: None) -> None:
    columns = accuracy.runs()
    assert "chunked" in columns
    assert ("fused" in columns) == bool(supports("fused", dtype="bfloat16"))
