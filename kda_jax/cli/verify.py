"""`verify`: every check on every device, a table, and a JSON report to send back."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from .. import verify as checks
from ..devices import all_devices, platform_of
from . import screen
from .doctor import describe_software
from .errors import CliError, check_output

FORMAT = "kda_jax.verify/1"
_GROUPS = ("parity", "determinism", "checkpoints", "pool", "hazards")


def verify(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if a check failed."""
    check_output("--report", args.report)
    devices = _devices(args.platform)
    backends = args.backend or checks.BACKENDS
    start = time.perf_counter()
    with screen.progress() as progress:
        task = progress.add_task("verify", total=len(checks.steps(devices, backends)))

        def show(device: Any, result: checks.Result) -> None:
            text = f"{platform_of(device)}:{device.id} {result.backend} {result.group}"
            progress.update(task, advance=1, description=text)

        found = checks.run(devices, backends=backends, on_result=show)
    report = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.perf_counter() - start, 1),
        **describe_software(),
        **found,
    }
    _print(screen.console(), report)
    if args.report:
        Path(args.report).write_text(_without_folders(json.dumps(report, indent=1)) + "\n")
        screen.console().print(f"wrote {args.report}", soft_wrap=True)
    return 0 if report["passed"] else 1


def _without_folders(text: str) -> str:
    """Of absolute paths, the file's name: an error message may hold some, and they name users."""
    return re.sub(r"(?:(?<=\\n)|(?<![\w.~]))/(?:[\w.+@~ -]+/)+", "", text)


def _devices(platform: str | None) -> list[Any]:
    found = all_devices()
    if platform is None:
        return found
    chosen = [device for device in found if platform_of(device) == platform]
    if not chosen:
        have = ", ".join(dict.fromkeys(map(platform_of, found)))
        raise CliError(f"--platform {platform}: jax has no such device here, only {have}")
    return chosen


def _print(out: Console, report: dict[str, Any]) -> None:
    for device in report["devices"]:
        which = " ".join(filter(None, (device["kind"], device["architecture"])))
        title = f"{device['platform']}:{device['id']} {which}: passed of supported"
        table = screen.table(title, "backend", *_GROUPS, "tokens: time")
        for backend in dict.fromkeys(result["backend"] for result in device["results"]):
            own = [result for result in device["results"] if result["backend"] == backend]
            table.add_row(backend, *(_count(own, group) for group in _GROUPS), _time(own))
        out.print(table)
        _print_problems(out, device["results"])
    failed = sum(device["counts"]["fail"] for device in report["devices"])
    verdict = "every supported call is right" if report["passed"] else f"{failed} checks FAILED"
    if not (failed or report["passed"]):
        verdict = "nothing was checked: no backend here supports any of the calls"
    out.print(f"{verdict} (jax {jax.__version__}, {report['seconds']} s)")


def _print_problems(out: Console, results: list[dict[str, Any]]) -> None:
    reasons: dict[str, int] = {}
    rows = Table.grid(padding=(0, 1))
    for result in results:
        if result["status"] == "fail":
            rows.add_row("FAIL", f"{result['backend']}, {result['name']}: {result['detail']}")
        elif result["status"] == "unsupported":
            why = f"{result['backend']}: {result['detail']}"
            reasons[why] = reasons.get(why, 0) + 1
    for why, count in reasons.items():
        rows.add_row("unsupported", f"{why} ({count})" if count > 1 else why)
    if rows.row_count:
        out.print(rows)


def _count(results: list[dict[str, Any]], group: str) -> str:
    claimed = [r["status"] for r in results if r["group"] == group and r["status"] != "unsupported"]
    if not claimed:
        return "-"
    passed = claimed.count("pass")
    return f"{passed}/{len(claimed)}" + ("" if passed == len(claimed) else " FAIL")


def _time(results: list[dict[str, Any]]) -> str:
    for result in results:
        if result["group"] == "timing" and result["status"] == "pass":
            facts = result["facts"]
            return f"{facts['tokens']}: {facts['seconds'] * 1e3:.3g} ms"
    return "-"
