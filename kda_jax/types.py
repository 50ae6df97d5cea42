"""The types that the public functions and the backends exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax

if TYPE_CHECKING:
    from .metadata import ChunkMetadata

Gate = Literal["bounded", "softplus", "activated"]
StateLayout = Literal["vk", "kv"]


class KDAResult(NamedTuple):
    """What a prefill returns.

    Attributes:
      out: outputs in the dtype of ``v``: ``[B, T, H, V]`` from the public functions,
        ``[T, H, V]`` from a backend. Rows that belong to no sequence are zeros.
      final_state: the state after the last token of each sequence, ``[N, H, V, K]``
        (``[N, H, K, V]`` with ``state_layout="kv"``), float32, or float64 when computing in
        float64. Rows that pad the batch are zeros.
      checkpoint_state: the state after the token of each checkpoint, ``[M, H, V, K]`` in the
        order in which the metadata lists the checkpoints. Rows of padding are zeros.
    """

    out: jax.Array
    final_state: jax.Array
    checkpoint_state: jax.Array


class KDAPoolResult(NamedTuple):
    """What a prefill returns that reads and writes its states in a pool.

    Attributes:
      out: as in `KDAResult`.
      state_cache: the pool after the call. Rows that the call does not write are those of the pool
        before it, bit for bit.
    """

    out: jax.Array
    state_cache: jax.Array


class StatePool(NamedTuple):
    """A pool of states and the rows of it that one call uses; all device arrays.

    Attributes:
      states: ``[R, H, V, K]``, or ``[R, H, K, V]`` with ``state_layout="kv"``, in the compute
        dtype.
      state_indices: int32 ``[N]``, the row of each sequence: its initial state before the call and
        its final state after it. Outside of 0..R-1: the sequence starts from zeros and its final
        state is not written.
      has_initial_state: bool ``[N]``; a False row is not read (the sequence starts from zeros),
        but written.
      checkpoint_state_indices: int32 ``[M]``, the row for the state at each checkpoint; outside of
        0..R-1: not written.
    """

    states: jax.Array
    state_indices: jax.Array
    has_initial_state: jax.Array
    checkpoint_state_indices: jax.Array


@dataclass(frozen=True)
class KDAConfig:
    """The static options of one call.

    Attributes:
      scale: factor on the outputs, usually ``K ** -0.5``.
      gate: how ``g`` becomes a log decay: ``"bounded"`` and ``"softplus"`` take raw gates,
        ``"activated"`` takes ``g <= 0`` (natural log) and ``beta`` in (0, 1) as they are.
      lower_bound: the bound of the bounded gate, in [-5, 0); 0.0 with the other two.
      l2norm: whether q and k are L2-normalized over K first.
      state_layout: ``"vk"`` for states ``[.., V, K]``, ``"kv"`` for ``[.., K, V]``.
      groups: into how many groups a backend splits the chunks of a sequence; None lets it choose.
    """

    scale: float
    gate: Gate
    lower_bound: float
    l2norm: bool
    state_layout: StateLayout
    groups: int | None = None


class KDAInputs(NamedTuple):
    """The arrays of one call, packed: all sequences lie one after the other on the token axis.

    Shapes: q, k, g ``[T, H, K]``, v ``[T, H, V]``, beta ``[T, H]``; A_log ``[H]`` and dt_bias
    ``[H, K]``, both None iff the gate is already activated; initial_state ``[N, H, V, K]`` or
    ``[N, H, K, V]``, and has_initial_state bool ``[N]``, each None when not given.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    initial_state: jax.Array | None
    has_initial_state: jax.Array | None


@dataclass(frozen=True)
class CallSpec:
    """The static facts from which a backend decides whether it can run a call.

    ``platform`` is "cpu", "cuda", "rocm" or another platform's name; dtypes are names such as
    "bfloat16"; ``checkpoints`` tells whether the metadata has room for checkpoints.
    """

    platform: str
    q_dtype: str
    k_dtype: str
    v_dtype: str
    g_dtype: str
    beta_dtype: str
    H: int
    K: int
    V: int
    gate: str
    chunk_size: int
    checkpoints: bool
    groups: int | None

    @classmethod
    def of(
        cls,
        platform: str,
        tensors: Sequence[Any],
        metadata: ChunkMetadata,
        gate: str,
        groups: int | None,
    ) -> CallSpec:
        """Of a call: ``tensors`` are q ``[..., H, K]``, k, v ``[..., H, V]``, g and beta."""
        q, k, v, g, beta = tensors
        return cls(
            platform=platform,
            q_dtype=q.dtype.name,
            k_dtype=k.dtype.name,
            v_dtype=v.dtype.name,
            g_dtype=g.dtype.name,
            beta_dtype=beta.dtype.name,
            H=q.shape[-2],
            K=q.shape[-1],
            V=v.shape[-1],
            gate=gate,
            chunk_size=metadata.chunk_size,
            checkpoints=metadata.capacity.checkpoints > 0,
            groups=groups,
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of q, k, v, g and beta, in this order."""
        return (self.q_dtype, self.k_dtype, self.v_dtype, self.g_dtype, self.beta_dtype)


class Backend(Protocol):
    """An implementation of the operator. Objects must be hashable (they are static under jit).

    A backend that can read and write the rows of a state pool by itself also is a `PoolBackend`;
    for any other one the rows are gathered before `run` and scattered after it.

    Attributes:
      name: the name that selects it, unique in the registry.
      checkpoint_alignment: None when the backend cannot export states inside a prompt, 1 when it
        can at any token, n when only at multiples of n tokens from the start of a sequence.
    """

    @property
    def name(self) -> str: ...

    @property
    def checkpoint_alignment(self) -> int | None: ...

    def unsupported(self, spec: CallSpec) -> str | None:
        """Returns None if the call can run, else one sentence: why not, and what to do."""
        ...

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
        """Computes the operator; traced under jit, so it must not depend on array values."""
        ...


@runtime_checkable
class PoolBackend(Protocol):
    """The optional part of a `Backend`: states that stay in their pool."""

    def run_in_pool(
        self, inputs: KDAInputs, pool: StatePool, config: KDAConfig, metadata: ChunkMetadata
    ) -> KDAPoolResult:
        """`Backend.run` with the states in ``pool``; `inputs` has no initial_state.

        Indices are not checked: one outside of the pool means no row, and so does any index of a
        padded sequence or checkpoint. No other row of the pool may change.
        """
        ...
