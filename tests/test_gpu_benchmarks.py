"""The GPU's benchmarks, as far as a CPU runs them: what is checked, counted, refused, printed."""

from __future__ import annotations

import functools
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    device_time,
    floor,
    gpu,
    gpu_prefill,
    gpu_table,
    inputs,
    peer_fla,
    peers,
    shapes,
    summary,
)
from kda_jax import KDAResult
from kda_jax.testing import make_case

TINY = shapes.Shape("tiny", (20, 3), H=3, K=16, V=16)
FAST = {"budget": 0.01, "calls": 2}


def row(shape: str = "tiny", parity: bool = True, median: float = 3e-4) -> dict[str, Any]:
    cell = {
        "median": median, "low": median, "high": median, "parity": parity,
        "error_out": 2e-3, "error_state": 1e-3, "overlap": True, "queued": 4e-4,
    }  # fmt: skip
    cells = {"fused": {"random": cell, "k3": dict(cell, median=2 * median)}}
    return {"shape": shape, "traffic": 1e8, "backends": cells, "left_out": {"scan": "slow"}}


def table(rows: list[Any], peer_rows: list[Any]) -> dict[str, Any]:
    times = {"low": 1e-3, "high": 1e-3}
    return {
        "machine": {
            "command": "c", "date": "d", "system": "s", "python": "3", "versions": {"jax": "1"},
            "xla_flags": "",
        },
        "device": {"platform": "cuda", "kind": "Card", "architecture": "9.0", "memory": 1},
        "copy_bandwidth": 1e12,
        "backends": ["fused", "scan"],
        "kinds": ["random", "k3"],
        "targets": {"tiny": 0.31},
        "rows": rows,
        "peers": {
            "rows": [r | times for r in peer_rows],
            "left_out": {"jla": "not installed"},
            "versions": {"fla-core": "0.6.0"},
            "tuning": "all",
        },
    }  # fmt: skip


FLA = {"peer": "FLA", "shape": "tiny", "median": 1e-3}


def stand_in(q: Any, k: Any, v: Any, *rest: Any, metadata: Any, backend: str) -> KDAResult:
    """Compiles in no time; `in_float64` is its reference."""
    state = jnp.ones((metadata.capacity.sequences, q.shape[2], v.shape[3], q.shape[3]))
    return KDAResult(v * 1, state, state[:0])


def in_float64(case: Any) -> KDAResult:
    args = [np.asarray(x, np.float64) for x in case.args]
    return stand_in(*args, metadata=case.metadata, backend="")


def drawn_on_the_host(shape: shapes.Shape, kind: str, seed: int) -> inputs.Arrays:
    case = make_case(
        kind, seq_lens=shape.seq_lens, H=shape.H, K=shape.K, V=shape.V, dtype="bfloat16",
        seed=seed, initial_state=False,
    )  # fmt: skip
    return tuple(jax.device_put(list(case.args)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference to compile, no random numbers of the device's, no second timing."""
    monkeypatch.setattr(gpu_prefill, "scan_in_float64", in_float64)
    monkeypatch.setattr(gpu_prefill, "_QUEUED_FROM", math.inf)
    monkeypatch.setattr(inputs, "of_shape", drawn_on_the_host)


def test_a_row_is_checked_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "of_shape", drawn_on_the_host)
    shape = shapes.Shape("tiny", (5, 3), H=3, K=4, V=4)
    found = gpu_prefill.run(shape, ("scan",), kinds=("random",), **FAST)
    cell = found["backends"]["scan"]["random"]
    assert cell["parity"] and cell["finite"] and 5e-4 < cell["error_out"] < 4e-3
    assert cell["heads_checked"] == shape.H and cell["calls_in_program"] == 2
    assert 0 < cell["low"] <= cell["median"] <= cell["high"]
    assert found["traffic"] == floor.traffic(shape, 2)
    assert ("queued" in cell) == (cell["median"] >= 150e-6)
    json.dumps(found)


@pytest.mark.parametrize("spoil", [1.01, math.nan])
def test_a_wrong_result_fails_the_check(quick: None, spoil: float) -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        result = stand_in(*args, **options)
        return result._replace(out=result.out * spoil)

    right = gpu_prefill.run(TINY, ("scan",), step=stand_in, **FAST)
    assert gpu_table.correct(right, "scan") and right["backends"]["scan"].keys() == {"random", "k3"}
    found = gpu_prefill.run(TINY, ("scan",), kinds=("random",), step=wrong, **FAST)
    assert not gpu_table.correct(found, "scan")


def test_a_backend_that_fails_leaves_the_rest_of_the_table(quick: None) -> None:
    def broken(*args: Any, backend: str, **options: Any) -> Any:
        if backend == "scan":
            raise RuntimeError("out of luck\nand a long story")
        return stand_in(*args, backend=backend, **options)

    found = gpu_prefill.run(TINY, ("scan", "chunked"), kinds=("k3",), step=broken, **FAST)
    assert found["left_out"] == {"scan": "RuntimeError: out of luck"}
    assert found["backends"].keys() == {"chunked"} and found["failed"] == ["scan"]


def test_some_heads_of_long_shapes_are_compared_and_they_are_the_right_ones(quick: None) -> None:
    shape = shapes.Shape("long", (9000, 20), H=5, K=2, V=2)
    picked = gpu_prefill.Picked(shape, sets=3)
    assert len(picked.pairs) == 2 and {s for s, _ in picked.pairs} == {0, 2}
    picked.pairs = [(1, 2), (0, 1)]
    sets = [inputs.of_shape(TINY, "random", seed) for seed in range(2)]
    case = picked.case(sets, TINY)
    assert case.q.shape == (1, 23, 2, 16) and case.A_log.shape == (2,)
    np.testing.assert_array_equal(case.k[:, :, 0], sets[1][1][:, :, 2])
    np.testing.assert_array_equal(case.dt_bias[1], sets[0][6][1])
    results = [stand_in(*x, metadata=case.metadata, backend="") for x in sets]
    results = [r._replace(final_state=r.final_state * (1 + i)) for i, r in enumerate(results)]
    out, state = picked.take(results)
    np.testing.assert_array_equal(out[:, :, 1], results[0].out[:, :, 1])
    np.testing.assert_array_equal(state[:, 0], results[1].final_state[:, 2])


def test_inputs_are_as_the_kinds_say() -> None:
    q, *_, raw_beta, A_log, dt_bias = inputs.of_shape(TINY, "k3", 0)
    assert q.dtype == raw_beta.dtype == "bfloat16" and dt_bias.shape == (3, 16)
    assert float(raw_beta.max()) <= 2.95 and -7.8 <= float(dt_bias.min()) < -1.4
    *_, A_log, dt_bias = inputs.of_shape(TINY, "random", 0)
    assert float(A_log.min()) >= 0 and float(dt_bias.min()) >= 0 and float(dt_bias.max()) < 1


def test_calls_of_a_program() -> None:
    assert device_time.calls_for(1 << 20, None) == 32
    assert device_time.calls_for(1 << 30, None) == 8
    assert device_time.calls_for(1 << 30, 10 << 30) == 4
    assert device_time.calls_for(1 << 30, 1 << 30) == 2  # a program of one call is none
    sets = [(np.float32(i),) for i in range(3)]
    run = device_time.program(lambda x, y: x + y, (np.float32(1),))
    assert [float(x) for x in run(sets)] == [1, 2, 3]
    timings = device_time.per_call({"a": (run, sets)}, budget=0.01)
    assert 0 < timings["a"].best <= timings["a"].median < 0.1


def test_the_memory_floor_is_the_traffic_over_the_bandwidth() -> None:
    shape = shapes.SHAPES["T8192_H12"]
    assert floor.memory_floor(shape, "bfloat16", 4.24e12) == pytest.approx(29.9e-6, rel=0.01)
    found = row() | {"traffic": floor.traffic(shape, 2)}
    results = table([found], [])
    assert gpu_table.floor_of(results, found) == floor.memory_floor(shape, "bfloat16", 1e12)
    assert floor.device_copy_bandwidth(1 << 20, budget=0.01) > 1e6


def test_the_table_has_a_target_for_each_shape() -> None:
    assert shapes.TARGETS.keys() == set(shapes.GPU) and len(shapes.GPU) == 12
    assert all(0.2 < target < 0.4 for target in shapes.TARGETS.values())


def test_ratios_and_verdicts() -> None:
    good, bad = row(), row(parity=False)
    results = table([good], [FLA])
    assert gpu_table.ratio(results, good, "FLA") == pytest.approx(0.3)
    assert gpu_table.ratio(results, good, "jla") is None
    assert gpu_table.ratio(results, bad, "FLA") is None
    assert gpu_table.verdict(results, good) == "target met"
    assert gpu_table.verdict(results, bad) == "wrong"
    assert gpu_table.verdict(results, row(median=5e-4)) == "faster, target missed"
    assert gpu_table.verdict(results, row(median=2e-3)) == "slower than FLA"
    assert gpu_table.verdict(results, row("other")) == "no peer"
    assert gpu_table.verdict(results, {"shape": "tiny", "backends": {}}) == "not run"
    # Wrong on one kind of inputs is wrong.
    bad["backends"]["fused"]["random"]["parity"] = True
    assert gpu_table.ratio(results, bad, "FLA") is None


def test_the_page_is_generated_from_the_numbers() -> None:
    failed = {"peer": "jla", "shape": "tiny", "failed": "because"}
    page = gpu_table.markdown(table([row()], [FLA, failed]), "x.png")
    line = next(line for line in page.splitlines() if line.startswith("| tiny"))
    assert "300 (300 - 300) | 1000 (1000 - 1000) | - | 0.30 | 0.31 | - | 100 | 3.0 |" in line
    for words in ("target met", "x.png", "left out, scan: slow", "jla on tiny: because", "2.00 x"):
        assert words in page or words in line
    page = gpu_table.markdown(table([row(parity=False)], [FLA]))
    line = next(line for line in page.splitlines() if line.startswith("| tiny"))
    assert "wrong: 300" in line and "| - | 0.31 |" in line and "0.30" not in line


def test_a_peer_that_is_missing_or_fails_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = {"FLA": (("no_such_module", "its-package"),), "jla": (("numpy", "numpy"),)}
    monkeypatch.setattr(peers, "_NEEDS", needs)
    monkeypatch.setattr(
        peers, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no luck')"]
    )
    found = peers.run(["T1024_H12"], report=lambda _: None)
    assert found["left_out"] == {
        "FLA": "not installed: pip install its-package",
        "jla": "its process failed with code 1: no luck",
    }
    code = "import json; print('noise'); print(json.dumps(dict(peer='jla', shape='A', median=2)))"
    monkeypatch.setattr(peers, "_command", lambda *_: [sys.executable, "-c", code])
    found = peers.run(["A", "B"], report=lambda _: None)
    assert peers.time_of(found, "jla", "A") == 2 and peers.time_of(found, "jla", "B") is None
    assert peers.row_of(found, "jla", "B")["failed"] and found["versions"].keys() == {"numpy"}


def test_the_best_candidates_of_one_number_of_heads_serve_the_others() -> None:
    def config(size: int) -> Any:
        return SimpleNamespace(kwargs={"BK": size}, num_warps=4, num_stages=2)

    class Config(SimpleNamespace):
        __hash__ = object.__hash__

    def tuner() -> Any:
        configs = [Config(**vars(config(size))) for size in range(6)]
        return SimpleNamespace(
            configs=configs, cache={}, base_fn=SimpleNamespace(__module__="m", __name__="f")
        )

    first, second, untouched = tuner(), tuner(), tuner()
    first.cache = {"key": first.configs[5]}
    first.configs_timings = {c: [float(abs(i - 2))] for i, c in enumerate(first.configs)}
    peer = peer_fla.Peer.__new__(peer_fla.Peer)
    peer.tuners = [first]
    best = json.loads(json.dumps(peer.best_configs()))
    untouched.base_fn = SimpleNamespace(__module__="m", __name__="g")
    peer.tuners = [second, untouched]
    peer.restrict(best)
    assert {c.kwargs["BK"] for c in second.configs} == {1, 2, 3, 5}
    assert len(untouched.configs) == 6


def test_the_command_writes_json_page_and_plot_and_reuses_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, quick: None
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setattr(gpu_prefill, "run", functools.partial(gpu_prefill.run, step=stand_in))
    # The plain form stands in for the kernel, which a CPU build without a compiler does not have.
    monkeypatch.setattr(gpu_table, "OURS", "scan")
    for function in (gpu_table.correct, gpu_table.ratio, gpu_table.seconds):
        defaults = tuple("scan" if x == "fused" else x for x in function.__defaults__ or ())
        monkeypatch.setattr(function, "__defaults__", defaults)
    arguments = ["--shapes", "tiny", "--backends", "scan", "--budget", "0.01", "--calls", "2"]
    arguments += ["--copy-bytes", "1000000", "--output", str(tmp_path)]
    earlier = table([], [dict(FLA, median=10.0)])
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    reuse = ["--peers-json", str(tmp_path / "earlier.json"), "--name", "x"]
    assert gpu.main([*arguments, *reuse]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert not found["peers"]["rows"] and "is of Card" in found["peers"]["left_out"]["FLA"]

    earlier["device"]["kind"] = found["device"]["kind"]
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    assert gpu.main([*arguments, *reuse]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert gpu_table.ratio(found, found["rows"][0], "FLA") > 0
    page = (tmp_path / "x.md").read_text()
    assert "x.png" in page and "timed in an earlier run" in page
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main([*arguments, "--no-peers"])


def test_the_readme_gets_its_results_from_the_files(tmp_path: Any) -> None:
    results = table([row(), row("other", parity=False)], [FLA])
    (tmp_path / "card.json").write_text(json.dumps(results))
    (tmp_path / "cpu.json").write_text(json.dumps({"prefill": []}))
    (tmp_path / "card.md").write_text("# Prefill on Card\n\ntext\n")
    found = summary.section(tmp_path)
    assert "### [Card](results/card.md), d" in found
    assert "| target met | 1 | tiny (0.30 of FLA, 3.0 floors) |" in found
    assert "| wrong | 1 | other |" in found and "- [Prefill on Card](results/card.md)" in found
    once = summary.updated(summary.README.read_text(), found)
    assert found in once and summary.updated(once, found) == once
    with pytest.raises(ValueError, match="no section"):
        summary.updated("nothing", found)


@pytest.mark.parametrize("tuning", ["bounded", "full"])
def test_fla_compiles_before_it_times_and_the_first_heads_lead(
    monkeypatch: pytest.MonkeyPatch, tuning: str
) -> None:
    steps: list[str] = []

    def compiled(names: Any, configs: Any, _: Any) -> None:
        steps.append(f"compile {' '.join(names)}" + " restricted" * bool(configs))

    def timed(module: str, arguments: Any, *_: Any) -> list[dict[str, Any]]:
        words = [word for word in arguments if not word.endswith(".json")]
        steps.append(" ".join(words))
        return [{"peer": "FLA", "shape": name} for name in words if name in shapes.SHAPES]

    monkeypatch.setattr(peers, "_compile", compiled)
    monkeypatch.setattr(peers, "_lines", timed)
    rows = peers._fla(["T1024_H12", "T8192_H96", "ragged_H12"], tuning, print)
    assert len(rows) == 3
    if tuning == "full":
        names = "T1024_H12 T8192_H96 ragged_H12"
        assert steps == [f"compile {names}", f"time --shapes {names}"]
        return
    assert steps == [
        "compile T1024_H12 ragged_H12",
        "time --shapes T1024_H12 ragged_H12 --configs --write-configs",
        "compile T8192_H96 restricted",
        "time --shapes T8192_H96 --configs",
    ]
