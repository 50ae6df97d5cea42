"""Goes through all checks on all devices and gathers the results."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from .. import native
from ..devices import all_devices, architecture, platform_of, uncovered
from ..types import KDAResult
from . import exact, parity, timing
from .path import Path, same_bits

Status = Literal["pass", "fail", "unsupported"]
BACKENDS = ("fused", "chunked", "scan")
# The first is what checks with one dtype use.
_DTYPES = ("float32", "float16", "bfloat16")
_GPU_DTYPES = ("bfloat16", "float16")  # of the fused kernel
GPUS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one check: ``detail`` says why it failed, or what is unsupported and why."""

    backend: str
    group: str
    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """One check, not run yet."""

    device: int
    backend: str
    group: str
    name: str
    work: Callable[[], dict[str, Any] | None]

    def run(self) -> Result:
        start = time.perf_counter()
        status: Status = "pass"
        detail, facts = "", {}
        try:
            facts = self.work() or {}
            if "unsupported" in facts:
                status, detail = "unsupported", str(facts.pop("unsupported"))
        except Exception as error:  # the report must not die of what it reports
            status, detail = "fail", " ".join(str(error).split())
            if not isinstance(error, AssertionError):
                detail = f"{type(error).__name__}: {detail}"
        seconds = time.perf_counter() - start
        return Result(self.backend, self.group, self.name, status, detail, seconds, facts)


def run(
    devices: Sequence[Any] | None = None,
    *,
    backends: Sequence[str] = BACKENDS,
    on_result: Callable[[Any, Result], None] | None = None,
) -> dict[str, Any]:
    """Runs everything.

    Args:
      devices: of JAX; None: all of this process, those of the CPU included.
      backends: names; plain JAX ones run on the first device of each platform only, since XLA
        compiles the same program for the others.
      on_result: called after each check with the device and the result.

    Returns:
      A JSON-ready report: ``passed``, and for each device what it is and all its results. Where no
      backend can run any check, nothing has been shown, and it has not passed.
    """
    devices = all_devices() if devices is None else list(devices)
    found: list[list[Result]] = [[] for _ in devices]
    for step in steps(devices, backends):
        result = step.run()
        found[step.device].append(result)
        if on_result:
            on_result(devices[step.device], result)
    reports = [_device(d, results) for d, results in zip(devices, found, strict=True)]
    ran = any(each["counts"]["pass"] for each in reports)
    return {"passed": ran and all(each["passed"] for each in reports), "devices": reports}


def steps(devices: Sequence[Any], backends: Sequence[str] = BACKENDS) -> list[Step]:
    """All checks of these devices, in order."""
    found = []
    seen: set[str] = set()
    for index, device in enumerate(devices):
        first = platform_of(device) not in seen
        seen.add(platform_of(device))
        for backend in backends:
            if first or backend == "fused":
                found += list(_of_backend(index, device, backend))
        peers = [d for d in devices if platform_of(d) == platform_of(device)]
        if first and len(peers) > 1 and "fused" in backends:
            work = functools.partial(_devices_at_once, peers)
            found.append(Step(index, "fused", "determinism", "all devices at once", work))
    return found


def _dtypes(device: Any, backend: str) -> tuple[str, ...]:
    on_gpu = platform_of(device) in GPUS
    return _GPU_DTYPES if on_gpu and backend == "fused" else _DTYPES


def _of_backend(index: int, device: Any, backend: str) -> Iterator[Step]:
    dtypes = _dtypes(device, backend)
    path = Path(device, backend, dtypes[0])
    if why := path.unsupported(path.case("random", [1])):
        # What is asked of a GPU's owner is its kernel: a report without it must not pass.
        missing = backend == "fused" and platform_of(device) in GPUS
        yield Step(index, backend, "all", "all", functools.partial(_left_out, why, missing))
        return
    asked = parity.cases(backend, dtypes)
    if backend == "fused" and "float32" not in dtypes:
        # What it has no precision for, it must refuse.
        asked = [parity.Parity("random", dtype="float32"), *asked]
    for each in asked:
        work: Callable[[], Any] = functools.partial(parity.check, path, each)
        yield Step(index, backend, "parity", each.name, work)
    for group, checks in exact.CHECKS.items():
        for name, check in checks.items():
            yield Step(index, backend, group, name, functools.partial(check, path))
    yield Step(index, backend, "timing", "one prompt", functools.partial(timing.measure, path))


def _left_out(why: str, missing: bool) -> dict[str, Any]:
    assert not missing, f"no kernel for this GPU: {why}"
    return {"unsupported": why}


def _devices_at_once(devices: Sequence[Any]) -> None:
    """One thread for each device, the same call: the same bits."""

    def work(device: Any) -> KDAResult | None:
        path = Path(device, "fused", _dtypes(device, "fused")[0])
        case = path.case("k3", [300, 33], checkpoint_offsets=[[64, 100], []])
        if path.unsupported(case):
            return None
        for _ in range(4):
            result = path.call(case)
        return result

    with ThreadPoolExecutor(len(devices)) as pool:
        found = list(pool.map(work, devices))
    by_kind: dict[str, KDAResult] = {}
    for device, got in zip(devices, found, strict=True):
        if got is not None:
            want = by_kind.setdefault(device.device_kind, got)
            for name, x, y in zip(KDAResult._fields, got, want, strict=True):
                same_bits(x, y, f"{name} on device {device.id}")


def _device(device: Any, results: list[Result]) -> dict[str, Any]:
    name, arch = platform_of(device), architecture(device)
    return {
        "platform": name,
        "kind": device.device_kind,
        "id": device.id,
        "architecture": arch,
        "architecture_problem": uncovered(name, arch, native.status().architectures.get(name)),
        "platform_version": device.client.platform_version,
        "passed": all(result.status != "fail" for result in results),
        "counts": {
            status: sum(result.status == status for result in results)
            for status in ("pass", "fail", "unsupported")
        },
        "results": [dataclasses.asdict(result) for result in results],
    }
