"""The benchmarks around the operator: checkpoints, memory, neighbours, a layer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks import checkpoints, layer, memory, neighbours


def test_checkpoints_memory_and_neighbours_print_what_they_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    where = ["--output", str(tmp_path), "--name", "x"]
    monkeypatch.setattr(checkpoints, "chunk_kda_prefill", lambda *args, **_: args[2] * 1)
    quick = ["--tokens", "1100", "--heads", "1", "--budget", "0.01", "--backend", "scan"]
    assert checkpoints.main([*quick, *where]) == 0
    found = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [r["count"] for r in found] == [0, 1, 1, 1, 1] and found[0]["over_none"] == 0
    assert "| T1100_H1, every 1024 tokens (1) |" in (tmp_path / "x.md").read_text()

    monkeypatch.setattr(
        memory, "in_a_process", lambda T, H, backend: {"tokens": T, "H": H, "failed": "no room"}
    )
    assert memory.main(["--tokens", "8", "--heads", "2", *where]) == 1
    assert (
        "| T = 8, H = 2 | - | - | - | - | - | failed: no room |" in (tmp_path / "x.md").read_text()
    )


def test_the_bytes_of_the_neighbours() -> None:
    assert neighbours.conv_bytes(10, 2) == 2 * (2 * 3 * 10 * 256 + 3 * 256 * 4 + 3 * 256 * 3)
    assert neighbours.decode_bytes(3, 2) == 3 * 2 * (2 * 4 * 128**2 + 2 * (4 * 128 + 1 + 128))


def test_the_plain_decode_step_is_the_operator() -> None:
    sets, (metadata,) = neighbours.decode(2, 1, 1)
    out, state = neighbours.plain_decode(*sets[0], metadata)
    want = neighbours.through_the_operator(*sets[0], metadata, backend="scan")
    np.testing.assert_allclose(np.float32(out), np.float32(want[0]), atol=1e-2)
    np.testing.assert_allclose(state, want[1], atol=1e-5)


def test_the_decode_step_in_a_pool() -> None:
    sets, (metadata,) = neighbours.decode(2, 1, 2)
    step = neighbours.InPool(2, 1)
    before = np.asarray(step.pool)
    outs = step(sets)
    state = before[np.asarray(step.rows)]
    for (args, _), out in zip(sets, outs, strict=True):
        want, state = neighbours.plain_decode(args, state, metadata)
        np.testing.assert_allclose(np.float32(out), np.float32(want[0]), atol=1e-2)
    np.testing.assert_allclose(step.pool[step.rows], state, atol=1e-5)
    assert step(sets)[0].shape == outs[0].shape  # on the pool that it left


def test_what_an_operator_adds_to_a_layer() -> None:
    cells = {"fused": {"median": 5.0}, layer.STAND_IN: {"median": 3.0}}
    assert layer.in_place({"stack": cells, "layers": 10}) == pytest.approx(0.2)
    assert layer.in_place({"stack": {layer.STAND_IN: {"median": 3.0}}, "layers": 10}) is None
