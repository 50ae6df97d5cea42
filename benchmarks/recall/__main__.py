"""`python -m benchmarks.recall`: trains a tiny Kimi-K3 to answer from a list, on the CPU.

The run goes on from where an earlier one with the same --run folder stopped. It ends when the
held-out share of right answers reaches the goal at every length, and then writes the model in the
published format, config.json and model.safetensors, to --output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kda_jax.models import save_pretrained

from .. import output
from .trainer import Settings, Trainer


def main() -> int:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", type=Path, default=Path("build/recall"), help="state of the run")
    parser.add_argument("--output", type=Path, default=Path("tests/data/recall"))
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--goal", type=float, default=0.997, help="held-out share of right answers")
    parser.add_argument("--batches", type=int, default=16, help="held-out batches of each length")
    parser.add_argument("--every", type=int, default=100, help="steps between saves and checks")
    parser.add_argument("--max-steps", type=int, default=20_000)
    parser.add_argument("--backend", default=defaults.backend)
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    state = args.run / "state.safetensors"
    settings = Settings(seed=args.seed, backend=args.backend)
    trainer = Trainer.resume(settings, state) if state.is_file() else Trainer.start(settings)
    console = output.console()
    if trainer.step:
        console.print(f"going on after step {trainer.step}")
    if not train(trainer, state, args.goal, args.batches, args.every, args.max_steps, console):
        console.print(f"the goal was not reached in {args.max_steps} steps")
        return 1
    for file in save_pretrained(trainer.average, args.output):
        console.print(f"wrote {file}, {file.stat().st_size:,} bytes")
    return 0


def train(
    trainer: Trainer,
    state: Path,
    goal: float,
    batches: int,
    every: int,
    max_steps: int,
    console: Console,
) -> bool:
    """Steps until the goal is reached; False if max_steps are done before."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    recent: deque[tuple[float, float]] = deque(maxlen=every)
    begin = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("training", total=max_steps, completed=trainer.step)
        while trainer.step < max_steps:
            room = trainer.settings.rooms[trainer.level]
            recent.append(trainer.advance())
            text = f"step {trainer.step}, {room} bytes, {trainer.share:.1%} right"
            bar.update(task, completed=trainer.step, description=text)
            if trainer.step % every:
                continue
            trainer.save(state)
            loss, share = np.mean(recent, axis=0)
            seconds = time.perf_counter() - begin
            console.print(f"{text}; loss {loss:.4f}, all lengths {share:.1%}; {seconds:.0f} s")
            if trainer.level + 1 < len(trainer.settings.rooms) or trainer.share < goal - 0.01:
                continue
            shares = trainer.held_out(batches)
            console.print("held out: " + ", ".join(f"{r}: {v:.2%}" for r, v in shares.items()))
            if min(shares.values()) >= goal:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
