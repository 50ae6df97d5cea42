"""The floor: the least time in which this machine could do the operator's work.

The work is counted from the operator, the machine's ceilings are measured here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .machine import usable_cores
from .shapes import Shape
from .timing import measure


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached: flop/s in a matrix product, bytes/s (read + written) in a copy."""

    float32_flops: float
    bfloat16_flops: float
    copy_bandwidth: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def flops(shape: Shape) -> float:
    """Multiplications and additions of the chunk form, at the chunk length that needs fewest.

    Per chunk of C rows and head, a triangular operand counted by its half: Akk, Aqk and w are
    C*C*K each, u and Aqk v' C*C*V each; w S^T, q S^T and the state's update 2*C*K*V each. Gates,
    norms and the inverse of the diagonal blocks are left out, so this is a lower bound. 16 is the
    shortest chunk.
    """
    chunk, K, V = 16, shape.K, shape.V
    return float(shape.tokens * shape.H * (6 * K * V + chunk * (3 * K + 2 * V)))


def traffic(shape: Shape, itemsize: int) -> float:
    """Bytes of q, k, g, v, beta and out, moved once, and of the final states (float32)."""
    per_token = 3 * shape.K + 2 * shape.V + 1
    states = len(shape.seq_lens) * shape.H * shape.K * shape.V * 4
    return float(shape.tokens * shape.H * per_token * itemsize + states)


def floor(shape: Shape, dtype: str, ceilings: Ceilings) -> float:
    """Seconds: the larger of arithmetic and traffic.

    The arithmetic is taken at the float32 peak whatever the input's dtype: states and accumulators
    are float32.
    """
    compute = flops(shape) / ceilings.float32_flops
    return max(compute, traffic(shape, jnp.dtype(dtype).itemsize) / ceilings.copy_bandwidth)


def memory_floor(shape: Shape, dtype: str, copy_bandwidth: float) -> float:
    """Seconds that the traffic alone takes: what bounds the operator where matrix units abound."""
    return traffic(shape, jnp.dtype(dtype).itemsize) / copy_bandwidth


def device_copy_bandwidth(num_bytes: int = 1 << 31, budget: float = 0.5) -> float:
    """Bytes/s, read + written, of the faster of two copies on JAX's default device.

    One is a copy as XLA does it, the other a kernel that reads and writes each element once; calls
    are queued, so the host does not count.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        num_bytes = min(num_bytes, limit // 8)
    source = jnp.ones((num_bytes // 4,), jnp.float32)
    copy, negate = jax.jit(jnp.copy), jax.jit(jnp.negative)
    functions = {"copy": lambda: copy(source), "negate": lambda: negate(source)}
    timings = measure(functions, budget=budget, queued=True)
    return 2.0 * source.nbytes / min(timing.median for timing in timings.values())


def measure_ceilings(size: int = 2048, copy_bytes: int = 1 << 29, budget: float = 1.5) -> Ceilings:
    """Measure the peaks with all the cores that the backends use.

    The float32 peak is the faster of XLA's and NumPy's matrix product of ``size``; the copy is one
    of ``copy_bytes``, in as many threads as there are cores.
    """
    key = jax.random.key(0)
    a32 = jax.random.normal(key, (size, size), jnp.float32)
    a16 = a32.astype(jnp.bfloat16)
    host = np.asarray(a32)
    dot = jax.jit(lambda x: jnp.dot(x, x, precision=jax.lax.Precision.HIGHEST))
    timings = measure(
        {"xla": lambda: dot(a32), "numpy": lambda: host @ host, "bf16": lambda: dot(a16)},
        budget=budget,
    )
    work = 2.0 * size**3
    return Ceilings(
        float32_flops=work / min(timings["xla"].best, timings["numpy"].best),
        bfloat16_flops=work / timings["bf16"].best,
        copy_bandwidth=_copy_bandwidth(copy_bytes, budget),
    )


def _copy_bandwidth(size: int, budget: float) -> float:
    threads = usable_cores()
    source = np.ones(size // 4, np.float32)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            for done in [pool.submit(np.copyto, to, of) for of, to in parts]:
                done.result()

        return 2.0 * source.nbytes / measure({"copy": copy}, budget=budget)["copy"].best
