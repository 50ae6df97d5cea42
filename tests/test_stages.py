"""What the profiler is asked for, and what is made of its answer."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import ncu, stages

WALK = "void kda::(anonymous namespace)::walk_kernel<kda::Tiles<(int)64>, 128>(kda::Problem, int)"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# name, unit, and the value in each of three launches
COLUMNS = [
    ("ID", "", "0", "1", "2"),
    ("Kernel Name", "", WALK, WALK, "fill(int)"),
    ("Block Size", "", "(128, 1, 1)", "(128, 1, 1)", "(1, 1, 1)"),
    ("dram__bytes_read.sum", "byte", "1,000,000", "3000000", "n/a"),
    ("dram__bytes_write.sum", "byte", "500000", "500000", "0"),
    ("gpu__time_duration.sum", "ns", "10000", "30000", "1000"),
    ("launch__registers_per_thread", "register/thread", "118", "118", "8"),
    ("sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active", "%", "20", "40", ""),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "12.5", "12.5", "1"),
    (STALLED.format("barrier"), "inst", "1", "1", ""),
    (STALLED.format("long_scoreboard"), "inst", "3", "3", ""),
    ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "30", "50", "2"),
]


def raw_page() -> list[str]:
    """As ncu writes it."""
    lines = (",".join(f'"{cell}"' for cell in row) for row in zip(*COLUMNS, strict=True))
    return ["==PROF== Connected to process 1", *lines]


def test_the_profilers_page_is_read() -> None:
    launches = ncu.parse(raw_page())
    assert [x["name"] for x in launches] == ["walk_kernel", "walk_kernel", "fill"]
    walk, fill = ncu.by_kernel(launches)
    assert walk["launches"] == 2 and walk["seconds"] == pytest.approx(4e-5)
    assert (walk["read"], walk["written"], walk["registers"]) == (4e6, 1e6, 118)
    assert walk["tensor"] == pytest.approx(35) and walk["issue"] == pytest.approx(45)
    assert walk["stalls"] == {"long_scoreboard": 0.75, "barrier": 0.25}
    assert fill["read"] == 0 and fill["tensor"] is None
    assert ncu.parse(["==ERROR== no permission"]) == []
    results = {
        "machine": {"command": "c", "date": "d"},
        "device": {"platform": "cuda", "kind": "Card", "architecture": "9.0"},
        "kind": "random",
        "copy_bandwidth": 1e12,
        "rows": [{"shape": "a", "kernels": [walk, fill]}, {"shape": "b", "failed": "why"}],
    }
    page = stages.markdown(results)
    assert "| walk_kernel | 2 | 40.0 | 98 % | 4.0 | 1.0 | 12 % | 35 % | 45 % |" in page
    assert "long_scoreboard 75 %, barrier 25 %" in page and "## b\n\nwhy" in page


def test_the_profiler_is_asked_for_what_it_has(tmp_path: Any) -> None:
    tool = tmp_path / "ncu"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "if '--query-metrics' in sys.argv: print('sm__pipe_tensor_cycles_active  Counter')\n"
        "else: print(*sys.argv, file=open(sys.argv[sys.argv.index('--log-file') + 1], 'w'))\n"
    )
    tool.chmod(0o755)
    names = ncu.metrics(str(tool))
    assert names[-1].startswith("sm__pipe_tensor_cycles_active.") and len(names) == 6
    with pytest.raises(RuntimeError, match="profiled no kernel"):
        ncu.profile(str(tool), ["program"], tmp_path / "log", tmp_path)
    log = (tmp_path / "log").read_text()
    assert "--clock-control none" in log and "--profile-from-start off" in log


@pytest.mark.parametrize(
    "platform, words", [("rocm", "rocprofv3"), ("cuda", "Nsight Compute is missing"), ("cpu", "no")]
)
def test_without_the_profiler_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, platform: str, words: str
) -> None:
    monkeypatch.setattr(stages.device, "describe", lambda: {"platform": platform, "kind": "x"})
    assert stages.main(["--ncu", "no-such-profiler"]) == 2
    assert words in capsys.readouterr().out
