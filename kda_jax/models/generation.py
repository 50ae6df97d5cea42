"""Prefill, decode and mixed steps under jit, sampling, and generation for a batch of prompts.

All are functions of (model, inputs, cache) -> (outputs, cache); the model is a pytree of weights.
Lengths are dynamic: one trace per bucket of `ChunkMetadata.capacity`, and one per number of decode
rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..metadata import Capacity, ChunkMetadata
from .batch import Batch
from .cache import ModelCache, empty_cache
from .decoder import LanguageModel, Outputs, forward

_OPTIONS = ("backend", "all_logits", "hidden_states")


@functools.partial(jax.jit, static_argnames=_OPTIONS)
def prefill(
    model: LanguageModel,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    cache: ModelCache,
    *,
    backend: str | None = None,
    all_logits: bool = False,
    hidden_states: bool = False,
) -> tuple[Outputs, ModelCache]:
    """Runs packed prompts, or the next part of them.

    Args:
      model: the weights.
      tokens: int32 [T], T = metadata.capacity.tokens.
      metadata: where the sequences lie, and their checkpoints; built on the host.
      cache: N = metadata.capacity.sequences rows. A row of length 0 starts afresh, whatever its
        states hold; the others go on. It must have room for the new tokens: those past the end of
        an MLA cache are lost, which only the caller can see.
      backend: of the operator; None is the config's.
      all_logits: of every row, instead of the last of each sequence.
      hidden_states: return the streams between the layers too.

    Returns:
      `Outputs` and the cache after the step; see there for the shapes.

    Raises:
      ValueError: tokens or cache does not fit the metadata. TypeError: tokens is no array.
      NotImplementedError: the backend cannot run this call.
    """
    _check(tokens, 0, metadata, cache)
    batch = Batch(metadata=metadata, start=cache.length)
    out, after, _ = forward(
        model,
        tokens,
        batch,
        cache,
        None,
        backend=backend,
        all_logits=all_logits,
        hidden_states=hidden_states,
    )
    assert after is not None
    return out, after


@functools.partial(jax.jit, donate_argnames=("cache",))
def decode_step(
    model: LanguageModel,
    tokens: jax.Array,
    cache: ModelCache,
    active: jax.Array | None = None,
) -> tuple[Outputs, ModelCache]:
    """One token of each request; the cache is donated: use the one that comes back.

    Args:
      model: the weights.
      tokens: int32 [D].
      cache: D rows, each with room for one more token: one past the end of an MLA cache is lost,
        which only the caller can see. A row of length 0 starts afresh.
      active: bool [D]; a False row has zeros for logits, and its past stays. None: all.

    Returns:
      `Outputs` (logits [D, V]) and the cache.

    Raises:
      ValueError: tokens, cache and active have different numbers of rows.
    """
    rows = cache.length.shape[0]
    active = jnp.ones((rows,), jnp.bool_) if active is None else active
    for name, array in (("tokens", tokens), ("active", active)):
        if array.shape != (rows,):
            raise ValueError(f"{name} has shape {array.shape}, cache has {rows} rows: want equal")
    batch = Batch(active=active, decode_start=cache.length)
    out, _, after = forward(model, tokens, batch, None, cache)
    assert after is not None
    return out, after


@functools.partial(
    jax.jit, static_argnames=("backend",), donate_argnames=("decode_cache", "prefill_cache")
)
def mixed_step(
    model: LanguageModel,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    decode_cache: ModelCache,
    prefill_cache: ModelCache,
    active: jax.Array | None = None,
    *,
    backend: str | None = None,
) -> tuple[Outputs, ModelCache, ModelCache]:
    """A decode batch and a prefill batch in one step, decodes first; both caches are donated.

    All projections and MLPs run over both at once; only the decode rows go to the recurrent step
    and only the prefill rows to the chunk kernel.

    Args:
      model: the weights.
      tokens: int32 [D + T], the decode tokens first.
      metadata: of the last T rows, from 0 (the prefill alone).
      decode_cache: D rows. prefill_cache: N rows.
      active: bool [D]; None: all.
      backend: of the operator; None is the config's.

    Returns:
      `Outputs` (logits [D + N, V]) and both caches.

    Raises:
      ValueError: the numbers of rows do not fit.
      NotImplementedError: the backend cannot run this call.
    """
    rows = decode_cache.length.shape[0]
    active = jnp.ones((rows,), jnp.bool_) if active is None else active
    if active.shape != (rows,):
        raise ValueError(f"active has shape {active.shape}, decode_cache has {rows} rows")
    _check(tokens, rows, metadata, prefill_cache)
    batch = Batch(metadata, prefill_cache.length, active, decode_cache.length)
    out, prefilled, decoded = forward(
        model, tokens, batch, prefill_cache, decode_cache, backend=backend
    )
    assert prefilled is not None and decoded is not None
    return out, decoded, prefilled


def sample(logits: jax.Array, temperature: float, key: jax.Array | None = None) -> jax.Array:
    """int32 [R] from logits [R, V]: the best for temperature 0, else from softmax(logits / t).

    Raises:
      ValueError: the temperature is negative or not finite, or there is one and no key.
      TypeError: the key is no array.
    """
    _check_temperature(temperature, key)
    if temperature < _GREEDY:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert key is not None
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)


_GREEDY = 1e-6  # logits over less than this overflow, and the best one wins anyway


def _check_temperature(temperature: float, key: jax.Array | None) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, want 0 (greedy) or more, and finite")
    if temperature >= _GREEDY and key is None:
        raise ValueError(f"temperature is {temperature} without a key: pass key=jax.random.key(0)")
    if key is not None and not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"key is {key!r}, want a key: jax.random.key(0)")


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    key: jax.Array | None = None,
    eos: Sequence[int] | None = None,
    backend: str | None = None,
    step_tokens: int = 8192,
) -> list[list[int]]:
    """Continues a batch of prompts of any lengths.

    Steps are compiled once per bucket (`Capacity.bucket`): of prompt tokens in a prefill, of
    prompts, and of the longest prompt with its new tokens. Other lengths are no new program.

    Args:
      model: the weights.
      prompts: token numbers, at least one each.
      max_new_tokens: for each prompt, at least 1.
      temperature: 0 is greedy. key: for sampling.
      eos: tokens that end a continuation (they are its last token); None is the config's.
      backend: of the operator; None is the config's.
      step_tokens: at most this many prompt tokens in one prefill; longer batches take several.

    Returns:
      The new tokens of each prompt.

    Raises:
      ValueError: a prompt is empty or holds a token outside the vocabulary; or a wrong option.
      TypeError: a prompt is no sequence of integers, or the key no key.
    """
    _check_prompts(model, prompts, max_new_tokens, step_tokens)
    max_new_tokens, step_tokens = int(max_new_tokens), int(step_tokens)
    _check_temperature(temperature, key)
    ends = np.asarray(model.config.eos_token_id if eos is None else eos, np.int32)
    longest = max(map(len, prompts)) + max_new_tokens
    # The cache's shape is part of every step's program, so its length is a bucket, too. That takes
    # memory, at most half as much again, and no time: attention reads the rows that count.
    room = Capacity.bucket(longest, len(prompts))
    cache = empty_cache(model.config, room.sequences, room.tokens)
    logits, cache = _prefill_all(model, prompts, cache, step_tokens, backend)
    new: list[list[int]] = [[] for _ in prompts]
    active = np.arange(room.sequences) < len(prompts)
    for step in range(max_new_tokens):
        step_key = None if key is None else jax.random.fold_in(key, step)
        tokens = sample(logits, temperature, step_key)
        host = np.asarray(tokens)
        for row in np.flatnonzero(active):
            new[row].append(int(host[row]))
        active &= ~np.isin(host, ends)
        if step + 1 == max_new_tokens or not active.any():
            break
        out, cache = decode_step(model, tokens, cache, jnp.asarray(active))
        logits = out.logits
    return new


def _prefill_all(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    cache: ModelCache,
    step_tokens: int,
    backend: str | None,
) -> tuple[jax.Array, ModelCache]:
    """The logits after each prompt, [rows, V], in as many steps as step_tokens asks for."""
    # To jit, an option that is left out is another call than one that is given as None.
    options = {} if backend is None else {"backend": backend}
    done, total = np.zeros(len(prompts), int), np.array([len(p) for p in prompts])
    logits = jnp.zeros((cache.length.shape[0], model.config.vocab_size), jnp.float32)
    while (done < total).any():
        room, lengths = step_tokens, np.zeros(len(prompts), int)
        for i in range(len(prompts)):
            lengths[i] = min(room, total[i] - done[i])
            room -= lengths[i]
        parts = [p[d : d + n] for p, d, n in zip(prompts, done, lengths, strict=True)]
        metadata = ChunkMetadata.from_seq_lens(lengths, capacity="bucket")
        packed = np.concatenate([np.asarray(p, np.int32) for p in parts])
        tokens = metadata.pad_tokens(packed, 0)
        out, cache = prefill(model, tokens, metadata, cache, **options)
        here = jnp.asarray(np.pad(lengths > 0, (0, logits.shape[0] - len(prompts))))
        logits = jnp.where(here[:, None], out.logits, logits)
        done += lengths
    return logits, cache


def _check(tokens: jax.Array, decodes: int, metadata: ChunkMetadata, cache: ModelCache) -> None:
    want = decodes + metadata.capacity.tokens
    if not hasattr(tokens, "shape"):
        raise TypeError(f"tokens is a {type(tokens).__name__}, want an int32 array [{want}]")
    if tokens.shape != (want,):
        raise ValueError(
            f"tokens has shape {tokens.shape}, want ({want},): {decodes} decode rows and"
            " metadata.capacity.tokens; pad with metadata.pad_tokens(tokens, 0)"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens is {tokens.dtype}, want an integer dtype")
    if cache.length.shape[0] != metadata.capacity.sequences:
        raise ValueError(
            f"cache has {cache.length.shape[0]} rows, want {metadata.capacity.sequences}:"
            " metadata.capacity.sequences"
        )


def _check_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, step_tokens: int
) -> None:
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
