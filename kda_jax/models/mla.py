"""Multi-head latent attention without position encoding, on a compressed cache.

    q             = q_proj(x) | q_b_proj(RMSNorm(q_a_proj(x)))             [H, nope + rope]
    latent, share = kv_a_proj_with_mqa(x)                                  kv_lora, rope
    latent        = RMSNorm(latent)                  the cache row is latent and share
    k_nope, v     = kv_b_proj(latent)                                      [H, nope + v]
    attn          = softmax((q . [k_nope, share]) * (nope + rope)^-0.5) v  causal
    y             = o_proj(attn [* sigmoid(g_proj(x))])                    the gate: Kimi-K3

The rope part keeps its name and its place, and is not rotated (NoPE). kv_b_proj is absorbed into
the query and behind the sum, so that neither keys nor values are ever expanded.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..conv import token_positions
from ..linear import Linear
from .batch import Batch
from .config import ModelConfig
from .mla_attention import contiguous_pages, decode_attention, prefill_attention, write_rows
from .norm import RMSNorm


class MLACache(NamedTuple):
    """rows: [N, S, kv_lora + rope], one row per token; how many count is the model cache's."""

    rows: jax.Array

    def paged(self, table: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The rows as pages, and the table that names them in order."""
        return contiguous_pages(self.rows)

    def with_pages(self, pages: jax.Array) -> MLACache:
        """The cache after these pages were written."""
        return MLACache(pages.reshape(self.rows.shape))


class MLAPages(NamedTuple):
    """pages: [P, B, kv_lora + rope], shared by all sequences; the batch's tables say whose."""

    pages: jax.Array

    def paged(self, table: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The pages and the table of the batch."""
        assert table is not None
        return self.pages, table

    def with_pages(self, pages: jax.Array) -> MLAPages:
        """The cache after these pages were written."""
        return MLAPages(pages)


class MLA(nnx.Module):
    """See the module's docstring. Under `jax.shard_map` with split heads, y is a part of a sum."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.kv_lora = config.v_head_dim, config.kv_lora_rank
        hidden, heads, dtype = config.hidden_size, config.num_attention_heads, config.dtype
        q_width = heads * (self.nope + self.rope)
        self.has_q_lora = config.q_lora_rank is not None
        self.has_gate = config.mla_use_output_gate
        if config.q_lora_rank is not None:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, dtype, rngs=rngs)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, dtype)
            self.q_b_proj = Linear(config.q_lora_rank, q_width, dtype, rngs=rngs)
        else:
            self.q_proj = Linear(hidden, q_width, dtype, rngs=rngs)
        self.kv_a_proj_with_mqa = Linear(hidden, self.kv_lora + self.rope, dtype, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(self.kv_lora, config.rms_norm_eps, dtype)
        self.kv_b_proj = Linear(self.kv_lora, heads * (self.nope + self.v_dim), dtype, rngs=rngs)
        if self.has_gate:
            self.g_proj = Linear(hidden, heads * self.v_dim, dtype, rngs=rngs)
        self.o_proj = Linear(heads * self.v_dim, hidden, dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        batch: Batch,
        cache: MLACache | MLAPages | None,
        decode: MLACache | None,
    ) -> tuple[jax.Array, MLACache | MLAPages | None, MLACache | None]:
        """Writes the new rows, then attends.

        Args:
          x: [D + T, hidden].
          batch: which rows those are.
          cache: [N, S, C], of the prefill's sequences; None without a prefill. Or the pages of all
            rows.
          decode: [D, S', C], of the decode rows; None without such rows, or where they lie in the
            pages of `cache`.

        Returns:
          y [D + T, hidden], and both caches with the new rows.
        """
        expand = self.kv_b_proj.kernel[...]
        expand = expand.reshape(self.kv_lora, -1, self.nope + self.v_dim)
        q = self._queries(x, expand[..., : self.nope])
        latent, share = jnp.split(self.kv_a_proj_with_mqa(x), [self.kv_lora], axis=-1)
        rows = jnp.concatenate([self.kv_a_layernorm(latent), share], axis=-1)
        scale, D, parts = (self.nope + self.rope) ** -0.5, batch.decodes, []
        # All is written before anything is read: a write behind a read would copy shared pages.
        place = None
        if batch.active is not None:
            assert batch.decode_start is not None
            place = jnp.where(batch.active, batch.decode_start, -1)
            own = cache if decode is None else decode
            assert own is not None
            pages, table = own.paged(batch.decode_table)
            own = own.with_pages(write_rows(pages, table, rows[:D], jnp.arange(D), place))
            if decode is None:
                cache = own
            else:
                assert isinstance(own, MLACache)
                decode = own
        if batch.metadata is not None:
            assert cache is not None
            pages, table = cache.paged(batch.table)
            where = locate(batch, rows.shape[0] - D)
            cache = cache.with_pages(write_rows(pages, table, rows[D:], *where))
        if place is not None:
            own = cache if decode is None else decode
            assert own is not None
            pages, table = own.paged(batch.decode_table)
            parts.append(decode_attention(q[:D], pages, table, place + 1, scale, self.kv_lora))
        if batch.metadata is not None:
            assert batch.start is not None and cache is not None
            pages, table = cache.paged(batch.table)
            attended = prefill_attention(
                q[D:],
                pages,
                table,
                batch.metadata,
                batch.start,
                scale,
                self.kv_lora,
                differentiable=not isinstance(cache, MLAPages),  # which only a server has
            )
            parts.append(attended)
        latent = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        values = jnp.einsum(
            "rhc,chv->rhv",
            latent.astype(x.dtype),
            expand[..., self.nope :],
            precision=lax.Precision.HIGHEST,
        )
        attn = values.reshape(x.shape[0], -1)
        if self.has_gate:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            gate = jax.nn.sigmoid(self.g_proj(x).astype(wide))
            attn = (attn.astype(wide) * gate).astype(x.dtype)
        return self.o_proj(attn), cache, decode

    def _queries(self, x: jax.Array, expand: jax.Array) -> jax.Array:
        """Latent queries [R, H, kv_lora + rope]: k_nope's expansion is moved into them."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.has_q_lora else None
        q = self.q_proj(x) if q is None else q
        q = q.reshape(x.shape[0], -1, self.nope + self.rope)
        latent = jnp.einsum(
            "rhn,chn->rhc", q[..., : self.nope], expand, precision=lax.Precision.HIGHEST
        )
        return jnp.concatenate([latent, q[..., self.nope :]], axis=-1)


def locate(batch: Batch, rows: int) -> tuple[jax.Array, jax.Array]:
    """Of each prefill row: its sequence, and its position in it, or -1 for padding."""
    assert batch.metadata is not None and batch.start is not None
    seqs = jnp.asarray(batch.metadata.seqs)
    ends = seqs[:, 0] + jnp.maximum(seqs[:, 1], 0)
    sequence = jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right")
    sequence = jnp.minimum(sequence, seqs.shape[0] - 1)
    inside = token_positions(batch.metadata, rows)
    return sequence, jnp.where(inside >= 0, batch.start[sequence] + inside, -1)
