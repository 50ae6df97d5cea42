"""`python -m benchmarks.serving_load MODEL_DIR`: a server under load, and what went wrong.

Starts `python -m kda_jax serve` (or --command), asks every prompt once on an empty cache, and then
lets clients send them in any order for some minutes: whole answers, streams, streams that are
closed in the middle, connections that are closed before an answer, clients that start anew. With
--kills the server is killed (SIGKILL) in between and started again. The exit code is 1 if a token
differed from the first run, a request was lost, memory grew, or rows and blocks of the pools were
missing at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from . import machine, output
from .load_clients import Load, Tally, random_prompts, references, run_clients
from .load_server import Sample, ServerProcess, read_metrics

_GRACE = 5.0  # seconds after an outage in which broken connections are its fault
_POOLS = ("kda_engine_free_rows", "kda_engine_free_blocks")
_HELD = (
    "kda_engine_running",
    "kda_engine_waiting",
    "kda_engine_held_blocks",
    "kda_prefix_cache_leases",
    "kda_prefix_cache_pinned_bytes",
)


class Watch:
    """Looks at the server every second, and kills it at the given times."""

    def __init__(self, server: ServerProcess, kills: list[float]) -> None:
        self.samples: list[Sample] = []
        self._server, self._kills = server, kills
        self._begin = time.monotonic()
        self._outage_until, self._down = 0.0, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def outage(self) -> bool:
        """Whether the server is down on purpose, or was a moment ago."""
        return self._down or time.monotonic() < self._outage_until

    def end(self) -> None:
        """Returns when the thread has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=60) as http:
            while not self._stop.wait(1):
                at = time.monotonic() - self._begin
                if self._kills and at > self._kills[0]:
                    self._kills.pop(0)
                    self._down = True
                    self._server.kill()
                    self._server.start()
                    self._outage_until = time.monotonic() + _GRACE
                    self._down = False
                    continue
                try:
                    metrics = read_metrics(http)
                except httpx.HTTPError:
                    continue  # the clients will say
                self.samples.append(Sample(at, self._server.rss(), metrics))


def settle(http: httpx.Client, timeout: float) -> dict[str, float]:
    """The server's numbers once it has nothing to do, and its prefix cache is empty."""
    end = time.monotonic() + timeout
    while True:
        http.post("/reset_prefix_cache").raise_for_status()
        metrics = read_metrics(http)
        if not any(metrics[name] for name in _HELD) or time.monotonic() > end:
            return metrics
        time.sleep(0.1)


def growth(samples: list[Sample]) -> float:
    """How much larger the last fifth's median is than the second fifth's, in bytes.

    The first fifth is left out: allocators reach their size in it.
    """
    rss = [sample.rss for sample in samples]
    part = len(rss) // 5
    if part == 0:
        return 0.0
    return float(np.median(rss[-part:]) - np.median(rss[part : 2 * part]))


def judge(
    tally: Tally,
    before: dict[str, float],
    after: dict[str, float],
    grown: float,
    allowed: float,
    exit_code: int,
) -> list[str]:
    """What is wrong, in words."""
    wrong = [f"wrong token: {text}" for text in tally.wrong[:10]]
    if len(tally.wrong) > 10:
        wrong.append(f"and {len(tally.wrong) - 10} more answers with wrong tokens")
    wrong += [f"lost request: {text}" for text in tally.lost[:10]]
    if len(tally.lost) > 10:
        wrong.append(f"and {len(tally.lost) - 10} more lost requests")
    wrong += [f"{name} is {after[name]:g} at the end" for name in _HELD if after[name]]
    for name in _POOLS:
        if after[name] != before[name]:
            wrong.append(f"{name} was {before[name]:g} and is {after[name]:g} at the end")
    if after["kda_engine_failed_total"]:
        wrong.append(f"{after['kda_engine_failed_total']:g} requests failed in the engine")
    if grown > allowed:
        wrong.append(f"resident memory grew by {grown / 2**20:.1f} MiB")
    if exit_code:
        wrong.append(f"the server ended with {exit_code} after SIGTERM")
    for kind in ("whole", "streamed", "cancelled"):
        if not tally.counts[kind]:
            wrong.append(f"no request was {kind}: the load is too short to say anything")
    return wrong


def run(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """The whole run; JSON-compatible. `wrong` is empty if all is well."""
    random = np.random.default_rng(args.seed)
    prompts = random_prompts(args.prompts, args.vocab, args.longest, args.block_size, random)
    server = ServerProcess(command)
    server.start()
    console = output.console()
    with httpx.Client(base_url=server.url, timeout=300) as http, output.progress(console) as bar:
        task = bar.add_task("one at a time", total=len(prompts))
        wanted = references(http, prompts, args.max_tokens, lambda: bar.advance(task))
        before = settle(http, 60)
        seconds = args.minutes * 60
        kills = [seconds * (i + 1) / (args.kills + 1) for i in range(args.kills)]
        watch = Watch(server, list(kills))
        bar.update(task, description=f"{args.clients} clients", total=None)
        load = Load(prompts, wanted)
        begin = time.monotonic()
        tally = asyncio.run(
            run_clients(
                server.url, load, args.clients, seconds, args.max_tokens, args.seed, watch.outage
            )
        )
        took = time.monotonic() - begin
        watch.end()
        last = read_metrics(http)
        after = settle(http, 60)
    exit_code = server.terminate(120)
    # After a kill another process is compared with another one's beginning.
    grown = 0.0 if kills else growth(watch.samples)
    allowed = max(32 * 2**20, 0.05 * watch.samples[0].rss) if watch.samples else 0.0
    return {
        "seconds": took,
        "clients": args.clients,
        "prompts": len(prompts),
        "kills": args.kills,
        "starts": server.starts,
        "counts": dict(tally.counts),
        "latency": [float(x) for x in np.percentile(tally.seconds or [0], [50, 90, 99])],
        "server": {name: last[name] for name in sorted(last) if "bucket" not in name},
        "rss": [[round(s.at, 1), s.rss] for s in watch.samples],
        "rss_growth": grown,
        "wrong": judge(tally, before, after, grown, allowed, exit_code),
    }


def page(results: dict[str, Any]) -> str:
    """Markdown."""
    found, about = results["load"], results["machine"]
    counts, server = found["counts"], found["server"]
    done = counts.get("whole", 0) + counts.get("streamed", 0)
    rss = [value / 2**20 for _, value in found["rss"]]
    hits, misses = server["kda_prefix_cache_hits_total"], server["kda_prefix_cache_misses_total"]
    killed = f", killed {found['kills']} times" if found["kills"] else ""
    lines = [
        f"# A server under load{killed}",
        "",
        f"{about['cpu']}, {about['cores']} cores; Python {about['python']}, jax"
        f" {about['versions']['jax']}; {about['date']}; `{about['command']}`",
        "",
        f"{found['clients']} clients for {found['seconds']:.0f} s, {found['prompts']} prompts with"
        f" shared prefixes, {found['kills']} hard ends.",
        "",
        "| | |",
        "|---|---|",
        f"| answers compared token for token | {done} |",
        f"| streams closed in the middle, compared as far as they went | {counts['cancelled']} |",
        f"| connections closed before an answer | {counts.get('left', 0)} |",
        f"| clients started anew | {counts.get('restarts', 0)} |",
        f"| tokens received | {counts['tokens']} |",
        f"| refused with 429 and sent again | {counts.get('retries', 0)} |",
        f"| broken by a hard end and sent again | {counts.get('interrupted', 0)} |",
        f"| seconds for a whole answer: median, 90 %, 99 % |"
        f" {', '.join(f'{x:.2f}' for x in found['latency'])} |",
        f"| prefix cache of the last process: hits, misses, evictions | {hits:g}, {misses:g},"
        f" {server['kda_prefix_cache_evictions_total']:g} |",
    ]
    if rss:
        lines.append(
            f"| resident MiB: first, least, most, last | {rss[0]:.0f}, {min(rss):.0f},"
            f" {max(rss):.0f}, {rss[-1]:.0f} |"
        )
    lines += ["", "Wrong: nothing." if not found["wrong"] else "Wrong:", ""]
    lines += [f"- {text}" for text in found["wrong"]]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = output.parser("serving_load", __doc__)
    parser.add_argument("model", nargs="?", type=Path, help="folder of the model to serve")
    parser.add_argument(
        "--command", type=shlex.split, help="instead: a server's, with {port} for its port"
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=128, help="different ones")
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--vocab", type=int, default=256, help="tokens that prompts are made of")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--kills", type=int, default=0, help="times that the server is killed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if (args.model is None) == (args.command is None):
        parser.error("give either MODEL_DIR or --command")
    command = args.command or [
        *(sys.executable, "-m", "kda_jax", "serve", str(args.model), "--port", "{port}"),
        *("--block-size", str(args.block_size), "--budget", "1024", "--max-requests", "16"),
        *("--max-model-len", str(args.longest + args.block_size + args.max_tokens)),
        *("--cache-bytes", "4M", "--checkpoint-blocks", "4", "--max-waiting", "48"),
    ]
    results = {"machine": machine.describe(), "load": run(args, command)}
    stem = args.output / (args.name or "serving_load_cpu")
    output.write(stem, results, page(results))
    output.console().print(page(results))
    return 1 if results["load"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
