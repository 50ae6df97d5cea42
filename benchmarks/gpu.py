"""`python -m benchmarks.gpu`: the whole table of a GPU, ours beside the peers that are installed.

Works on any GPU that JAX sees, CUDA or ROCm. Writes JSON, a page and a plot. Exit code 1: a result
is off from the float64 recurrence, and that shape gets no ratio, or a backend failed with an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from . import device, floor, gpu_prefill, gpu_table, inputs, machine, output, peers, plot
from .shapes import GPU, SHAPES, TARGETS


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    device.share_memory()
    console = output.console()
    with output.progress(console) as progress:
        results = _run(args, progress)
    stem = args.output / (args.name or device.slug(results["device"]["kind"]))
    output.write(stem, results, gpu_table.markdown(results))
    try:
        if plot.save_gpu(results, stem.with_suffix(".png")):
            output.write(stem, results, gpu_table.markdown(results, f"{stem.name}.png"))
    except ImportError:
        console.print("no plot: matplotlib is missing, pip install 'kda-jax[plot]'")
    _print(results)
    console.print(f"wrote {stem}.json and {stem}.md")
    wrong = [f"{row['shape']}: {name}" for row in results["rows"] for name in _wrong(row)]
    for line in wrong:
        console.print(f"WRONG {line}, see {stem}.json")
    return 1 if wrong else 0


def _run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("peers", total=len(args.shapes) + 1)

    def report(what: str) -> None:
        progress.update(task, description=what)

    # The peers first: until this process has asked JAX for its devices, the GPU is theirs alone.
    found, kind = _peers(args, report)
    where = device.describe()
    if where["platform"] not in device.GPUS and args.name is None:
        raise SystemExit("JAX sees no GPU here; name the results with --name to run on this device")
    if kind is not None and kind != where["kind"]:
        why = f"{args.peers_json.name} is of {kind}, this is {where['kind']}"
        found = {"rows": [], "versions": {}, "left_out": dict.fromkeys(peers.NAMES, why)}
    report("copy bandwidth")
    bandwidth = floor.device_copy_bandwidth(args.copy_bytes, budget=args.budget)
    progress.advance(task)
    rows = []
    for name in args.shapes:
        report(name)
        rows.append(
            gpu_prefill.run(
                SHAPES[name],
                args.backends,
                kinds=args.kinds,
                budget=args.budget,
                calls=args.calls,
            )
        )
        progress.advance(task)
    return {
        "machine": machine.describe(),
        "device": where,
        "copy_bandwidth": bandwidth,
        "backends": list(args.backends),
        "kinds": list(args.kinds),
        "targets": {name: TARGETS[name] for name in args.shapes if name in TARGETS},
        "rows": rows,
        "peers": found,
    }


def _peers(args: argparse.Namespace, report: peers.Report) -> tuple[peers.Peers, str | None]:
    if args.peers_json:
        return peers.load(args.peers_json)
    if args.no_peers:
        why = dict.fromkeys(peers.NAMES, "not asked for (--no-peers)")
        return {"rows": [], "versions": {}, "left_out": why}, None
    return peers.run(args.shapes, tuning=args.tuning, budget=args.budget, report=report), None


def _wrong(row: dict[str, Any]) -> list[str]:
    return [n for n in row["backends"] if not gpu_table.correct(row, n)] + row["failed"]


def _print(results: dict[str, Any]) -> None:
    shown = Table("shape", "us", "FLA", "jla", "/ FLA", "target", "floor", "/ floor", "")
    for row in results["rows"]:
        ours, least = gpu_table.seconds(row), gpu_table.floor_of(results, row)
        times = [ours, *(peers.time_of(results["peers"], n, row["shape"]) for n in peers.NAMES)]
        to_fla, target = gpu_table.ratio(results, row, "FLA"), TARGETS.get(row["shape"])
        shown.add_row(
            row["shape"],
            *("-" if t is None else f"{t * 1e6:.1f}" for t in times),
            *("-" if x is None else f"{x:.3f}" for x in (to_fla, target)),
            f"{least * 1e6:.1f}",
            f"{ours / least:.2f}" if ours and gpu_table.correct(row) else "-",
            gpu_table.verdict(results, row),
        )
    output.console().print(shown)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = output.parser("gpu", __doc__, budget=0.3)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=GPU, metavar="SHAPE")
    parser.add_argument(
        "--backends", nargs="+", default=[gpu_table.OURS], metavar="NAME", help="default: fused"
    )
    parser.add_argument("--kinds", nargs="+", choices=inputs.KINDS, default=inputs.KINDS)
    parser.add_argument("--no-peers", action="store_true", help="time no peer")
    parser.add_argument(
        "--peers-json", type=Path, metavar="FILE",
        help="take the peers from the result file of an earlier run on the same kind of card",
    )  # fmt: skip
    parser.add_argument(
        "--tuning", choices=sorted(peers.TUNINGS), default="bounded",
        help="how FLA chooses its kernels' candidates; full takes several times as long",
    )  # fmt: skip
    parser.add_argument("--calls", type=int, help="calls in one program (default: by size)")
    parser.add_argument(
        "--copy-bytes", type=int, default=1 << 31, help="size of the copy for the bandwidth"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
