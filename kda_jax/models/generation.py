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
from .arguments import (
    check_decode,
    check_mixed,
    check_prefill,
    check_prompts,
    check_temperature,
    checked,
    is_greedy,
)
from .batch import Batch
from .cache import ModelCache, empty_cache
from .decoder import LanguageModel, Outputs, forward

_OPTIONS = ("backend", "all_logits", "hidden_states")


@checked(check_prefill)
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
      tokens: int32 [T], T = metadata.capacity.tokens. One outside the vocabulary is an error if it
        is in a NumPy array; else the logits of its sequence are NaN, in this step and later ones.
      metadata: where the sequences lie, and their checkpoints; built on the host.
      cache: N = metadata.capacity.sequences rows. A row of length 0 starts afresh, whatever its
        states hold; the others go on. It must have room for the new tokens: those past the end of
        an MLA cache are lost, and the logits of such tokens, in this step and later ones, are NaN.
        It is an error if the host can see it: a sequence longer than the room, or cache.length in a
        NumPy array. (Nothing is read back from a device for this.)
      backend: of the operator; None is the config's.
      all_logits: of every row, instead of the last of each sequence.
      hidden_states: return the streams between the layers too.

    Returns:
      `Outputs` and the cache after the step; see there for the shapes.

    Raises:
      ValueError: tokens or cache does not fit the metadata; tokens on the host are outside the
        vocabulary; a sequence has no room in the cache, as far as the host can see.
      TypeError: tokens is no array, metadata no `ChunkMetadata`, cache no `ModelCache`.
      NotImplementedError: the backend cannot run this call.
    """
    check_prefill(model, tokens, metadata, cache)
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


@checked(check_decode)
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
      tokens: int32 [D]. One outside the vocabulary is an error if it is in a NumPy array (and
        active too, or None); else the logits of its row are NaN, in this step and later ones.
      cache: D rows, each with room for one more token: one past the end of an MLA cache is lost,
        and the logits of its row are NaN, in this step and later ones; an error if cache.length is
        a NumPy array. (Nothing is read back from a device for this.) A row of length 0 starts
        afresh.
      active: bool [D]; a False row has zeros for logits, and its past stays. None: all.

    Returns:
      `Outputs` (logits [D, V]) and the cache.

    Raises:
      ValueError: tokens, cache and active have different numbers of rows or other dtypes; a token
        on the host is outside the vocabulary, or a row there is full.
      TypeError: tokens or active is no array, or cache no `ModelCache`.
    """
    check_decode(model, tokens, cache, active)
    active = jnp.ones(cache.length.shape, jnp.bool_) if active is None else active
    batch = Batch(active=active, decode_start=cache.length)
    out, _, after = forward(model, tokens, batch, None, cache)
    assert after is not None
    return out, after


@checked(check_mixed)
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
      tokens: int32 [D + T], the decode tokens first. Those outside the vocabulary, and those past
        the end of a cache: as in `prefill` and `decode_step`.
      metadata: of the last T rows, from 0 (the prefill alone).
      decode_cache: D rows. prefill_cache: N rows.
      active: bool [D]; None: all.
      backend: of the operator; None is the config's.

    Returns:
      `Outputs` (logits [D + N, V]) and both caches.

    Raises:
      ValueError, TypeError: as `prefill` and `decode_step`.
      NotImplementedError: the backend cannot run this call.
    """
    check_mixed(model, tokens, metadata, decode_cache, prefill_cache, active)
    active = jnp.ones(decode_cache.length.shape, jnp.bool_) if active is None else active
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
    check_temperature(temperature, key)
    if is_greedy(temperature):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert key is not None
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)


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
    check_prompts(model, prompts, max_new_tokens, step_tokens)
    max_new_tokens, step_tokens = int(max_new_tokens), int(step_tokens)
    check_temperature(temperature, key)
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
