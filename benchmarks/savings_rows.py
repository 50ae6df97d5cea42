"""One row of `benchmarks.savings`: a prompt length at a budget, through engines that take turns."""

from __future__ import annotations

import dataclasses
import queue
import time
from typing import Any

import numpy as np

from kda_jax.models import LanguageModel
from kda_jax.serving import EngineConfig, PoolSizes, SamplingParams
from kda_jax.serving.build import build_engine
from kda_jax.serving.engine import Engine
from kda_jax.warming import timed

from .prefill_steps import predict


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


Kinds = dict[str, list[Served]]


def measure(
    engines: dict[str, Engine], length: int, vocab: int, repeats: int, seconds: float
) -> dict[str, Kinds]:
    """Per engine, the requests on an empty cache ("cold") and after one with the same prefix.

    The engines take turns, so that what disturbs the machine disturbs both. A round in which a
    program is compiled does not count. There are `repeats` rounds, or fewer, at least one, where
    they take longer than that.
    """
    found: dict[str, Kinds] = {name: {"cold": [], "warm": []} for name in engines}
    begin = time.perf_counter()
    for turn in range(repeats + 1):
        prompt = np.random.default_rng((length, turn)).integers(0, vocab, length)
        served, source = _round(engines, prompt, vocab)
        if source == "memory":
            for name, kinds in served.items():
                for kind, one in kinds.items():
                    found[name][kind].append(one)
        done = len(found["with"]["cold"])
        if done == repeats or (done and time.perf_counter() - begin > seconds):
            break
    return found


def _round(
    engines: dict[str, Engine], prompt: np.ndarray, vocab: int
) -> tuple[dict[str, dict[str, Served]], str]:
    """A prompt, and then its like, through each engine; and whence the programs came."""
    other = np.append(prompt[:-1], (prompt[-1] + 1) % vocab)
    served: dict[str, dict[str, Served]] = {}

    def turns() -> None:
        for name, engine in engines.items():
            engine.reset_prefix_cache().result()
            served[name] = {"cold": serve(engine, prompt), "warm": serve(engine, other)}

    _, source = timed(turns)
    return served, source


def row(
    engines: dict[str, Engine], length: int, budget: int, vocab: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """One length at one budget; JSON-compatible. `wrong` lists what is not as predicted."""
    begin = time.perf_counter()
    served = measure(engines, length, vocab, repeats, seconds)
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
        for i in range(len(served["with"]["cold"]))
    ]
    return {
        "length": length,
        "budget": budget,
        "prompts": len(served["with"]["cold"]),
        "seconds": time.perf_counter() - begin,
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
