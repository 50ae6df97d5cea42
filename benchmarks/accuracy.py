"""`python -m benchmarks.accuracy`: errors against a float64 recurrence, and a peer's beside them.

Works on any device: what runs is JAX's default device. With torch and fla-core installed and a GPU,
FLA's `chunk_kda` gets the same inputs in the same run, and the exit code is 1 if the fused kernel
is further from the reference than FLA in any cell.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from kda_jax import chunk_kda_prefill, register_backend, supports
from kda_jax.backends import current_platform
from kda_jax.fused import FusedBackend
from kda_jax.testing import Case, make_case, relative_error, scan_in_float64

from . import device as device_facts
from . import machine
from .report import table

RESULTS = Path(__file__).parent / "results"
DTYPE = "bfloat16"
TOKENS, H, D = 2048, 4, 128
PEER = "FLA"
# name -> kind of kda_jax.testing, lower_bound, whether the queries lie near the (near-equal) keys.
CASES: dict[str, tuple[Any, float | None, bool]] = {
    "strong decay": ("random", -5.0, False),
    "slow decay": ("k3", -5.0, False),
    "every gate at the bound": ("saturated", -5.0, False),
    "near-equal keys": ("slow", -5.0, False),
    "near-equal keys, queries near them": ("slow", -5.0, True),
    "strong decay, softplus": ("random", None, False),
    "slow decay, softplus": ("k3", None, False),
}
Run = Callable[[Case], tuple[Any, Any]]  # -> out, final state [N, H, V, K]


class MixedBackend(FusedBackend):
    """The arithmetic of the GPU kernels, executed by the CPU kernel."""

    name = "mixed"


def make(name: str, seed: int, tokens: int = TOKENS) -> Case:
    kind, bound, near = CASES[name]
    case = make_case(
        kind,
        seq_lens=[tokens],
        H=H,
        K=D,
        V=D,
        dtype=DTYPE,
        seed=seed,
        lower_bound=bound,
        initial_state=False,
    )
    if near:
        rng = np.random.default_rng(seed + 1)
        case.q[...] = case.k + 0.02 * rng.standard_normal(case.q.shape)
    return case


def _ours(case: Case, backend: str, groups: int | None) -> tuple[Any, Any]:
    result = chunk_kda_prefill(*case.args, **case.kwargs, backend=backend, groups=groups)
    out, final, _ = jax.device_get(tuple(result))
    return out, final


def runs() -> dict[str, Run]:
    """What runs here, by column."""
    found: dict[str, Run] = {}
    columns: list[tuple[str, str, int | None]] = [
        ("fused", "fused", None),
        ("fused, 4 groups", "fused", 4),
        ("chunked", "chunked", None),
    ]
    if current_platform() == "cpu":
        register_backend(MixedBackend(mixed=True), replace=True)
        columns.append(("fused, as a GPU computes", "mixed", None))
    for column, backend, groups in columns:
        if supports(backend, dtype=DTYPE, K=D, V=D, H=H, groups=groups):
            found[column] = functools.partial(_ours, backend=backend, groups=groups)
    if peer := _peer():
        found[PEER] = peer
    return found


def _peer() -> Run | None:
    """FLA in its fastest form: norms, gates and beta inside of its kernels."""
    try:
        import torch
        from fla.ops.kda import chunk_kda
    except Exception:  # fla raises what it likes where its Triton does not work
        return None
    if not torch.cuda.is_available():
        return None

    def run(case: Case) -> tuple[Any, Any]:
        def move(x: Any, dtype: Any) -> Any:
            return torch.from_numpy(np.asarray(x, np.float32)).to("cuda", dtype)

        q, k, v, g, beta = (move(x, torch.bfloat16) for x in case.args[:5])
        with torch.inference_mode():
            out, final = chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                A_log=move(case.A_log, torch.float32),
                dt_bias=move(case.dt_bias.reshape(-1), torch.float32),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=case.lower_bound is not None,
                lower_bound=case.lower_bound,
                state_v_first=True,
            )
        return out.float().cpu().numpy(), final.float().cpu().numpy()

    return run


def measure(columns: dict[str, Run], seeds: int, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """For each case the mean over seeds of each column's error, (out, state)."""
    rows = []
    cells = [(name, seed) for name in CASES for seed in range(seeds)]
    errors: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in CASES}
    for name, seed in track(cells, "accuracy", transient=True):
        case = make(name, seed, tokens)
        want = scan_in_float64(case)
        found = {column: run(case) for column, run in columns.items()}
        rounded = want.out.astype(case.v.dtype)
        found["rounding alone"] = rounded, want.final_state.astype(np.float32)
        for column, (out, state) in found.items():
            both = relative_error(out, want.out), relative_error(state, want.final_state)
            errors[name].setdefault(column, []).append(both)
    for name, by_column in errors.items():
        means = {column: np.mean(each, axis=0).tolist() for column, each in by_column.items()}
        rows.append({"case": name, "errors": means})
    return rows


def worse_than_peer(rows: list[dict[str, Any]]) -> list[str]:
    """The cells in which a fused column is further off than the peer."""
    found = []
    for row in rows:
        peer = row["errors"].get(PEER)
        for column, own in row["errors"].items() if peer else ():
            if not column.startswith("fused"):
                continue
            for what, x, y in zip(("out", "state"), own, peer, strict=True):
                if not x <= y:
                    found.append(f"{row['case']}: {what} of {column} {x:.2e}, {PEER} {y:.2e}")
    return found


def markdown(results: dict[str, Any]) -> str:
    """The page of a result file."""
    m, device = results["machine"], results["device"]
    versions = ", ".join(f"{name} {x}" for name, x in (m["versions"] | results["peer"]).items())
    columns = list(results["rows"][0]["errors"])
    body = [
        [row["case"], *("{:.2e} / {:.2e}".format(*row["errors"][c]) for c in columns)]
        for row in results["rows"]
    ]
    return f"""# Accuracy on {device["kind"]}

Generated by `{m["command"]}` on {m["date"]}; do not edit.

Device: {device_facts.line(device)}. {m["system"]}, Python {m["python"]}, {versions}.

||x - ref|| / ||ref|| against a float64 recurrence on the CPU, outputs / final state, mean of
{results["seeds"]} seeds: {results["tokens"]} tokens, {H} heads, K = V = {D}, {DTYPE} inputs and
outputs, no initial state. "Rounding alone" is the reference rounded to the results' types.

{table(["", *columns], body)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"default {TOKENS}")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    args = parser.parse_args(argv)
    columns = runs()
    results = {
        "machine": machine.describe(),
        "device": device_facts.describe(),
        "peer": _peer_versions() if PEER in columns else {},
        "seeds": args.seeds,
        "tokens": args.tokens,
        "rows": measure(columns, args.seeds, args.tokens),
    }
    worse = worse_than_peer(results["rows"])
    results["worse_than_peer"] = worse
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"accuracy_{device_facts.slug(results['device']['kind'])}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    page = markdown(results)
    stem.with_suffix(".md").write_text(page)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(page)
    for line in worse:
        console.print(f"WORSE THAN {PEER}: {line}")
    return 1 if worse else 0


def _peer_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("fla-core", "torch", "triton")}


if __name__ == "__main__":
    raise SystemExit(main())
