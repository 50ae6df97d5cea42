"""One way to run the operator: a backend, on a device, in so many groups."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import backends
from ..devices import platform_of
from ..metadata import Capacity, ChunkMetadata
from ..ops import chunk_kda, chunk_kda_prefill
from ..pool_rows import StepRows
from ..testing import Case, Kind, make_case
from ..testing_pool import PoolCase
from ..types import CallSpec, Gate, KDAResult

H, K, V = 2, 128, 64  # K != V: a state the wrong way round does not fit
TOKENS, SEQUENCES, CHECKPOINTS = 384, 8, 8


def room(chunk_size: int = 64, checkpoints: int = CHECKPOINTS) -> Capacity:
    """One capacity for nearly everything, so that nearly everything shares few programs."""
    chunks = TOKENS // chunk_size + SEQUENCES + checkpoints
    return Capacity(TOKENS, SEQUENCES, chunks, checkpoints)


@dataclasses.dataclass(frozen=True)
class Path:
    """Runs calls on one device; results come back as NumPy arrays.

    Attributes:
      device: of JAX.
      backend: a name of the operator's ``backend`` argument.
      dtype: what the checks use that need only one.
    """

    device: Any
    backend: str
    dtype: str

    @property
    def platform(self) -> str:
        return platform_of(self.device)

    def case(self, kind: Kind, seq_lens: list[int], **options: Any) -> Case:
        """`make_case` in the shape that most checks share; always with has_initial_state."""
        states = options.pop("initial_state", True)
        options["initial_state"] = [states] * len(seq_lens) if isinstance(states, bool) else states
        shape: dict[str, Any] = {"H": H, "K": K, "V": V, "capacity": room(), "dtype": self.dtype}
        return make_case(kind, seq_lens=seq_lens, **shape | options)

    def pack(self) -> Case:
        """What nearly every check of exactness starts from: one sequence is empty, one is new."""
        return self.case(
            "random",
            [130, 0, 65, 1],
            initial_state=[True, True, False, True],
            checkpoint_offsets=[[64, 100], [], [17], [1]],
        )

    def call(self, case: Case, **options: Any) -> KDAResult:
        """The operator on a case."""
        with jax.default_device(self.device):
            result = chunk_kda_prefill(
                *case.args, **case.kwargs | {"backend": self.backend} | options
            )
            return KDAResult(*jax.device_get(tuple(result)))

    def call_in_pool(self, p: PoolCase) -> tuple[Any, Any, bool]:
        """out, the pool after the call, and whether the donated pool lies elsewhere now."""
        with jax.default_device(self.device):
            pool = jnp.array(p.pool)
            address = pool.unsafe_buffer_pointer()
            out, after = _in_pool(
                pool,
                p.case.args,
                p.case.metadata,
                p.rows,
                lower_bound=p.case.lower_bound,
                backend=self.backend,
            )
            moved = after.unsafe_buffer_pointer() != address
            return *jax.device_get((out, after)), moved

    def call_activated(self, case: Case, **options: Any) -> KDAResult:
        """`chunk_kda` on a case whose raw_g and raw_beta are activated gates."""
        kwargs = {name: x for name, x in case.kwargs.items() if name != "lower_bound"}
        with jax.default_device(self.device):
            result = chunk_kda(*case.args[:5], **kwargs | {"backend": self.backend} | options)
            return KDAResult(*jax.device_get(tuple(result)))

    def unsupported(
        self, case: Case, *, gate: Gate | None = None, groups: int | None = None
    ) -> str | None:
        """Why the backend does not claim a call, in its own words; None: it does."""
        gate = gate or ("softplus" if case.lower_bound is None else "bounded")
        spec = CallSpec.of(self.platform, case.args[:5], case.metadata, gate, groups)
        with jax.default_device(self.device):
            return backends.get(self.backend).unsupported(spec)


@functools.partial(jax.jit, static_argnames=("lower_bound", "backend"), donate_argnums=0)
def _in_pool(
    pool: Any,
    args: Any,
    metadata: ChunkMetadata,
    rows: StepRows,
    *,
    lower_bound: float | None,
    backend: str,
) -> Any:
    return chunk_kda_prefill(
        *args,
        metadata=metadata,
        state_cache=pool,
        **rows._asdict(),
        lower_bound=lower_bound,
        backend=backend,
    )


def piece(case: Case, start: int, stop: int, state: Any) -> Case:
    """Tokens [start, stop) of a case of one sequence, resumed from ``state [H, V, K]``."""
    metadata = ChunkMetadata.from_seq_lens([stop - start], capacity=case.metadata.capacity)

    def cut(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rows = np.full((1, metadata.capacity.tokens, *x.shape[2:]), np.nan, x.dtype)
        rows[:, : stop - start] = x[:, start:stop]
        return rows

    assert case.initial_state is not None and case.has_initial_state is not None
    states = np.full_like(case.initial_state, np.nan)
    states[0] = state
    has = np.zeros_like(case.has_initial_state)
    has[0] = True
    tokens: dict[str, Any] = {
        name: cut(getattr(case, name)) for name in ("q", "k", "v", "raw_g", "raw_beta")
    }
    return dataclasses.replace(
        case, metadata=metadata, initial_state=states, has_initial_state=has, **tokens
    )


def first_difference(got: Any, want: Any) -> str | None:
    """How two arrays differ in their bits; None: they do not."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {got.shape} instead of {want.dtype} {want.shape}"
    if got.tobytes() == want.tobytes():
        return None
    x, y = got.astype(np.float64), want.astype(np.float64)
    differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        size = np.max(np.abs(x - y), initial=0, where=differ)
    where = np.argwhere(differ)[:1].tolist()
    return f"{differ.sum()} of {differ.size} elements differ, by at most {size:.2e}; first {where}"


def same_bits(got: Any, want: Any, what: str) -> None:
    """Raises AssertionError, which says how they differ, unless every bit is the same."""
    if difference := first_difference(got, want):
        raise AssertionError(f"{what}: {difference}")
