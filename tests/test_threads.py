"""Many threads and several devices, from the first call of a process on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import needs_fused

THREADS = 8
ROUNDS = 4


def together(work: Callable[[int], Any]) -> list[Any]:
    """Runs ``work(i)`` in all threads, all starting at the same time; their results or errors."""
    barrier = threading.Barrier(THREADS)
    found: list[Any] = [None] * THREADS

    def run(i: int) -> None:
        try:
            barrier.wait()
            found[i] = work(i)
        except Exception as error:
            found[i] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads), "a thread never ended"
    return found


def main() -> None:
    """Prints for each thread in each phase how often it was wrong, or the error that it met."""
    import jax
    import numpy as np

    from kda_jax import chunk_kda_prefill, native
    from kda_jax.testing import make_case, relative_error

    devices = jax.devices("cpu")
    cases = [
        make_case(
            "random",
            seq_lens=[60 + 9 * i, 0, 1 + i],
            H=1 + i % 3,
            K=64 if i % 2 else 128,
            V=16 * (1 + i % 4),
            seed=i,
            initial_state=[True, True, False],
            checkpoint_offsets=[[1 + i], [], []],
            capacity="bucket",
        )
        for i in range(THREADS)
    ]

    def prefill(i: int, backend: str, device: Any = None) -> Any:
        case = cases[i]
        args, kwargs = case.args, case.kwargs
        if device is not None:
            bound = kwargs.pop("lower_bound")
            args, kwargs = jax.device_put((args, kwargs), device)
            kwargs["lower_bound"] = bound
        result = chunk_kda_prefill(*args, **kwargs, backend=backend)
        if device is not None:
            assert all(x.devices() == {device} for x in result)
        return jax.device_get(tuple(result))

    native._status.cache_clear()  # `import kda_jax` loads the library; the threads shall, too
    first = together(lambda i: prefill(i, "auto" if i % 2 else "fused"))
    alone = [prefill(i, "fused") for i in range(THREADS)]

    def wrong(got: Any, i: int) -> Any:
        """What runs beside a call does not change a bit of it."""
        return got if isinstance(got, str) else int(not all(map(np.array_equal, got, alone[i])))

    def mixed(i: int) -> int:
        """The shapes of all threads in turn, so that different ones run at the same time."""
        turns = [(i + n) % THREADS for n in range(ROUNDS)]
        return sum(wrong(prefill(j, "fused"), j) for j in turns)

    def spread(i: int) -> int:
        """Neighbouring threads on different devices, the same shape on both."""
        turns = [devices[(i + n) % len(devices)] for n in range(ROUNDS)]
        return sum(wrong(prefill(i // 2, "fused", device), i // 2) for device in turns)

    for i in (0, 1):
        want = prefill(i, "scan")
        assert all(relative_error(x, y) < 1e-5 for x, y in zip(alone[i], want, strict=True))
    phases = {
        "first calls": list(map(wrong, first, range(THREADS))),
        "different shapes": together(mixed),
        "two devices": together(spread),
    }
    json.dump({"devices": len(devices), "phases": phases}, sys.stdout)


@needs_fused
def test_first_calls_concurrent_calls_and_two_devices() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["devices"] == 2
    for phase, wrong in found["phases"].items():
        assert wrong == [0] * THREADS, phase


@needs_fused
def test_first_trace_in_many_threads() -> None:
    import jax

    from kda_jax import chunk_kda_prefill
    from kda_jax.testing import make_case

    case = make_case("random", seq_lens=[33, 2], H=1, K=64, V=16, seed=3)

    # A scale that no other test has: this configuration is new to every cache.
    step = jax.jit(lambda *args: chunk_kda_prefill(*args, **case.kwargs, scale=0.123))
    found = together(lambda i: jax.device_get(tuple(step(*case.args))))
    for got in found:
        assert not isinstance(got, str), got
        for x, y in zip(got, found[0], strict=True):
            assert (x == y).all()


if __name__ == "__main__":
    main()
