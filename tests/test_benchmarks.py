"""The benchmarks run, and what they print follows from what they measured."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import dispatch, floor, machine, metadata, prefill, report, shapes, timing
from benchmarks import run as runner
from kda_jax import chunk_kda_prefill

CEILINGS = floor.Ceilings(float32_flops=1e12, bfloat16_flops=1e12, copy_bandwidth=1e11)
TINY = shapes.Shape("tiny", (70, 3), H=2, K=16, V=32)
SINGLE = shapes.Shape("single", (20,), H=2, K=16, V=16)
QUICK = {"budget": 0.01}


def test_a_row_holds_times_errors_and_floor():
    row = prefill.run(TINY, "float32", ("chunked", "scan"), CEILINGS, **QUICK)
    assert row["backends"].keys() == {"chunked", "scan"} and not row["left_out"]
    for cell in row["backends"].values():
        assert cell["parity"] and cell["error_out"] < 1e-5
        assert 0 < cell["best"] <= cell["low"] <= cell["median"] <= cell["high"]
    assert row["floor_s"] == floor.floor(TINY, "float32", CEILINGS) > 0
    assert report.speedup(row, "chunked") is not None
    json.dumps(row)


@pytest.mark.parametrize("spoil", [1.01, math.nan])
def test_a_wrong_result_gets_no_ratio(spoil):
    def wrong(*args, **options):
        result = chunk_kda_prefill(*args, **options)
        return result._replace(out=result.out * spoil)

    row = prefill.run(SINGLE, "float32", ("scan",), CEILINGS, step=wrong, **QUICK)
    assert not row["backends"]["scan"]["parity"]
    row["backends"]["good"] = {"median": 1.0, "parity": True}
    assert report.speedup(row, "scan") is None
    assert report.speedup(row, "good") is None  # nothing right to compare with


def test_a_backend_that_does_not_run_here_is_left_out_with_the_reason(monkeypatch):
    real = prefill.supports

    def supports(backend, **facts):
        answer = real(backend, **facts)
        return answer if backend == "scan" else answer._replace(supported=False, reason="because")

    monkeypatch.setattr(prefill, "supports", supports)
    row = prefill.run(SINGLE, "bfloat16", ("fused", "scan"), CEILINGS, **QUICK)
    assert row["left_out"] == {"fused": "because"} and row["backends"].keys() == {"scan"}


def test_the_runner_writes_json_page_and_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "single", SINGLE)
    monkeypatch.setattr(floor, "measure_ceilings", lambda **_: CEILINGS)
    command = ["--backends", "scan", "--shapes", "single", "--budget", "0.01"]
    assert runner.main([*command, "--output", str(tmp_path), "--name", "x"]) == 0
    results = json.loads((tmp_path / "x.json").read_text())
    assert [row["dtype"] for row in results["prefill"]] == ["float32", "bfloat16"]
    assert results["machine"]["cores"] >= 1 and results["machine"]["versions"]["jax"]
    page = (tmp_path / "x.md").read_text()
    for word in (results["machine"]["date"], results["machine"]["cpu"], "single", "x.png"):
        assert word in page
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_growth_is_the_exponent():
    def row(tokens, seconds):
        cell = {"median": seconds, "parity": True}
        facts = {"sequences": 1, "tokens": tokens, "H": 4, "dtype": "float32"}
        return {**facts, "backends": {"scan": cell}}

    rows = [row(t, 1e-6 * t**2) for t in (1024, 4096, 16384)]
    assert report.growth({"prefill": rows}, "scan", 4, "float32") == pytest.approx(2.0)
    assert report.growth({"prefill": rows[:1]}, "scan", 4, "float32") is None


def test_the_floor_counts_each_token_and_head_once():
    double = shapes.Shape("double", TINY.seq_lens * 2, TINY.H, TINY.K, TINY.V)
    assert floor.flops(double) == 2 * floor.flops(TINY)
    assert floor.traffic(double, 4) == 2 * floor.traffic(TINY, 4)
    # q, k, g [73, 2, 16], v and out [73, 2, 32], beta [73, 2] and two float32 states.
    assert floor.traffic(TINY, 2) == 2 * 73 * 2 * (3 * 16 + 2 * 32 + 1) + 4 * 2 * 2 * 16 * 32


def test_shapes_have_unique_names_and_the_cpu_table_is_complete():
    everything = {*shapes.ONE_SEQUENCE, *shapes.PACKED, *shapes.GPU_TARGETS}
    assert len(shapes.SHAPES) == len(everything)
    assert set(shapes.CPU) <= shapes.SHAPES.keys()
    cells = {(s.H, s.tokens) for s in map(shapes.SHAPES.get, shapes.CPU) if len(s.seq_lens) == 1}
    assert cells == {(H, T) for H in (4, 12) for T in (256, 1024, 4096, 16384)}
    lens = shapes.ragged_lens(256, 65536)
    assert sum(lens) == 65536 and min(lens) > 0 and len(set(lens)) > 32


def test_measure_calls_until_the_result_is_ready_and_bounds_the_samples():
    calls = []
    timings = timing.measure(
        {"a": lambda: calls.append(0) or jnp.ones(3)}, budget=0.0, sample_time=0.0, min_samples=4
    )
    assert timings["a"].samples in (3, 4) and timings["a"].calls == 1
    assert len(calls) == 2 + timings["a"].samples


def test_dispatch_and_metadata_give_rows():
    result = dispatch.run(("scan",), **QUICK)
    assert [row["what"] for row in result["rows"]][-1] == "scan"
    rows = metadata.run(**QUICK)["rows"]
    assert len(rows) == 3
    # The aim is 200 us on an idle machine; a test machine may be busy.
    assert min(row["best"] for row in rows) < 5 * metadata.LIMIT


def test_the_machine_is_described_without_names_of_people_or_paths():
    facts = machine.describe()
    assert facts["cpu"] and facts["date"].endswith("UTC")
    assert "/home" not in json.dumps(facts)
    assert np.isfinite(facts["cores"])
