"""Backend "scan": Kimi Delta Attention as the recurrence that defines it, one token at a time.

Slow, and exact for every gate: the reference that the other backends are tested against.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .gate import Activated, activate, starting_states, state_from_layout
from .metadata import ChunkMetadata
from .types import CallSpec, KDAConfig, KDAInputs, KDAResult


def recurrence(state: jax.Array, token: Activated) -> tuple[jax.Array, jax.Array]:
    """One token of every head: state ``[H, V, K]``, token rows ``[H, .]``; returns (state, out).

    S = S * exp(g)
    S = S + beta * (v - S k) k^T
    o = S q                          (the scale is in q)
    """
    q, k, v, g, beta = token
    state = state * jnp.exp(g)[:, None, :]
    error = v - _read(state, k)
    state = state + beta[:, None, None] * error[:, :, None] * k[:, None, :]
    return state, _read(state, q)


def _read(state: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.einsum("hvk,hk->hv", state, key, precision=lax.Precision.HIGHEST)


class ScanBackend:
    """The token recurrence under `jax.lax.scan`; runs everywhere, differentiable."""

    name = "scan"
    checkpoint_alignment = 1

    def unsupported(self, spec: CallSpec) -> str | None:
        if spec.groups is not None:
            return "it walks the tokens in order and has no groups; pass groups=None"
        return None

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
        sequence, checkpoint = _token_table(metadata, inputs.q.shape[0])
        seqs = jnp.asarray(metadata.seqs)
        tokens = activate(inputs, config, valid=sequence < metadata.capacity.sequences)
        # One more row in each buffer takes what belongs to no sequence and to no checkpoint.
        states = _with_spare_row(starting_states(inputs, config, seqs))
        saved = _with_spare_row(
            jnp.zeros_like(states, shape=(metadata.capacity.checkpoints, *states.shape[1:]))
        )

        def step(
            carry: tuple[jax.Array, jax.Array], x: tuple[Activated, jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            states, saved = carry
            token, s, c = x
            state, out = recurrence(states[s], token)
            return (states.at[s].set(state), saved.at[c].set(state)), out

        carry, out = lax.scan(step, (states, saved), (tokens, sequence, checkpoint))
        final, saved = (state_from_layout(x[:-1], config) for x in carry)
        return KDAResult(out.astype(inputs.v.dtype), final, saved)


def _token_table(metadata: ChunkMetadata, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """For each token row, its sequence (N: none) and the checkpoint after it (M: none)."""
    seqs, checkpoints = jnp.asarray(metadata.seqs), jnp.asarray(metadata.checkpoints)
    first, length = seqs[:, 0], seqs[:, 1]
    # An empty sequence ends where it begins, so no token falls into it.
    ends = first + jnp.maximum(length, 0)
    sequence = jnp.searchsorted(ends, jnp.arange(num_rows, dtype=jnp.int32), side="right")

    rows = checkpoints.shape[0]
    owner, offset = checkpoints[:, 0], checkpoints[:, 1]
    token = jnp.where(owner >= 0, first[owner] + offset - 1, num_rows)
    checkpoint = jnp.full(num_rows, rows).at[token].set(jnp.arange(rows), mode="drop")
    return sequence, checkpoint


def _with_spare_row(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
