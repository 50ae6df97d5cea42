"""`kda_jax.verify`: passes what is right, finds what is wrong, says what is not supported."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
import pytest
from programs import needs_fused

from kda_jax import KDAResult, native, verify
from kda_jax.cli import main
from kda_jax.cli import verify as command
from kda_jax.testing import Case
from kda_jax.testing_pool import PoolCase
from kda_jax.verify import exact, in_pool, parity, runner, timing
from kda_jax.verify.parity import Parity
from kda_jax.verify.path import Path, first_difference

CPU = jax.local_devices(backend="cpu")[0]
FEW = [Parity("k3", dtype="float32"), Parity("slow", parity.LONG, None, "bfloat16", groups=2)]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases instead of all: the whole takes a minute."""
    monkeypatch.setattr(parity, "cases", lambda backend, dtypes: FEW)
    monkeypatch.setattr(timing, "_SHAPES", {"cpu": (64, 1)})


@needs_fused
def test_a_good_machine_passes(few: None, tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "report.json"
    seen: list[str] = []
    report = verify.run([CPU], backends=["fused"], on_result=lambda _, r: seen.append(r.group))
    assert report["passed"] and set(seen) == {"parity", *exact.CHECKS, "timing"}

    arguments = ["verify", "--platform", "cpu", "--backend", "fused", "--report", str(file)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "every supported call is right" in out and "2/2" in out and "6/6" in out
    assert all(len(line) <= 80 for line in out.splitlines() if "wrote" not in line)
    found = json.loads(file.read_text())
    assert found["passed"] and found["format"] == "kda_jax.verify/1"
    assert str(FilePath(native.__file__).parent) not in file.read_text()  # names no path
    assert {"kda_jax", "packages", "native", "date", "seconds"} <= found.keys()
    (device,) = found["devices"]
    assert (device["platform"], device["architecture"], device["passed"]) == ("cpu", None, True)
    assert device["counts"] == {"pass": len(seen), "fail": 0, "unsupported": 0}
    first = device["results"][0]
    assert first["name"] == FEW[0].name and first["facts"]["errors"]["out"] < 1e-5
    assert device["results"][-1]["facts"]["seconds"] > 0


@pytest.mark.parametrize("backend", verify.BACKENDS)
def test_the_cases(backend: str) -> None:
    """Each can be built and is asked once; together they meet every option."""
    asked = parity.cases(backend, ("float32", "float16", "bfloat16"))
    assert len({each.name for each in asked}) == len(asked)
    assert {"random", "saturated", "slow", "k3"} == {each.kind for each in asked}
    assert {each.lower_bound is None for each in asked} == {True, False}
    assert {each.state_layout for each in asked} == {"vk", "kv"}
    if backend == "fused":
        assert {each.chunk_size for each in asked} == {16, 32, 64}
        assert {each.dtype for each in asked} == {"float32", "float16", "bfloat16"}
        assert {each.dims[1] for each in asked} == {64, 128}
        assert {each.groups for each in asked} == {None, 2, 3, 4}
        assert any(each.activated for each in asked) and any(each.gates for each in asked)
    for each in asked:
        case = parity.build(each)
        assert case.metadata.capacity.tokens == case.q.shape[1]


# What a wrong kernel might do -> the check that must notice.
def _noise(path: Path, case: Case, result: KDAResult) -> KDAResult:
    out = result.out.copy()
    out[0, 0, 0, 0] += np.random.default_rng().uniform(0.1, 1)
    return result._replace(out=out)


def _leaks(path: Path, case: Case, result: KDAResult) -> KDAResult:
    used = case.metadata.num_tokens
    return result._replace(out=result.out + 0 * case.v[:, :used].sum())


def _reads_padding(path: Path, case: Case, result: KDAResult) -> KDAResult:
    return result._replace(out=result.out + 0 * case.v.sum())


def _adds_an_unused_state(path: Path, case: Case, result: KDAResult) -> KDAResult:
    return result._replace(final_state=result.final_state + 0 * case.initial_state.sum())


def _anchors_on_the_future(path: Path, case: Case, result: KDAResult) -> KDAResult:
    used = case.metadata.num_tokens
    tilt = 1 + 1e-7 * case.raw_g[:, :used].astype(np.float64).sum()
    return result._replace(out=(result.out * tilt).astype(np.float32))


def _rounds_checkpoints(path: Path, case: Case, result: KDAResult) -> KDAResult:
    saved = result.checkpoint_state.astype(np.float16).astype(np.float32)
    return result._replace(checkpoint_state=saved)


def _is_off_by_checkpoints(path: Path, case: Case, result: KDAResult) -> KDAResult:
    factor = np.float32(1 + 1e-3 * case.metadata.num_checkpoints)
    return result._replace(out=result.out * factor)


def _forgets_empty_sequences(path: Path, case: Case, result: KDAResult) -> KDAResult:
    final = result.final_state.copy()
    final[: case.metadata.num_sequences][case.metadata.seq_lens == 0] = 0
    return result._replace(final_state=final)


def _overflows(path: Path, case: Case, result: KDAResult) -> KDAResult:
    big = np.abs(case.raw_g[:, : case.metadata.num_tokens]).max() > 1e3
    return result._replace(out=result.out * np.float32(np.inf)) if big else result


def _shares_memory(path: Path, case: Case, result: KDAResult) -> KDAResult:
    _shares_memory.calls += 1
    if _shares_memory.calls <= 2:
        return result
    return _noise(path, case, result)


def _moves_the_pool(call: Any, p: PoolCase, result: Any) -> Any:
    return *result[:2], True


def _touches_a_row(call: Any, p: PoolCase, result: Any) -> Any:
    out, pool, moved = result
    pool = pool.copy()
    pool[p.others[0]] = 0
    return out, pool, moved


def _starts_again_from_the_end(call: Any, p: PoolCase, result: Any) -> Any:
    """As a second pass would that reads the row that the first one wrote."""
    return call(dataclasses.replace(p, pool=result[1]))


FAULTS: dict[Callable[[Path], None], Any] = {
    exact.again: _noise,
    exact.two_threads: _shares_memory,
    exact.nan_isolation: _leaks,
    exact.padding: _reads_padding,
    exact.fresh_rows: _adds_an_unused_state,
    exact.the_future: _anchors_on_the_future,
    exact.on_chunk_ends: _rounds_checkpoints,
    exact.elsewhere: _is_off_by_checkpoints,
    exact.empty_sequences: _forgets_empty_sequences,
    exact.extreme_gates: _overflows,
}
POOL_FAULTS: list[tuple[Callable[[Path], None], Any]] = [
    (in_pool.results, _moves_the_pool),
    (in_pool.results, _touches_a_row),
    (in_pool.results, _starts_again_from_the_end),
    (in_pool.second_pass, _starts_again_from_the_end),
]


def test_there_is_a_fault_for_each_check() -> None:
    checks = {check for group in exact.CHECKS.values() for check in group.values()}
    assert checks == FAULTS.keys() | {check for check, _ in POOL_FAULTS}


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_each_check_finds_its_fault(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], None]
) -> None:
    real, fault = Path.call, FAULTS[check]
    _shares_memory.calls = 0

    def call(self: Path, case: Case, **options: Any) -> KDAResult:
        return fault(self, case, real(self, case, **options))

    path = Path(CPU, "scan", "float32")
    check(path)
    monkeypatch.setattr(Path, "call", call)
    with pytest.raises(AssertionError), np.errstate(invalid="ignore"):
        check(path)


@pytest.mark.parametrize(("check", "fault"), POOL_FAULTS, ids=lambda x: x.__name__)
def test_each_check_of_a_pool_finds_its_fault(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], None], fault: Any
) -> None:
    real = Path.call_in_pool
    path = Path(CPU, "chunked", "float32")
    check(path)

    def call(self: Path, p: PoolCase) -> Any:
        return fault(functools.partial(real, self), p, real(self, p))

    monkeypatch.setattr(Path, "call_in_pool", call)
    with pytest.raises(AssertionError):
        check(path)


def test_parity_finds_a_wrong_result_and_the_command_fails(
    few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = Path.call
    monkeypatch.setattr(exact, "CHECKS", {})
    monkeypatch.setattr(parity, "cases", lambda backend, dtypes: FEW[:1])

    def call(self: Path, case: Case, **options: Any) -> KDAResult:
        result = real(self, case, **options)
        return result._replace(final_state=result.final_state * np.float32(1.001))

    monkeypatch.setattr(Path, "call", call)
    assert main(["verify", "--backend", "scan"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "1 checks FAILED" in out and "final_state: relative error 1.00e-03, bound 1.0e-05" in out

    def die(self: Path, case: Case, **options: Any) -> KDAResult:
        raise RuntimeError("INTERNAL:\nno kernel image")

    monkeypatch.setattr(Path, "call", die)
    report = verify.run([CPU], backends=["scan"])
    assert not report["passed"]
    assert report["devices"][0]["results"][0]["detail"] == "RuntimeError: INTERNAL: no kernel image"


def test_what_is_not_supported_is_reported_and_fails_nothing(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = native.NativeStatus(reasons={"cpu": "it is not built"})
    monkeypatch.setattr(native, "status", lambda: status)
    report = verify.run([CPU], backends=["fused", "scan"])
    assert report["passed"]
    result = report["devices"][0]["results"][0]
    assert (result["status"], result["detail"]) == ("unsupported", "it is not built")
    # Alone it shows nothing, which is no pass.
    assert not verify.run([CPU], backends=["fused"])["passed"]


def test_a_gpu_without_its_kernel_does_not_pass(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unsupported", lambda self, case, **_: "it is not built")
    monkeypatch.setattr(runner, "platform_of", lambda device: "rocm")
    report = verify.run([CPU], backends=["fused", "scan"])
    found = [(r["backend"], r["status"]) for r in report["devices"][0]["results"]]
    assert found == [("fused", "fail"), ("scan", "unsupported")] and not report["passed"]
    detail = report["devices"][0]["results"][0]["detail"]
    assert detail == "no kernel for this GPU: it is not built"


@needs_fused
def test_a_call_that_is_refused_in_one_place_must_be_refused_in_all() -> None:
    path = Path(CPU, "fused", "float32")
    wide = dataclasses.replace(FEW[0], dims=(1, 32, 32))
    assert "K = 64 and 128" in parity.check(path, wide)["unsupported"]

    class Careless(Path):
        def unsupported(self, case: Case, **_: Any) -> str:
            return "it says"

    with pytest.raises(AssertionError, match="does not claim this call, and ran it"):
        parity.check(Careless(CPU, "fused", "float32"), FEW[0])


def test_the_arguments_of_the_command(tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--platform", "rocm"]) == 2
    assert "jax has no such device here, only cpu" in capsys.readouterr().err
    assert main(["verify", "--report", str(tmp_path / "no" / "report.json")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_a_report_names_no_folders() -> None:
    text = '"/home/some one/x-1/_native.so: bad (/opt/rocm/lib/a.so)\\n/opt/b", "verify/1"'
    want = '"_native.so: bad (a.so)\\nb", "verify/1"'
    assert command._without_folders(text) == want


def test_first_difference() -> None:
    x = np.asarray([0.0, np.nan, 1.0], np.float32)
    assert first_difference(x, x.copy()) is None
    other = np.asarray([0.0, np.nan, 2.0], np.float32)
    assert first_difference(x, other) == "1 of 3 elements differ, by at most 1.00e+00; first [[2]]"
    assert first_difference(x, np.asarray([-0.0, np.nan, 1.0], np.float32)) is not None
    assert "instead of" in first_difference(x, x[:2])


SEVERAL = """
import jax
from kda_jax.verify import runner
devices = jax.devices()
names = [step.name for step in runner.steps(devices, ["fused", "scan"])]
assert names.count("all devices at once") == 1
assert {s.backend for s in runner.steps(devices, ["fused", "scan"]) if s.device == 1} == {"fused"}
runner._devices_at_once(devices)
print("right on", len(devices))
"""


@needs_fused
def test_several_devices_and_no_chex() -> None:
    """In a process of its own, where chex cannot be imported either."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    code = "import sys; sys.modules['chex'] = None\n" + SEVERAL
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=FilePath(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "right on 2", done.stderr
