"""`generate`: load a model from a folder and continue prompts."""

from __future__ import annotations

import argparse
import time

import jax

from ..metadata import Capacity
from ..models import empty_cache, from_pretrained
from ..models import generate as continue_prompts
from ..models.decoder import LanguageModel
from ..models.sizes import parameter_count
from ..models.tokenizer import load_tokenizer
from ..serving.memory import bytes_text, free_bytes
from . import screen
from .backend import text as backend_text
from .backend import which
from .errors import CliError


def generate(args: argparse.Namespace) -> int:
    """Run the command; 0 when all prompts were continued."""
    out = screen.console()
    numbers = [_numbers(text) for text in args.tokens or ()]
    if not (args.prompt or numbers):  # before the model is loaded, which can take minutes
        raise CliError("nothing to continue: give --prompt TEXT or --tokens 1,2,3")
    overrides = {} if args.dtype is None else {"dtype": args.dtype}
    model = from_pretrained(args.model, quiet=True, **overrides)
    config = model.config
    out.print(
        f"model    {type(model).__name__}: {config.num_hidden_layers} layers,"
        f" {parameter_count(model):,} parameters, {config.dtype}"
    )
    asked = args.backend or config.backend
    out.print(f"backend  {backend_text(asked, which(config.kda, asked))}")
    prompts, tokenizer = [], None
    if args.prompt:
        try:
            tokenizer = load_tokenizer(args.model, config.vocab_size)
        except ValueError as error:
            raise CliError(f"--prompt: {error} (--tokens)") from None
        prompts = [tokenizer.encode(text) for text in args.prompt]
    prompts += numbers
    _check_memory(model, prompts, args.max_new_tokens)
    begin = time.perf_counter()
    continued = continue_prompts(
        model,
        prompts,
        args.max_new_tokens,
        temperature=args.temperature,
        key=jax.random.key(args.seed),
        backend=args.backend,
    )
    seconds = time.perf_counter() - begin
    for i, new in enumerate(continued):
        text = i < len(args.prompt or ())
        shown = tokenizer.decode(new) if tokenizer and text else ",".join(map(str, new))
        out.print(f"prompt {i}  {len(prompts[i])} tokens, {len(new)} new", highlight=False)
        out.print(shown, markup=False, highlight=False)
    total = sum(map(len, continued))
    out.print(f"{total} tokens in {seconds:.1f} s, compilation included")
    return 0


def _check_memory(model: LanguageModel, prompts: list[list[int]], new: int) -> None:
    """Refuses a cache that is larger than what is free, before it is made."""
    free = free_bytes(next(iter(jax.tree.leaves(model)[0].devices())))
    longest = max(map(len, prompts))

    def cache_bytes(count: int) -> int:
        room = Capacity.bucket(longest + count, len(prompts))  # as generate() makes it
        shapes = jax.eval_shape(lambda: empty_cache(model.config, room.sequences, room.tokens))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    if free is None or cache_bytes(new) <= free:
        return
    fits = new
    while fits and cache_bytes(fits) > free:
        fits //= 2
    raise CliError(
        f"--max-new-tokens {new}: the cache of {len(prompts)} prompt(s) would take"
        f" {bytes_text(cache_bytes(new))}, but {jax.default_backend()} has {bytes_text(free)} free;"
        + (
            f" {fits} would fit"
            if fits
            else " not even the prompts fit: give fewer, or shorter ones"
        )
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise CliError(f"--tokens {text!r}: want token numbers with commas, e.g. 1,2,3") from None
