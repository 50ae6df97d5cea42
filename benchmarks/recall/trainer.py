"""The training loop: a curriculum of lengths, resumable at any step with the same result."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from kda_jax.metadata import ChunkMetadata
from kda_jax.models import LanguageModel, from_config
from kda_jax.models.training import mean_loss, next_token_logits
from kda_jax.models.weights import model_class
from kda_jax.serving.recall_text import ANSWER_SIZE

from .config import CONFIG
from .data import HELD_OUT, ROOM, TRAINING, Packed, batch


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides a run's result, beside the machine's rounding.

    Attributes:
      rooms: bytes of a sequence, level by level; a level is done when the running share of right
        answers at its room reaches `pass_mark`.
      tokens: of one step, or one sequence where its room is larger.
      rate: of Adam, after `warmup` steps; from step `knee` on it falls as step ** -3.
      memory: of the running share, which a step moves by 1 - memory.
      averaging: how much a step moves the average of the weights, which is what is judged and kept.
      config: as in config.json.
    """

    rooms: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    tokens: int = 1024
    rate: float = 3e-3
    warmup: int = 200
    knee: int = 2500
    pass_mark: float = 0.85
    memory: float = 0.9
    averaging: float = 0.005
    backend: str = "auto"
    seed: int = 0
    config: Mapping[str, Any] = dataclasses.field(default_factory=lambda: CONFIG, hash=False)

    def __post_init__(self) -> None:
        for room in self.rooms:
            if room % 64 or max(self.tokens, room) % room:
                raise ValueError(
                    f"rooms holds {room}, want multiples of 64 that divide tokens,"
                    f" {self.tokens}, or exceed it"
                )


@dataclasses.dataclass
class Trainer:
    """A run between two steps.

    Attributes:
      model: the weights in training.
      average: of these over the last steps.
      optimizer: its state.
      step: how many are done.
      level: which room is being learned.
      share: the running share of right answers there.
    """

    settings: Settings
    model: LanguageModel
    average: LanguageModel
    optimizer: Any
    step: int = 0
    level: int = 0
    share: float = 0.0

    @classmethod
    def start(cls, settings: Settings) -> Trainer:
        """Before the first step: seeded weights."""
        config = from_config(settings.config, dtype="float32")
        model = model_class(config)(config, rngs=nnx.Rngs(settings.seed))
        return cls(settings, model, model, _optimizer(settings).init(model))

    def _batch(self, room: int, kind: int, number: int) -> Packed:
        s = self.settings
        return batch(room, max(s.tokens, room), (s.seed, kind, number))

    @property
    def _state(self) -> tuple[LanguageModel, LanguageModel, Any]:
        return self.model, self.average, self.optimizer

    def next_room(self) -> int:
        """The room of the next step: half of the time the level's, else any one up to it."""
        s = self.settings
        random = np.random.default_rng((s.seed, ROOM, self.step))
        level = self.level if random.random() < 0.5 else int(random.integers(self.level + 1))
        return s.rooms[level]

    def advance(self) -> tuple[float, float]:
        """One step; returns its loss and its share of right answers, before the update."""
        s, room = self.settings, self.next_room()
        data = self._batch(room, TRAINING, self.step)
        *state, loss, share = _update(s, room)(*self._state, *data)
        self.model, self.average, self.optimizer = state
        self.step += 1
        if room == s.rooms[self.level]:
            self.share = s.memory * self.share + (1 - s.memory) * float(share)
            if self.share >= s.pass_mark and self.level + 1 < len(s.rooms):
                self.level, self.share = self.level + 1, 0.0
        return float(loss), float(share)

    def held_out(self, batches: int) -> dict[int, float]:
        """The share of right answers at each room, from sequences that training never sees."""
        shares = {}
        for room in self.settings.rooms:
            share = _share(self.settings, room)
            found = [share(self.average, *self._batch(room, HELD_OUT, i)) for i in range(batches)]
            shares[room] = float(np.mean(found))
        return shares

    def save(self, file: Path) -> None:
        """Everything that the next step depends on, in one file that is never half written."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._state)
        arrays = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves}
        facts = {"step": self.step, "level": self.level, "share": self.share}
        temporary = file.with_suffix(".new")
        save_file(arrays, temporary, metadata={"run": json.dumps(facts)})
        temporary.replace(file)

    @classmethod
    def resume(cls, settings: Settings, file: Path) -> Trainer:
        """Goes on from what `save` wrote, under the same settings."""
        trainer = cls.start(settings)
        with safe_open(file, framework="numpy") as saved:
            trainer.model, trainer.average, trainer.optimizer = jax.tree_util.tree_map_with_path(
                lambda key, _: jnp.asarray(saved.get_tensor(jax.tree_util.keystr(key))),
                trainer._state,
            )
            facts = json.loads(saved.metadata()["run"])
        return dataclasses.replace(trainer, **facts)


def right_share(logits: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """The share of the answers in tokens [T] that greedy decoding would have written.

    These are the ones of which every token is the best of its logits [T, V].
    """
    marked = weights[1:] > 0
    right = (jnp.argmax(logits[:-1], axis=-1) == tokens[1:]) & marked
    whole = functools.reduce(jnp.logical_and, (jnp.roll(right, -i) for i in range(ANSWER_SIZE)))
    begins = marked & (weights[:-1] == 0)
    return jnp.sum(whole & begins) / jnp.sum(begins)


@functools.lru_cache
def _optimizer(s: Settings) -> optax.GradientTransformation:
    def rate(step: jax.Array) -> jax.Array:
        return s.rate * jnp.minimum(step / s.warmup, (s.knee / jnp.maximum(step, s.knee)) ** 3)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01)
    )


@functools.lru_cache
def _update(s: Settings, room: int) -> Callable[..., tuple]:
    """(model, average, optimizer, tokens, weights, metadata) -> the first three, loss, share."""

    @jax.jit
    def update(
        model: LanguageModel,
        average: LanguageModel,
        state: Any,
        tokens: Any,
        weights: Any,
        metadata: ChunkMetadata,
    ) -> tuple:
        def loss(model: LanguageModel) -> tuple[jax.Array, jax.Array]:
            logits = next_token_logits(model, tokens, metadata, max_length=room, backend=s.backend)
            share = right_share(logits, tokens, weights)
            return mean_loss(logits, tokens, metadata, weights), share

        (value, share), gradient = jax.value_and_grad(loss, has_aux=True)(model)
        updates, state = _optimizer(s).update(gradient, state, model)
        model = optax.apply_updates(model, updates)
        average = optax.incremental_update(model, average, s.averaging)
        return model, average, state, value, share

    return update


@functools.lru_cache
def _share(s: Settings, room: int) -> Callable[..., jax.Array]:
    @jax.jit
    def share(
        model: LanguageModel, tokens: Any, weights: Any, metadata: ChunkMetadata
    ) -> jax.Array:
        logits = next_token_logits(model, tokens, metadata, max_length=room, backend=s.backend)
        return right_share(logits, tokens, weights)

    return share
