"""FLA's `chunk_kda` (fla-core: torch and Triton), in a process of its own; started by `peers`.

    python -m benchmarks.peer_fla tune  --shapes A B --part 0 --parts 16 [--configs FILE]
    python -m benchmarks.peer_fla time  --shapes A B --configs FILE [--write-configs]

`time` prints a JSON line for each shape: GPU time from CUDA events around the replay of a graph
that holds a call for each of several inputs. It is FLA's fastest form: norms, gates and beta inside
of its kernels, no initial state, float32 final states.

FLA chooses among some hundred candidates of its kernels for each number of heads, and compiling
them one after the other takes many minutes. `tune` compiles a part of them into Triton's cache on
disk, so that `time` finds them there; several of it run side by side. With --configs only the
candidates in FILE count; --write-configs stores there, after timing, the best ones of each kernel.

This module imports neither JAX nor kda_jax: the GPU is FLA's alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .shapes import SHAPES, Shape

_DATA = 512 << 20  # bytes of all inputs of a graph
_REPLAYS, _WARM = 30, 3
_KEPT = 3  # candidates of a kernel that other numbers of heads choose among
_TUNED_ON = 8192  # tokens


class Peer:
    """The operator, its inputs, and Triton's tuners."""

    def __init__(self) -> None:
        os.environ["FLA_CACHE_RESULTS"] = "0"  # tune in this run, not in an earlier one
        os.environ["FLA_FLASH_KDA"] = "0"  # FLA's own kernels, whatever else is installed
        import torch
        from fla.modules.norm.l2norm import l2norm_fwd
        from fla.ops.kda import chunk_kda
        from triton.runtime.autotuner import Autotuner

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        self.torch, self.chunk_kda, self.l2norm = torch, chunk_kda, l2norm_fwd
        self.tuners = [x for x in gc.get_objects() if isinstance(x, Autotuner)]

    def inputs(self, tokens: int, H: int, D: int, seed: int) -> dict[str, Any]:
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Any:
            return torch.randn(
                1, tokens, *shape, generator=generator, device="cuda", dtype=torch.bfloat16
            )

        def uniform(size: int) -> Any:
            return torch.rand(size, generator=generator, device="cuda")

        names = {"q": (H, D), "k": (H, D), "v": (H, D), "g": (H, D), "beta": (H,)}
        arrays = {name: normal(*shape) for name, shape in names.items()}
        return arrays | {"A_log": uniform(H), "dt_bias": uniform(H * D)}

    def borders(self, seq_lens: Sequence[int]) -> dict[str, Any]:
        if len(seq_lens) == 1:
            return {}
        host = self.torch.tensor([0, *seq_lens]).cumsum(0)
        return {"cu_seqlens": host.cuda(), "cu_seqlens_cpu": host}

    def call(self, arrays: dict[str, Any], borders: dict[str, Any]) -> Any:
        return self.chunk_kda(
            **arrays,
            **borders,
            scale=arrays["q"].shape[-1] ** -0.5,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=-5.0,
        )

    def restrict(self, configs: dict[str, list[dict[str, Any]]]) -> None:
        """Leave each kernel the candidates that are listed under its name."""
        for tuner in self.tuners:
            kept = [c for c in tuner.configs if _facts(c) in configs.get(_name(tuner), [])]
            tuner.configs = kept or tuner.configs

    def best_configs(self) -> dict[str, list[dict[str, Any]]]:
        """For each kernel that was tuned: its choices, and the best of those timed last."""
        best = {}
        for tuner in self.tuners:
            timings = getattr(tuner, "configs_timings", None)
            if timings:
                ranked = sorted(timings, key=lambda config: timings[config])[:_KEPT]
                chosen = [*tuner.cache.values(), *ranked]
                best[_name(tuner)] = [_facts(c) for c in dict.fromkeys(chosen)]
        return best


def _name(tuner: Any) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__}"


def _facts(config: Any) -> dict[str, Any]:
    """What distinguishes a candidate from the others of its kernel."""
    return {"kwargs": config.kwargs, "warps": config.num_warps, "stages": config.num_stages}


def tune(peer: Peer, shapes: Sequence[Shape], part: int, parts: int) -> None:
    """Compile every ``parts``-th candidate, by running each once on a short input."""
    for tuner in peer.tuners:
        # A tuner with a single candidate compiles it without asking for the time.
        tuner.__dict__["do_bench"] = lambda run, quantiles=None: (run(), [1.0, 1.0, 1.0])[1]
        tuner.configs = tuner.configs[part::parts] or tuner.configs[:1]
    layouts = {(shape.H, shape.K, len(shape.seq_lens) > 1) for shape in shapes}
    with peer.torch.inference_mode():
        for H, D, packed in sorted(layouts):
            for tuner in peer.tuners:  # its keys do not tell packed inputs from others
                tuner.cache.clear()
            peer.call(peer.inputs(256, H, D, 0), peer.borders([100, 156] if packed else [256]))
        # The norm is compiled for ranges of rows.
        for rows in sorted({shape.tokens * shape.H for shape in shapes}):
            peer.l2norm(peer.torch.empty(1, rows, 1, 128, device="cuda", dtype=peer.torch.bfloat16))
    peer.torch.cuda.synchronize()


def time_shapes(peer: Peer, shapes: Sequence[Shape]) -> None:
    """Print a line for each shape; candidates are chosen on the shapes near `_TUNED_ON` tokens."""
    import triton.testing

    def do_bench(run: Any, quantiles: Any = None) -> Any:
        return triton.testing.do_bench(run, warmup=3, rep=12, quantiles=quantiles)

    for tuner in peer.tuners:
        tuner.__dict__["do_bench"] = do_bench
    with peer.torch.inference_mode():
        for shape in sorted(shapes, key=lambda s: abs(s.tokens - _TUNED_ON)):
            try:
                row = {"peer": "FLA", "shape": shape.name, **time_shape(peer, shape)}
            except Exception as error:  # the other shapes may run
                why = f"{type(error).__name__}: {str(error).strip()[:300]}"
                row = {"peer": "FLA", "shape": shape.name, "failed": why}
            print(json.dumps(row), flush=True)
            peer.torch.cuda.empty_cache()


def time_shape(peer: Peer, shape: Shape) -> dict[str, Any]:
    """Seconds per call: median and quartiles of graph replays, over the calls in the graph."""
    torch = peer.torch
    many = max(1, min(8, _DATA // (shape.tokens * shape.H * shape.K * 10)))
    sets = [peer.inputs(shape.tokens, shape.H, shape.K, seed) for seed in range(many)]
    borders = peer.borders(shape.seq_lens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arrays in sets:
            peer.call(arrays, borders)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for arrays in sets:
            peer.call(arrays, borders)
    times = []
    for _ in range(_WARM + _REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / many)
    low, median, high = statistics.quantiles(times[_WARM:], n=4)
    return {
        "median": median, "low": low, "high": high, "samples": _REPLAYS, "calls_in_program": many,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_fla", description=__doc__)
    parser.add_argument("what", choices=("tune", "time"))
    parser.add_argument("--shapes", nargs="+", required=True, choices=sorted(SHAPES))
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--write-configs", action="store_true")
    args = parser.parse_args(argv)
    shapes = [SHAPES[name] for name in args.shapes]
    peer = Peer()
    if args.configs and not args.write_configs:
        peer.restrict(json.loads(args.configs.read_text()))
    if args.what == "tune":
        tune(peer, shapes, args.part, args.parts)
        return
    time_shapes(peer, shapes)
    if args.configs and args.write_configs:
        args.configs.write_text(json.dumps(peer.best_configs()))


if __name__ == "__main__":
    main()
