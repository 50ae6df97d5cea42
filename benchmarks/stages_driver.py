"""One call of the operator for a profiler to look at; started by `stages`, or by hand.

    python -m benchmarks.stages_driver --shape T8192_H12

On CUDA a profiler told to wait (`--profile-from-start off`) sees the last call alone: the one
before it has compiled and loaded everything.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from kda_jax import chunk_kda_prefill
from kda_jax.backends import current_platform

from . import device, inputs
from .shapes import SHAPES


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Switches a waiting CUDA profiler on and off; does nothing on other platforms."""
    if current_platform() != "cuda":
        yield
        return
    driver = ctypes.CDLL("libcuda.so.1")
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0))
    _check(driver.cuDeviceGet(ctypes.byref(number), 0))
    # JAX's context is the primary one; this thread needs it for the switch.
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    _check(driver.cuCtxSetCurrent(context))
    _check(driver.cuProfilerStart())
    yield
    _check(driver.cuProfilerStop())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answers with error {status}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages_driver", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--kind", choices=inputs.KINDS, default="random")
    parser.add_argument("--backend", default="fused")
    args = parser.parse_args(argv)
    device.share_memory()
    shape = SHAPES[args.shape]
    metadata = inputs.layout(shape)

    @jax.jit
    def run(arrays: Any, metadata: Any) -> Any:
        return chunk_kda_prefill(*arrays, metadata=metadata, backend=args.backend)

    arrays = inputs.of_shape(shape, args.kind, 0)
    for _ in range(2):
        jax.block_until_ready(run(arrays, metadata))
    with profiled():
        jax.block_until_ready(run(arrays, metadata))


if __name__ == "__main__":
    main()
