"""Backend "chunked": the chunk form of the operator in plain JAX; differentiable, runs everywhere.

With G the sum of g from the start of a chunk through a row, and S the state before the chunk::

    Akk[i, j] = beta_i sum_d k_i k_j exp(G_i - G_j)  (i > j)
    Aqk[i, j] = sum_d q_i k_j exp(G_i - G_j)         (i >= j; the scale is in q)
    w, u = (I + Akk)^-1 [beta k exp(G), beta v]
    v'   = u - w S^T
    o    = (q exp(G)) S^T + Aqk v'
    S    = S diag(exp(G_last)) + v'^T (k exp(G_last - G))

(Kimi Linear, arXiv:2510.26692, section 3.2.) What does not depend on S is computed for a slab of
chunks at once; only the last three lines are serial. The backward pass recomputes a slab from the
state before it, so that it keeps one state per slab.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .gate import Activated, activate, starting_states, state_from_layout
from .metadata import ChunkMetadata
from .pairwise import join_rows
from .types import CallSpec, KDAConfig, KDAInputs, KDAResult

# Chunks per slab: enough to fill a device between two serial steps, within this many elements of
# one [chunks, H, C, K] operand.
MAX_SLAB = 8
SLAB_ELEMENTS = 1 << 19


class ChunkedBackend:
    """The chunk form under `jax.lax.scan`."""

    name = "chunked"
    checkpoint_alignment = 1

    def unsupported(self, spec: CallSpec) -> str | None:
        if spec.groups is not None:
            return "it walks the chunks of a sequence in order; pass groups=None"
        return None

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
        num_rows, heads, key_dim = inputs.k.shape
        seqs = jnp.asarray(metadata.seqs)
        starts = starting_states(inputs, config, seqs)
        saved = jnp.zeros_like(starts, shape=(metadata.capacity.checkpoints, *starts.shape[1:]))
        if metadata.capacity.chunks == 0:
            final = state_from_layout(starts, config)
            return KDAResult(jnp.zeros_like(inputs.v), final, state_from_layout(saved, config))

        slab = _slab_size(metadata, heads * max(key_dim, inputs.v.shape[-1]))
        table = _chunk_table(metadata, slab)
        windows = _windows(inputs, table, metadata.chunk_size, slab)

        def step(
            carry: tuple[jax.Array, jax.Array, jax.Array], x: tuple[_Table, KDAInputs]
        ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
            state, final, saved = carry
            chunks, window = x
            window = window._replace(A_log=inputs.A_log, dt_bias=inputs.dt_bias)
            state, out, states = _slab(state, starts[chunks.sequence], chunks, window, config)
            final = _put_rows(final, states, chunks.is_last, chunks.sequence)
            saved = _put_rows(saved, states, chunks.checkpoint >= 0, chunks.checkpoint)
            return (state, final, saved), out.astype(inputs.v.dtype)

        carry = (jnp.zeros_like(starts, shape=starts.shape[1:]), starts, saved)
        (_, final, saved), out = lax.scan(step, carry, (table, windows))
        return KDAResult(
            _unwindow(out, metadata, num_rows),
            state_from_layout(final, config),
            state_from_layout(saved, config),
        )


class _Table(NamedTuple):
    """The chunk table, ``[slabs, chunks of a slab]``; padding: no rows, sequence 0, not its own."""

    sequence: jax.Array
    first: jax.Array
    rows: jax.Array
    checkpoint: jax.Array
    is_first: jax.Array
    is_last: jax.Array


class _Operands(NamedTuple):
    """What a chunk's serial step needs: ``[.., H, C, .]``, decay ``[.., H, K]``."""

    w: jax.Array
    u: jax.Array
    q: jax.Array
    k: jax.Array
    Aqk: jax.Array
    decay: jax.Array


@functools.partial(jax.checkpoint, static_argnums=4)
def _slab(
    state: jax.Array,
    starts: jax.Array,
    chunks: _Table,
    window: KDAInputs,
    config: KDAConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Walks the chunks of a slab from ``state [H, V, K]``.

    Returns the state after the slab, out ``[chunks, C, H, V]`` and the state after each chunk.
    """
    valid = jnp.arange(window.q.shape[1]) < chunks.rows[:, None]

    # A loop, so that XLA does not fuse the gates into each of the many uses of their results.
    def activate_chunk(x: tuple[Activated, jax.Array]) -> Activated:
        (q, k, v, g, beta), rows = x
        one = window._replace(q=q, k=k, v=v, g=g, beta=beta)
        return activate(one, config, rows)

    operands = _operands(lax.map(activate_chunk, (Activated(*window[:5]), valid)))

    def chunk(
        state: jax.Array, x: tuple[jax.Array, jax.Array, _Operands]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        is_first, start, (w, u, q, k, Aqk, decay) = x
        state = jnp.where(is_first, start, state)
        new_v = u - _matmul("hck,hvk->hcv", w, state)
        out = _matmul("hck,hvk->hcv", q, state) + _matmul("hij,hjv->hiv", Aqk, new_v)
        state = state * decay[:, None, :] + _matmul("hcv,hck->hvk", new_v, k)
        return state, (out, state)

    state, (out, states) = lax.scan(chunk, state, (chunks.is_first, starts, operands))
    out = jnp.where(valid[:, :, None, None], out.swapaxes(1, 2), 0)
    return state, out, states


def _operands(x: Activated) -> _Operands:
    """The state-free part of the chunk form, for all chunks of a slab."""
    q, k, v, g, beta = (y.swapaxes(1, 2) for y in x)  # [chunks, H, C, .]
    chunk = join_rows(q, k, g, beta)
    w = _matmul("shij,shjk->shik", chunk.inverse, chunk.k_start)
    u = _matmul("shij,shjv->shiv", chunk.inverse, beta[..., None] * v)
    return _Operands(w, u, chunk.q_start, chunk.k_end, chunk.Aqk, chunk.decay)


def _matmul(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)


def _slab_size(metadata: ChunkMetadata, row_elements: int) -> int:
    fits = max(1, SLAB_ELEMENTS // (metadata.chunk_size * row_elements))
    # XLA multiplies matrices otherwise, with other rounding, where there is no batch of them: two
    # chunks at least, so that a prompt of one chunk gives the bits of a longer one's first.
    return min(max(metadata.capacity.chunks, 2), MAX_SLAB, fits)


def _chunk_table(metadata: ChunkMetadata, slab: int) -> _Table:
    """The chunk rows, padded to whole slabs."""
    seqs, chunks = jnp.asarray(metadata.seqs), jnp.asarray(metadata.chunks)
    count = -(-chunks.shape[0] // slab) * slab
    missing = count - chunks.shape[0]
    sequence, first, rows, checkpoint = (
        jnp.pad(column, (0, missing), constant_values=fill)
        for column, fill in zip(chunks.T, (-1, 0, 0, -1), strict=True)
    )
    first_chunk, num_chunks = seqs[sequence, 2], seqs[sequence, 3]
    index = jnp.arange(count, dtype=jnp.int32)
    used = rows > 0
    is_first = used & (index == first_chunk)
    is_last = used & (index == first_chunk + num_chunks - 1)
    table = _Table(jnp.maximum(sequence, 0), first, rows, checkpoint, is_first, is_last)
    return _Table(*(x.reshape(-1, slab) for x in table))


def _windows(inputs: KDAInputs, table: _Table, chunk_size: int, slab: int) -> KDAInputs:
    """The rows of every chunk, ``[slabs, chunks, C, ...]``.

    A ragged chunk's window runs into its neighbour or past the end (there, the last row again);
    `activate` blanks these rows. Gathered before the scan, so that its transpose is one scatter.
    """
    rows = table.first[..., None] + jnp.arange(chunk_size, dtype=jnp.int32)
    rows = jnp.minimum(rows, inputs.q.shape[0] - 1)
    gathered = {
        x: jnp.take(getattr(inputs, x), rows, axis=0, mode="clip")
        for x in ("q", "k", "v", "g", "beta")
    }
    return KDAInputs(
        **gathered, A_log=None, dt_bias=None, initial_state=None, has_initial_state=None
    )


def _unwindow(out: jax.Array, metadata: ChunkMetadata, num_rows: int) -> jax.Array:
    """From ``[slabs, chunks, C, H, V]`` to the packed rows; zeros where no chunk lies."""
    chunks = jnp.asarray(metadata.chunks)
    first, rows = chunks[:, 1], chunks[:, 2]
    token = jnp.arange(num_rows, dtype=jnp.int32)
    chunk = jnp.searchsorted(first + rows, token, side="right")
    # Past the tokens in use this is an index past the end, which reads as zeros.
    row = chunk * metadata.chunk_size + token - first[jnp.minimum(chunk, chunks.shape[0] - 1)]
    row = jnp.where(chunk < chunks.shape[0], row, -1)
    return jnp.take(out.reshape(-1, *out.shape[3:]), row, axis=0, mode="fill", fill_value=0)


def _put_rows(buffer: jax.Array, rows: jax.Array, where: jax.Array, index: jax.Array) -> jax.Array:
    """``buffer[index] = rows`` where ``where``; the others go to distinct rows past the end."""
    if buffer.shape[0] == 0:  # no checkpoints: the transpose would gather from no rows
        return buffer
    skip = buffer.shape[0] + jnp.arange(index.shape[0], dtype=index.dtype)
    return buffer.at[jnp.where(where, index, skip)].set(rows, mode="drop", unique_indices=True)
