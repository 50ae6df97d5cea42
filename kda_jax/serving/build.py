"""From a model to an engine that is ready to start."""

from __future__ import annotations

import jax

from ..models.decoder import LanguageModel
from .engine import Engine
from .engine_config import EngineConfig, PoolSizes
from .memory import check_pools
from .runner import Runner


def build_engine(model: LanguageModel, config: EngineConfig) -> tuple[Engine, Runner]:
    """An engine that has not started, and its runner, to be warmed first (`warm`).

    Raises:
      ValueError: the sizes do not fit the model; names the argument.
      NotImplementedError: no backend runs the model here; says why and what to do.
      MemoryError: the pools are larger than what the device has free; names the arguments.
    """
    sizes = PoolSizes.of(config, model.config)
    check_pools(config, sizes, next(iter(jax.tree.leaves(model)[0].devices())))
    runner = Runner(model, config, sizes)
    eos, vocab_size = model.config.eos_token_id, model.config.vocab_size
    return Engine(runner, config, sizes, vocab_size=vocab_size, eos=eos), runner
