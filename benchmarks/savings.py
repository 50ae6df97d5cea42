"""`python -m benchmarks.savings`: what checkpoints inside prompts save a server.

One request at a time goes through the engine, with checkpoints and without. Without, the step that
holds the position which the prefix cache wants is split in two there. Measured: the time to the
first token and the number of forward steps of a prompt on an empty cache, then of another one that
differs in the last token alone. The number of steps, and the tokens read from the cache, must be
those that the rule for positions predicts, or the exit code is 1.

On the CPU the model is the tiny one in tests/data/recall, on a GPU a random one with 4 layers in
Kimi-K3's shape. Attention over all tokens before makes the longest prompts take most of the time;
short ones come first, the results are written after every row, --seconds ends a run early, and
--resume goes on with the rows that are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from kda_jax.backends import current_platform
from kda_jax.models import LanguageModel
from kda_jax.serving.engine import Engine

from . import device, machine, output, serving_model
from .report import duration
from .savings_page import markdown
from .savings_rows import build, row

LENGTHS = (1024, 4096, 8192, 8704, 16384, 25600, 32768, 65536)
BUDGETS = (8192, 16384)
BLOCK = 1536


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, and for how long.

    Attributes:
      lengths: of prompts, tokens. budgets: of steps, tokens. block: of the cache, tokens.
      repeats: prompts of each row. row_seconds: after which a row gets no more of them.
      end: of time.perf_counter(), after which no row begins, nor one that would last till then.
    """

    lengths: Sequence[int]
    budgets: Sequence[int]
    block: int
    repeats: int
    row_seconds: float
    end: float


def run(model: LanguageModel, plan: Plan, done: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The rows that are not `done` (length, budget), each as soon as there is one; short first."""
    vocab = model.config.vocab_size
    took: dict[int, dict[str, Any]] = {}  # the last row of a budget
    with contextlib.ExitStack() as stack:

        @functools.cache
        def engines(budget: int) -> dict[str, Engine]:
            return {
                name: stack.enter_context(
                    build(model, max(plan.lengths), budget, plan.block, name == "with")
                )
                for name in ("with", "without")
            }

        for length in sorted(plan.lengths):
            for budget in plan.budgets:
                if (length, budget) in done:
                    continue
                guess = 0.0
                if last := took.get(budget):  # attention makes it more than proportional
                    kinds = [kind for each in last["times"].values() for kind in each.values()]
                    one = sum(kind["median"] for kind in kinds)
                    guess = one * (length / last["length"]) ** 1.5
                if time.perf_counter() + guess > plan.end:
                    continue
                took[budget] = row(
                    engines(budget), length, budget, vocab, plan.repeats, plan.row_seconds
                )
                yield took[budget]


def measure_all(
    model: LanguageModel, plan: Plan, stem: Path, *, resume: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """The results, which are in the files, too, and were after each row."""
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "device": device.describe(),
        "model": serving_model.describe(model),
        "block": plan.block,
        "repeats": plan.repeats,
        "left_out": [],
        "rows": [],
    }
    if resume and stem.with_suffix(".json").is_file():
        before = json.loads(stem.with_suffix(".json").read_text())
        for key in ("device", "model", "block"):
            if before[key] != results[key]:
                raise SystemExit(f"{stem}.json has another {key}: {before[key]}")
        results["rows"] = before["rows"]
    wanted = {(n, budget) for n in plan.lengths for budget in plan.budgets}

    def finish() -> None:
        rows = results["rows"]
        rows.sort(key=lambda each: (each["budget"], each["length"]))
        results["left_out"] = sorted(wanted - {(r["length"], r["budget"]) for r in rows})
        output.write(stem, results, markdown(results))

    done = {(r["length"], r["budget"]) for r in results["rows"]}
    for each in run(model, plan, done):
        results["rows"].append(each)
        finish()
        cold = {name: kinds["cold"]["median"] for name, kinds in each["times"].items()}
        say(
            f"{each['length']} tokens, {each['budget']} a step: {duration(cold['without'])} without"
            f" and {duration(cold['with'])} with checkpoints, {each['prompts']} prompt(s),"
            f" {each['seconds']:.1f} s in all"
        )
    finish()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    begin = time.perf_counter()
    on_gpu = current_platform() in device.GPUS
    parser = output.parser("savings", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each row")
    parser.add_argument(
        "--row-seconds", type=float, default=60, help="after which a row gets no more prompts"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which no row begins"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--model", type=Path, help="folder of a model; default on a CPU: recall")
    parser.add_argument("--random", action="store_true", help="a random Kimi-K3, as on a GPU")
    for name, default in (("layers", 4), ("hidden", 7168), ("heads", 96), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the random model")
    parser.add_argument("--vocab", type=int, default=163840, help="of the random model")
    parser.add_argument("--dtype", default="bfloat16", help="of the random model")
    args = parser.parse_args(argv)
    if args.model is None and (on_gpu or args.random):
        model = serving_model.random_k3(
            layers=args.layers,
            hidden=args.hidden,
            heads=args.heads,
            experts=args.experts,
            vocab=args.vocab,
            dtype=args.dtype,
        )
    else:
        model = serving_model.load(args.model or serving_model.RECALL)
    jax.block_until_ready(model)
    say = output.console().print
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    say(f"model: {size / 1e9:.3g} GB in {time.perf_counter() - begin:.1f} s")
    end = begin + args.seconds
    plan = Plan(args.lengths, args.budgets, args.block, args.repeats, args.row_seconds, end)
    stem = args.output / (args.name or f"savings_{device.slug(device.describe()['kind'])}")
    results = measure_all(model, plan, stem, resume=args.resume, say=say)
    say(markdown(results))
    return 1 if any(each["wrong"] for each in results["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
