"""Arguments of the models' steps and of `generate`: errors that name them, their value and the fix.

Only types, shapes, dtypes and what lies on the host are looked at: the checks work on tracers and
wait for no device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..metadata import ChunkMetadata
from .cache import ModelCache
from .decoder import LanguageModel
from .limits import check_decode_room, check_prefill_room, check_tokens

_Array = jax.Array | np.ndarray
_GREEDY = 1e-6  # logits over less than this overflow, and the best one wins anyway


def checked(check: Callable[..., None]) -> Callable[[Any], Any]:
    """Decorates a jitted step so that `check`, of the same arguments, sees them before jit does.

    To the program NumPy arrays are tracers, and what jit cannot take it refuses in its own words.
    What belongs to jit stays: lower, trace, eval_shape, clear_cache. These, and what wraps the
    function itself, do not come by here: a step checks what its tracers show as well.
    """

    def decorate(step: Any) -> Any:
        check.__qualname__ = step.__name__  # for Python's error when an argument is missing

        @functools.wraps(step)
        def call(*args: Any, **options: Any) -> Any:
            check(*args, **options)
            return step(*args, **options)

        for name in ("lower", "trace", "eval_shape", "clear_cache"):
            setattr(call, name, getattr(step, name))
        call.__wrapped__ = step.__wrapped__  # type: ignore[attr-defined]
        return call

    return decorate


def check_prefill(model: Any, tokens: Any, metadata: Any, cache: Any, **options: Any) -> None:
    """Of `prefill`; options are jit's to check."""
    _check_model(model)
    _check_cache("cache", cache)
    _check_packed(tokens, 0, metadata, "cache", cache)
    check_tokens(tokens, _used(metadata), 0, model.config.vocab_size)
    check_prefill_room("cache", metadata, cache)


def check_decode(model: Any, tokens: Any, cache: Any, active: Any = None) -> None:
    """Of `decode_step`."""
    _check_model(model)
    _check_cache("cache", cache)
    rows = cache.length.shape[0]
    _check_integers("tokens", tokens, rows)
    if tokens.shape != (rows,):
        raise ValueError(f"tokens has shape {tokens.shape}, cache has {rows} rows: want equal")
    active = _check_active(active, rows, "cache")
    check_tokens(tokens, active, 0, model.config.vocab_size)
    check_decode_room("cache", active, cache)


def check_mixed(
    model: Any,
    tokens: Any,
    metadata: Any,
    decode_cache: Any,
    prefill_cache: Any,
    active: Any = None,
    **options: Any,
) -> None:
    """Of `mixed_step`."""
    _check_model(model)
    _check_cache("decode_cache", decode_cache)
    _check_cache("prefill_cache", prefill_cache)
    rows, vocab = decode_cache.length.shape[0], model.config.vocab_size
    active = _check_active(active, rows, "decode_cache")
    _check_packed(tokens, rows, metadata, "prefill_cache", prefill_cache)
    check_tokens(tokens[:rows], active, 0, vocab)
    check_tokens(tokens[rows:], _used(metadata), rows, vocab)
    check_decode_room("decode_cache", active, decode_cache)
    check_prefill_room("prefill_cache", metadata, prefill_cache)


def _check_model(model: Any) -> None:
    if not isinstance(model, LanguageModel):
        raise TypeError(
            f"model is a {type(model).__name__}, want a KimiLinear or KimiK3: from_pretrained(path)"
            " loads one"
        )


def _check_cache(name: str, cache: Any) -> None:
    if not isinstance(cache, ModelCache):
        raise TypeError(
            f"{name} is a {type(cache).__name__}, want a ModelCache: make one with"
            " empty_cache(config, sequences, max_length)"
        )


def _check_integers(name: str, x: Any, size: int) -> None:
    if not isinstance(x, _Array):
        raise TypeError(
            f"{name} is a {type(x).__name__}, want an int32 array [{size}]:"
            f" np.asarray({name}, np.int32)"
        )
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} is {x.dtype}, want an integer dtype: cast it to int32")


def _check_active(active: Any, rows: int, cache: str) -> Any:
    """The flags; all where there are none."""
    if active is None:
        return np.ones(rows, np.bool_)
    if not isinstance(active, _Array):
        raise TypeError(
            f"active is a {type(active).__name__}, want a bool array [{rows}]:"
            " np.asarray(active, bool)"
        )
    if active.shape != (rows,):
        raise ValueError(f"active has shape {active.shape}, {cache} has {rows} rows: want equal")
    if active.dtype != jnp.bool_:
        raise ValueError(f"active is {active.dtype}, want bool: cast it")
    return active


def _check_packed(tokens: Any, decodes: int, metadata: Any, name: str, cache: ModelCache) -> None:
    if not isinstance(metadata, ChunkMetadata):
        raise TypeError(
            f"metadata is a {type(metadata).__name__}, want a ChunkMetadata:"
            " ChunkMetadata.from_seq_lens([...])"
        )
    want = decodes + metadata.capacity.tokens
    _check_integers("tokens", tokens, want)
    if tokens.shape != (want,):
        raise ValueError(
            f"tokens has shape {tokens.shape}, want ({want},): {decodes} decode rows and"
            " metadata.capacity.tokens; pad with metadata.pad_tokens(tokens, 0)"
        )
    if cache.length.shape[0] != metadata.capacity.sequences:
        raise ValueError(
            f"{name} has {cache.length.shape[0]} rows, want {metadata.capacity.sequences}:"
            " metadata.capacity.sequences"
        )


def _used(metadata: ChunkMetadata) -> slice | None:
    """The packed rows that are tokens, where the host can see them."""
    return slice(0, metadata.num_tokens) if metadata.on_host else None


def check_max_length(metadata: ChunkMetadata, max_length: int) -> None:
    """Of `next_token_loss`: no sequence is longer, where the host can see it.

    Raises:
      ValueError: names the longest sequence's length.
    """
    longest = int(metadata.seq_lens.max(initial=0)) if metadata.on_host else 0
    if longest > max_length:
        raise ValueError(
            f"max_length is {max_length}, want at least {longest}: the longest sequence of metadata"
        )


def check_temperature(temperature: float, key: jax.Array | None) -> None:
    """Of `sample` and `generate`.

    Raises:
      ValueError, TypeError: as `sample` says.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, want 0 (greedy) or more, and finite")
    if not is_greedy(temperature) and key is None:
        raise ValueError(f"temperature is {temperature} without a key: pass key=jax.random.key(0)")
    if key is not None and not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"key is {key!r}, want a key: jax.random.key(0)")


def is_greedy(temperature: float) -> bool:
    """Whether the best token is taken."""
    return temperature < _GREEDY


def check_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, step_tokens: int
) -> None:
    """Of `generate`.

    Raises:
      ValueError, TypeError: as `generate` says.
    """
    if isinstance(prompts, str | bytes):
        raise TypeError(f"prompts is text, {prompts!r}: want token numbers; a tokenizer makes them")
    if not hasattr(prompts, "__len__") or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts is {prompts!r}, want a list of sequences of token numbers")
    if not len(prompts):
        raise ValueError("prompts is empty, want at least one")
    for name, value in (("max_new_tokens", max_new_tokens), ("step_tokens", step_tokens)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {value!r}, want an integer")
        if value < 1:
            raise ValueError(f"{name} is {value}, want at least 1")
    for i, prompt in enumerate(prompts):
        if np.ndim(prompt) != 1 or isinstance(prompt, str):
            raise TypeError(
                f"prompts[{i}] is {prompt!r}, want a sequence of token numbers; a single prompt is"
                " a list of one: [[1, 2, 3]]"
            )
        if not len(prompt):
            raise ValueError(f"prompts[{i}] is empty: give it at least one token (e.g. the BOS)")
        if not np.issubdtype(np.asarray(prompt).dtype, np.integer):
            raise TypeError(f"prompts[{i}] holds {np.asarray(prompt).dtype}, want integers")
        if min(prompt) < 0 or max(prompt) >= model.config.vocab_size:
            raise ValueError(f"prompts[{i}] holds a token outside 0..{model.config.vocab_size - 1}")
