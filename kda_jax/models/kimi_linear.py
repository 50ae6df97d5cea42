"""Kimi-Linear (arXiv:2510.26692): KDA and MLA layers on a plain residual stream."""

from __future__ import annotations

import jax

from .batch import Axes, Batch
from .cache import LayerState
from .decoder import LanguageModel, States


class KimiLinear(LanguageModel):
    """``x += attention(norm(x)); x += mlp(norm(x))`` in every layer."""

    def stack(
        self,
        x: jax.Array,
        batch: Batch,
        prefill: tuple[LayerState | None, ...],
        decode: tuple[LayerState | None, ...],
        backend: str | None,
        axes: Axes,
    ) -> tuple[jax.Array, States, list[jax.Array]]:
        streams, states = [], []
        for layer, before, running in zip(self.layers, prefill, decode, strict=True):
            streams.append(x)
            attended = layer.attention(x, batch, before, running, backend, axes)
            x = x + attended.y
            x = x + layer.feed_forward(x, batch, axes)
            states.append(attended[1:])
        return x, States(*zip(*states, strict=True)), streams
