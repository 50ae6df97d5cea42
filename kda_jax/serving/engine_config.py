"""The sizes of an engine, and what follows from them for one model."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from .arguments import at_least
from .rule import CheckpointRule
from .spec import KDACacheSpec, kda_cache_specs

if TYPE_CHECKING:
    from ..models.config import ModelConfig

CHUNK = 64


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What an operator chooses.

    Attributes:
      max_model_len: tokens of a prompt and its continuation together, at most.
      block_size: tokens of a cache block: of a page of the MLA cache, and between two places where
        a checkpoint may lie.
      budget: tokens of one step, at most; prompts that are longer are prefilled in several.
      max_requests: that run at a time. max_prefills: of them, prefilled in one step.
      max_waiting: that wait for a place; one more is refused.
      cache_bytes: what the prefix cache may hold; 0: no prefix cache.
      checkpoints: whether a step exports the states inside the prompt; without, a prefill is split
        there into two steps.
      checkpoint_blocks: how many checkpoints one prompt gets, the deepest ones.
      checkpoint_rows: states that the prefix cache has room for; None: half of cache_bytes, the
        other half holds blocks.
      drop_draft_block: checkpoints lie one block earlier, as speculative decoding wants it.
      live_tokens: tokens of all running requests together, at most; None: what max_requests of
        max_model_len need.
    """

    max_model_len: int = 8192
    block_size: int = 256
    budget: int = 2048
    max_requests: int = 16
    max_prefills: int = 4
    max_waiting: int = 256
    cache_bytes: int = 256 * 2**20
    checkpoints: bool = True
    checkpoint_blocks: int = 1
    checkpoint_rows: int | None = None
    drop_draft_block: bool = False
    live_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_model_len", 2),
            ("block_size", 1),
            ("max_requests", 1),
            ("max_prefills", 1),
            ("max_waiting", 1),
            ("cache_bytes", 0),
            ("checkpoint_blocks", 0),
        ):
            at_least(name, getattr(self, name), least)
        at_least("budget", self.budget, 1)
        if self.checkpoint_rows is not None:
            at_least("checkpoint_rows", self.checkpoint_rows, 0)
        if self.live_tokens is not None:
            at_least("live_tokens", self.live_tokens, 1)
            if self.live_tokens < self.max_model_len:
                raise ValueError(
                    f"live_tokens is {self.live_tokens}, want at least max_model_len,"
                    f" {self.max_model_len}, so that the longest request can run: raise it, lower"
                    " max_model_len, or leave live_tokens out"
                )

    @property
    def table_width(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    @property
    def live_blocks(self) -> int:
        """Blocks that running requests may hold together."""
        if self.live_tokens is None:
            return self.max_requests * self.table_width
        return max(self.table_width, self.live_tokens // self.block_size)


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """What the device holds for an engine.

    rows: of the KDA pools: one for each running request, and `checkpoint_rows` for the cache.
    blocks: of the MLA pools: those of running requests, and the cache's. checkpoint_bytes: of a
    row over all KDA layers; block_bytes: of a block over all MLA layers. checkpoints_per_step: how
    many one step can export.
    """

    spec: KDACacheSpec
    rule: CheckpointRule
    rows: int
    blocks: int
    checkpoint_rows: int
    checkpoints_per_step: int
    checkpoint_bytes: int
    block_bytes: int
    cache_bytes: int

    @property
    def live_bytes(self) -> int:
        """Of the pools' rows and blocks that are not the cache's."""
        return self.total_bytes - self.cache_bytes

    @property
    def total_bytes(self) -> int:
        """Of all pools."""
        return self.rows * self.checkpoint_bytes + self.blocks * self.block_bytes

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> PoolSizes:
        """The sizes for a model.

        Raises:
          ValueError: the model has no KDA layer, cache_bytes holds less than one prefix, or budget
            is too small to make progress.
          NotImplementedError: no backend runs it; says why and what to do.
        """
        specs = kda_cache_specs(
            model,
            block_size=config.block_size,
            chunk_size=CHUNK,
            checkpoint_blocks=config.checkpoint_blocks,
            use_prefill_checkpoint=config.checkpoints,
            enable_prefix_caching=config.cache_bytes > 0,
        )
        if not specs:
            raise ValueError("the model has no KDA layer: kda_layers of its config is empty")
        spec = next(iter(specs.values()))
        # Decodes go first: what is left must hold a whole chunk, or prefills would never end.
        whole = math.lcm(CHUNK, spec.prefill_checkpoint_alignment or 1)
        if config.budget < config.max_requests + whole:
            raise ValueError(
                f"budget is {config.budget}, want at least {config.max_requests + whole}: a token"
                f" for each of max_requests ({config.max_requests}) and {whole} of a prompt"
            )
        checkpoint_bytes = sum(each.row_bytes for each in specs.values())
        width = model.kv_lora_rank + model.qk_rope_head_dim
        row = width * jnp.dtype(model.dtype).itemsize * len(model.full_attn_layers)
        block_bytes = row * config.block_size
        checkpoint_rows = config.checkpoint_rows
        if checkpoint_rows is None:
            checkpoint_rows = max(1, config.cache_bytes // 2 // checkpoint_bytes)
        if not config.cache_bytes:
            checkpoint_rows = 0
        rest = config.cache_bytes - checkpoint_rows * checkpoint_bytes
        if config.cache_bytes and (rest < block_bytes or not checkpoint_rows):
            raise ValueError(
                f"cache_bytes is {config.cache_bytes}, want 0 or at least"
                f" {max(1, checkpoint_rows) * checkpoint_bytes + block_bytes}: room for"
                f" {max(1, checkpoint_rows)} checkpoint(s) of {checkpoint_bytes} and a block of"
                f" {block_bytes}"
            )
        cache_blocks = rest // block_bytes if block_bytes else 0
        in_step = min(spec.num_prefill_checkpoint_blocks, -(-config.budget // config.block_size))
        return cls(
            spec=spec,
            rule=CheckpointRule.from_spec(spec, drop_draft_block=config.drop_draft_block),
            rows=config.max_requests + checkpoint_rows,
            blocks=(config.live_blocks + cache_blocks) if block_bytes else 0,
            checkpoint_rows=checkpoint_rows,
            checkpoints_per_step=in_step * config.max_prefills,
            checkpoint_bytes=checkpoint_bytes,
            block_bytes=block_bytes,
            cache_bytes=checkpoint_rows * checkpoint_bytes + cache_blocks * block_bytes,
        )
