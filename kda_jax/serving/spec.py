"""What a KDA layer keeps of one request, and whether its prefill can fill checkpoint blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from ..backends import Support, get, supports
from ..layer_types import KDALayerConfig

if TYPE_CHECKING:
    from ..models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class KDACacheSpec:
    """One layer's share of the state pool. Make it with `from_config`.

    Attributes:
      state_shape: ``(H, V, K)`` of one row of the recurrent state, H of this device.
      conv_shape: ``(3 * H * K, W - 1)`` of one row of the convolution's window: q, k, v in order.
      state_dtype, conv_dtype: names of the dtypes.
      block_size: tokens of a cache block.
      num_prefill_checkpoint_blocks: blocks to reserve per request for states inside the prompt;
        0 where the layer opted out, and then a scheduler must end a step at the checkpoint.
      prefill_checkpoint_alignment: at multiples of how many tokens from the start of a step the
        states can be exported; None where the layer opted out.
      backend: which one runs the steps without checkpoints.
      checkpoint_backend: which one runs the steps with checkpoints; None where it opted out.
      reason: one sentence for a log: why checkpoints are on or off.
    """

    state_shape: tuple[int, int, int]
    conv_shape: tuple[int, int]
    state_dtype: str
    conv_dtype: str
    block_size: int
    num_prefill_checkpoint_blocks: int
    prefill_checkpoint_alignment: int | None
    backend: str
    checkpoint_backend: str | None
    reason: str

    @property
    def state_bytes(self) -> int:
        """Bytes of one row of the recurrent state."""
        return math.prod(self.state_shape) * jnp.dtype(self.state_dtype).itemsize

    @property
    def conv_bytes(self) -> int:
        """Bytes of one row of the convolution's window."""
        return math.prod(self.conv_shape) * jnp.dtype(self.conv_dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the pool: what a request, or a checkpoint, costs in this layer."""
        return self.state_bytes + self.conv_bytes

    @classmethod
    def from_config(
        cls,
        config: KDALayerConfig,
        *,
        block_size: int,
        heads: int | None = None,
        platform: str | None = None,
        chunk_size: int = 64,
        checkpoint_blocks: int = 1,
        use_prefill_checkpoint: bool = True,
        enable_prefix_caching: bool = True,
    ) -> KDACacheSpec:
        """The spec of a layer, with checkpoints where some backend can export them.

        The configured backend decides. One that cannot export keeps its checkpoint blocks if
        'fused' can run the steps that carry them; 'auto' keeps them if either of its two can.

        Args:
          config: the layer, with its global number of heads and its backend.
          block_size: tokens of a cache block, at least 1.
          heads: of this device, where heads are sharded; None: all.
          platform: "cpu", "cuda" or "rocm"; None: the one that a jit now would compile for.
          chunk_size: of the metadata of the steps.
          checkpoint_blocks: how many blocks to reserve where checkpoints are on, at least 0.
          use_prefill_checkpoint: False opts out whatever the backends can do.
          enable_prefix_caching: False likewise: nobody would ever look a checkpoint up.

        Raises:
          ValueError: a number is out of range, or no backend has the configured name.
          NotImplementedError: the configured backend cannot run this layer even without
            checkpoints; says why and what to do.
        """
        heads = config.heads if heads is None else heads
        for name, value, least in (
            ("block_size", block_size, 1),
            ("heads", heads, 1),
            ("checkpoint_blocks", checkpoint_blocks, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, want at least {least}")
        if heads > config.heads:
            raise ValueError(
                f"heads is {heads}, but the layer has {config.heads}: pass the heads of one device"
            )

        D = config.head_dim

        def ask(checkpoints: bool) -> Support:
            return supports(
                config.backend,
                platform=platform,
                dtype=config.dtype,
                K=D,
                V=D,
                H=heads,
                lower_bound=config.lower_bound,
                chunk_size=chunk_size,
                checkpoints=checkpoints,
            )

        plain = ask(False)
        if plain.backend is None:
            raise NotImplementedError(plain.reason)
        exporting: str | None = None
        alignment: int | None = None
        if not use_prefill_checkpoint:
            reason = "use_prefill_checkpoint is False"
        elif not enable_prefix_caching:
            reason = "enable_prefix_caching is False"
        elif checkpoint_blocks == 0:
            reason = "checkpoint_blocks is 0"
        else:
            support = ask(True)
            exporting, reason = support.backend, support.reason
            alignment = get(exporting).checkpoint_alignment if exporting else None
        return cls(
            state_shape=(heads, D, D),
            conv_shape=(3 * heads * D, config.conv_width - 1),
            state_dtype=jnp.promote_types(config.dtype, jnp.float32).name,
            conv_dtype=config.dtype,
            block_size=block_size,
            num_prefill_checkpoint_blocks=checkpoint_blocks if exporting else 0,
            prefill_checkpoint_alignment=alignment,
            backend=plain.backend,
            checkpoint_backend=exporting,
            reason=reason,
        )


def kda_cache_specs(
    config: ModelConfig,
    *,
    block_size: int,
    heads: int | None = None,
    platform: str | None = None,
    chunk_size: int = 64,
    checkpoint_blocks: int = 1,
    use_prefill_checkpoint: bool = True,
    enable_prefix_caching: bool = True,
) -> dict[int, KDACacheSpec]:
    """The specs of a model's KDA layers, by layer number from 0; arguments as in `from_config`.

    MLA layers have none: their rows grow with the tokens, and a prefix of them is the cache of a
    prefix.
    """
    spec = KDACacheSpec.from_config(
        config.kda,
        block_size=block_size,
        heads=heads,
        platform=platform,
        chunk_size=chunk_size,
        checkpoint_blocks=checkpoint_blocks,
        use_prefill_checkpoint=use_prefill_checkpoint,
        enable_prefix_caching=enable_prefix_caching,
    )
    layers = range(config.num_hidden_layers)
    return {layer: spec for layer in layers if not config.is_full_attention(layer)}
