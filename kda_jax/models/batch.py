"""What one step works on: decode rows first, then packed prefills, as schedulers order them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..conv import token_positions
from ..metadata import ChunkMetadata
from ..pool_rows import StepRows


@dataclasses.dataclass(frozen=True)
class Axes:
    """Mesh axes that a step under `jax.shard_map` sums over; None: that dimension is whole.

    model: heads, MLP columns and vocabulary. expert: experts.
    """

    model: str | None = None
    expert: str | None = None

    def sum_model(self, x: jax.Array) -> jax.Array:
        """The sum of the devices' parts of x along `model`."""
        return x if self.model is None else lax.psum(x, self.model)

    def sum_experts(self, x: jax.Array) -> jax.Array:
        """The sum along `model` and `expert`."""
        names = tuple(name for name in (self.model, self.expert) if name is not None)
        return lax.psum(x, names) if names else x

    def first(self, axis: str | None, size: int) -> jax.Array | int:
        """The first index of this device's part, of `size` entries, of a dimension."""
        return 0 if axis is None else lax.axis_index(axis) * size


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "metadata",
        "start",
        "active",
        "decode_start",
        "rows",
        "decode_rows",
        "table",
        "decode_table",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """D decode rows, then the T rows of a packed prefill; each part may be missing (None).

    metadata: of the prefill. start: int32 [N], tokens that its sequences have in the cache.
    active: bool [D], which decode rows carry a token. decode_start: int32 [D], as start.

    Where all states lie in pools (`forward_in_pools`), also: rows: of the KDA layers' pools, for
    the prefill's sequences and checkpoints. decode_rows: int32 [D], those of the decode rows.
    table: int32 [N, W], the MLA pages of each sequence, in order. decode_table: int32 [D, W].
    """

    metadata: ChunkMetadata | None = None
    start: jax.Array | None = None
    active: jax.Array | None = None
    decode_start: jax.Array | None = None
    rows: StepRows | None = None
    decode_rows: jax.Array | None = None
    table: jax.Array | None = None
    decode_table: jax.Array | None = None

    @property
    def in_pools(self) -> bool:
        """Whether the KDA states lie in pools."""
        return self.rows is not None or self.decode_rows is not None

    @property
    def decodes(self) -> int:
        """D."""
        return 0 if self.active is None else self.active.shape[0]

    def valid(self, rows: int) -> jax.Array:
        """bool [D + T]: which rows carry a token."""
        parts = [] if self.active is None else [self.active]
        if self.metadata is not None:
            parts.append(token_positions(self.metadata, rows - self.decodes) >= 0)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
