"""The load test in seconds instead of minutes, and that it can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import ENVIRONMENT, HERE

from benchmarks import serving_load
from benchmarks.load_clients import Tally
from benchmarks.load_server import Sample

SMALL = (
    *("--minutes", "0.1", "--clients", "24", "--prompts", "24", "--vocab", "90"),
    *("--block-size", "16", "--longest", "150", "--max-tokens", "8"),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_PLATFORMS", "PYTHONPATH"):
        monkeypatch.setenv(name, ENVIRONMENT[name])


def load(tmp_path: Path, *options: str, server: str = "") -> tuple[int, dict[str, Any], str]:
    command = f"{sys.executable} {HERE / 'http_server.py'} --port {{port}} {server}"
    code = serving_load.main([*SMALL, "--output", str(tmp_path), "--command", command, *options])
    results = json.loads((tmp_path / "serving_load_cpu.json").read_text())
    return code, results["load"], (tmp_path / "serving_load_cpu.md").read_text()


def test_load_and_a_hard_end(tmp_path: Path) -> None:
    code, found, page = load(tmp_path, "--kills", "1")
    assert code == 0, found["wrong"]
    assert found["starts"] == 2
    counts = found["counts"]
    assert all(counts[kind] for kind in ("whole", "streamed", "cancelled", "restarts"))
    assert found["server"]["kda_prefix_cache_hits_total"] > 0
    assert "Wrong: nothing." in page


def test_a_server_with_wrong_tokens_is_found(tmp_path: Path) -> None:
    code, found, page = load(tmp_path, server="--wrong-when-warm")
    assert code == 1
    assert any(text.startswith("wrong token: prompt") for text in found["wrong"])
    assert "- wrong token" in page


NUMBERS = dict.fromkeys((*serving_load._HELD, *serving_load._POOLS, "kda_engine_failed_total"), 0.0)


@pytest.mark.parametrize(
    ("after", "grown", "code", "message"),
    [
        ({}, 0, 0, None),
        ({"kda_engine_running": 1}, 0, 0, "kda_engine_running is 1"),
        ({"kda_engine_free_rows": -1}, 0, 0, "kda_engine_free_rows was 0 and is -1"),
        ({"kda_engine_failed_total": 2}, 0, 0, "2 requests failed"),
        ({}, 2**21, 0, "memory grew by 2.0 MiB"),
        ({}, 0, -9, "ended with -9"),
    ],
)
def test_judging(after: dict[str, float], grown: float, code: int, message: str | None) -> None:
    tally = Tally()
    tally.counts.update(whole=1, streamed=1, cancelled=1)
    wrong = serving_load.judge(tally, NUMBERS, NUMBERS | after, grown, 2**20, code)
    assert len(wrong) == (message is not None)
    assert message is None or message in wrong[0]
    tally.lost = ["x"] * 12
    assert "and 2 more lost requests" in serving_load.judge(tally, NUMBERS, NUMBERS, 0, 0, 0)
    empty = serving_load.judge(Tally(), NUMBERS, NUMBERS, 0, 0, 0)
    assert "no request was whole: the load is too short to say anything" in empty


def test_growth_leaves_the_beginning_out() -> None:
    flat = [Sample(t, 100 if t > 20 else 10 * t, {}) for t in range(100)]
    assert serving_load.growth(flat) == 0
    leak = [Sample(t, 100 + t, {}) for t in range(100)]
    assert serving_load.growth(leak) == 60
    assert serving_load.growth(flat[:4]) == 0
