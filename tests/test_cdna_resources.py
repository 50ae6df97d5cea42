"""The resource gate on compiler reports, and taking code objects out of a library (tools/amd)."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools" / "amd"


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(name: str, **changes: int | str) -> str:
    """What clang-22 prints for one kernel."""
    usage = {
        "TotalSGPRs": 20,
        "VGPRs": 96,
        "AGPRs": 32,
        "ScratchSize [bytes/lane]": 0,
        "Dynamic Stack": "False",
        "Occupancy [waves/SIMD]": 4,
        "SGPRs Spill": 0,
        "VGPRs Spill": 0,
        "LDS Size [bytes/block]": 60000,
    } | changes
    lines = [f"Function Name: {name}", *(f"    {key}: {value}" for key, value in usage.items())]
    where, flag = "k.hip:8:1: remark: ", " [-Rpass-analysis=kernel-resource-usage]"
    return "".join(f"{where}{line}{flag}\n    8 | void k() {{\n      | ^\n" for line in lines)


def gate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "resources.py"), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_table_is_written_and_compared(tmp_path: Path) -> None:
    (tmp_path / "k.gfx942.txt").write_text(report("walk") + report("_Z4scanILi3EEvPf"))
    table = tmp_path / "table.json"
    missing = gate(tmp_path, "--table", str(table))
    assert missing.returncode == 1
    assert "FAILED walk gfx942: not in the table" in missing.stdout
    assert gate(tmp_path, "--table", str(table), "--update").returncode == 0
    stored = json.loads(table.read_text())
    assert stored["kernels"]["walk"]["gfx942"]["agprs"] == 32
    again = gate(tmp_path, "--table", str(table))
    assert again.returncode == 0
    assert "ok: 2 kernels and targets" in again.stdout
    stored["kernels"]["walk"]["gfx942"]["occupancy"] = 5
    stored["kernels"]["gone"] = {"gfx950": stored["kernels"]["walk"]["gfx942"]}
    table.write_text(json.dumps(stored))
    worse = gate(tmp_path, "--table", str(table))
    assert worse.returncode == 1
    assert "FAILED walk gfx942: occupancy 4 < 5" in worse.stdout
    assert "FAILED gone gfx950: in the table, but not compiled" in worse.stdout


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"VGPRs Spill": 3}, "vgpr_spills = 3"),
        ({"SGPRs Spill": 1}, "sgpr_spills = 1"),
        ({"ScratchSize [bytes/lane]": 16}, "scratch = 16"),
        ({"Dynamic Stack": "True"}, "dynamic stack"),
        ({"LDS Size [bytes/block]": 65540}, "65540 bytes of LDS, the limit is 65536"),
    ],
)
def test_gate_needs_no_table(tmp_path: Path, changes: dict, complaint: str) -> None:
    (tmp_path / "k.gfx942.txt").write_text(report("walk", **changes))
    done = gate(tmp_path)
    assert done.returncode == 1
    assert f"FAILED walk gfx942: {complaint}\n" in done.stdout


def test_dynamic_lds_counts() -> None:
    resources = tool("resources")
    report_950 = report("walk", **{"LDS Size [bytes/block]": 0, "Occupancy [waves/SIMD]": 8})
    usage = {"walk": {"gfx950": resources.parse(report_950)["walk"]}}
    how = {"dynamic_lds": 60000, "threads": 256}
    assert resources.add_dynamic_lds(usage, {"walk": how}) == []
    assert usage["walk"]["gfx950"]["lds"] == 60000
    assert usage["walk"]["gfx950"]["occupancy"] == 2  # two workgroups of four waves on four SIMDs
    assert len(resources.add_dynamic_lds(usage, {"gone": how})) == 1


def test_incomplete_report_is_an_error() -> None:
    cut = report("walk").rsplit("k.hip", 1)[0]
    with pytest.raises(ValueError, match="no lds"):
        tool("resources").parse(cut)


def test_code_objects_of_a_library() -> None:
    code_objects = tool("code_objects")
    names = [b"host-x86_64-unknown-linux-gnu-", b"hipv4-amdgcn-amd-amdhsa--gfx942"]
    header = code_objects.MAGIC + struct.pack("<Q", 2)
    size = len(header) + sum(24 + len(name) for name in names)
    entries = [struct.pack("<QQQ", size, 0, len(names[0])) + names[0]]
    entries.append(struct.pack("<QQQ", size, 4, len(names[1])) + names[1])
    bundle = header + b"".join(entries) + b"\x7fELF"
    found = code_objects.bundles(b"before" + bundle + bytes(50) + bundle)
    assert found == [{"gfx942": b"\x7fELF"}] * 2
    with pytest.raises(SystemExit, match="no GPU code"):
        code_objects.bundles(b"nothing")
    with pytest.raises(SystemExit, match="without --offload-compress"):
        code_objects.bundles(b"..CCOB..")
