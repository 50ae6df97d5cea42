"""`python -m benchmarks.savings`: what checkpoints inside prompts save a server.

One request at a time goes through the engine, with checkpoints and without. Without, the step that
holds the position which the prefix cache wants is split in two there. Measured: the time to the
first token and the number of forward steps of a prompt on an empty cache, then of another one that
differs in the last token alone. The number of steps, and the tokens read from the cache, must be
those that the rule for positions predicts, or the exit code is 1.

On the CPU the model is the tiny one in tests/data/recall, on a GPU a random one with 4 layers in
Kimi-K3's shape. --all adds the lengths that take minutes on a CPU.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kda_jax.backends import current_platform
from kda_jax.models import LanguageModel
from kda_jax.serving import EngineConfig, PoolSizes, SamplingParams
from kda_jax.serving.build import build_engine
from kda_jax.serving.engine import Engine

from . import device, machine, output, serving_model
from .prefill_steps import predict
from .savings_page import markdown

LENGTHS = (1024, 4096, 8192, 8704, 16384, 25600, 32768, 65536)
ON_A_CPU = 16384  # longer prompts only with --all
BUDGETS = (8192, 16384)
BLOCK = 1536


@dataclasses.dataclass(frozen=True)
class Served:
    """One request: seconds to its first token, steps of its prompt, tokens read from the cache."""

    seconds: float
    steps: int
    cached: int
    token: int


def serve(engine: Engine, prompt: np.ndarray) -> Served:
    """Sends a prompt and waits for one token."""
    outputs: queue.Queue = queue.Queue()
    begin = time.perf_counter()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    request = engine.submit(prompt, params, lambda out: outputs.put((time.perf_counter(), out)))
    end, (token, reason) = outputs.get()
    if token is None:
        raise SystemExit(f"a prompt of {prompt.size} tokens ended with {reason!r}")
    return Served(end - begin, request.steps, request.cached_tokens or 0, token)


def measure(
    engines: dict[str, Engine], length: int, vocab: int, repeats: int
) -> dict[str, dict[str, list[Served]]]:
    """Per engine, the requests on an empty cache ("cold") and after one with the same prefix.

    The engines take turns, so that what disturbs the machine disturbs both. The first round, in
    which programs are compiled, is left out.
    """
    found: dict[str, dict[str, list[Served]]] = {name: {"cold": [], "warm": []} for name in engines}
    for turn in range(repeats + 1):
        prompt = np.random.default_rng((length, turn)).integers(0, vocab, length)
        other = np.append(prompt[:-1], (prompt[-1] + 1) % vocab)
        for name, engine in engines.items():
            engine.reset_prefix_cache().result()
            for kind, tokens in (("cold", prompt), ("warm", other)):
                served = serve(engine, tokens)
                if turn:
                    found[name][kind].append(served)
    return found


def row(
    engines: dict[str, Engine], length: int, budget: int, vocab: int, repeats: int
) -> dict[str, Any]:
    """One length at one budget; JSON-compatible. `wrong` lists what is not as predicted."""
    served = measure(engines, length, vocab, repeats)
    want = predict(engines["with"].sizes.rule, length, budget)
    predicted = {
        "with": {"cold": (want.steps, 0), "warm": (want.warm_steps, want.position)},
        "without": {"cold": (want.split_steps, 0), "warm": (want.warm_steps, want.position)},
    }
    times: dict[str, Any] = {}
    wrong = []
    for name, kinds in served.items():
        times[name] = {}
        for kind, many in kinds.items():
            low, median, high = np.percentile([each.seconds for each in many], [25, 50, 75])
            counts = {(each.steps, each.cached) for each in many}
            times[name][kind] = {
                "median": float(median),
                "low": float(low),
                "high": float(high),
                "steps": many[0].steps,
                "cached": many[0].cached,
            }
            if counts != {predicted[name][kind]}:
                wrong.append(
                    f"{length} tokens, budget {budget}, {name} checkpoints, {kind}: (steps, cached)"
                    f" {sorted(counts)}, predicted {predicted[name][kind]}"
                )
    pairs = [
        (served["with"][kind][i].token, served["without"][kind][i].token)
        for kind in ("cold", "warm")
        for i in range(repeats)
    ]
    return {
        "length": length,
        "budget": budget,
        "position": want.position,
        "unchanged": want.unchanged,
        "predicted": [want.steps, want.split_steps, want.warm_steps],
        "times": times,
        "same_tokens": sum(one == other for one, other in pairs),
        "tokens": len(pairs),
        "wrong": wrong,
    }


def build(model: LanguageModel, longest: int, budget: int, block: int, checkpoints: bool) -> Engine:
    """An engine for one request at a time, with a cache for two prompts."""
    config = EngineConfig(
        max_model_len=longest + 1,
        block_size=block,
        budget=budget,
        max_requests=1,
        max_prefills=1,
        checkpoints=checkpoints,
        checkpoint_rows=2,
    )
    any_size = dataclasses.replace(config, checkpoint_rows=None, cache_bytes=2**40)
    sizes = PoolSizes.of(any_size, model.config)
    cache_bytes = 2 * (sizes.checkpoint_bytes + config.table_width * sizes.block_bytes)
    return build_engine(model, dataclasses.replace(config, cache_bytes=cache_bytes))[0]


def run(
    model: LanguageModel,
    lengths: Sequence[int],
    budgets: Sequence[int],
    block: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """All rows, budget by budget."""
    rows = []
    console = output.console()
    with output.progress(console) as bar:
        task = bar.add_task("prompts", total=len(lengths) * len(budgets))
        for budget in budgets:
            engines = {
                name: build(model, max(lengths), budget, block, name == "with")
                for name in ("with", "without")
            }
            with engines["with"], engines["without"]:
                for length in lengths:
                    bar.update(task, description=f"{length} tokens at {budget}")
                    rows.append(row(engines, length, budget, model.config.vocab_size, repeats))
                    bar.advance(task)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    on_gpu = current_platform() in device.GPUS
    parser = output.parser("savings", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default {LENGTHS}")
    parser.add_argument("--all", action="store_true", help="long prompts on a CPU, too")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--repeats", type=int, default=5)
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
    lengths = args.lengths or [n for n in LENGTHS if on_gpu or args.all or n <= ON_A_CPU]
    rows = run(model, lengths, args.budgets, args.block, args.repeats)
    results = {
        "machine": machine.describe(),
        "device": device.describe(),
        "model": serving_model.describe(model),
        "block": args.block,
        "repeats": args.repeats,
        "left_out": [] if args.lengths else [n for n in LENGTHS if n not in lengths],
        "rows": rows,
    }
    name = args.name or f"savings_{device.slug(results['device']['kind'])}"
    page = markdown(results)
    output.write(args.output / name, results, page)
    output.console().print(page)
    return 1 if any(each["wrong"] for each in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
