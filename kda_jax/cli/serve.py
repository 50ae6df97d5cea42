"""`serve`: a model from a folder behind OpenAI's completions API."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from ..models import from_pretrained
from ..models.sizes import parameter_count
from ..models.tokenizer import load_tokenizer
from ..serving import EngineConfig, build_engine, warm
from ..serving.http import Server, Service
from ..serving.memory import bytes_text
from . import screen
from .backend import text as backend_text
from .backend import which
from .errors import CliError

_BYTES_OF_A_TOKEN = 64  # of a request body, at most: a token number with its comma is far less


def serve(args: argparse.Namespace) -> int:
    """Run the command; 0 when a signal has ended it and all requests were finished."""
    with _bind(args.host, args.port) as bound:  # before the minutes that all else may take
        return _serve(args, bound)


def _serve(args: argparse.Namespace, bound: socket.socket) -> int:
    out = screen.console()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if args.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", args.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    overrides = {"backend": args.backend}
    if args.dtype is not None:
        overrides["dtype"] = args.dtype
    begin = time.perf_counter()
    model = from_pretrained(args.model, **overrides)
    seconds = time.perf_counter() - begin
    config = model.config
    out.print(
        f"model    {type(model).__name__}: {config.num_hidden_layers} layers,"
        f" {parameter_count(model):,} parameters, {config.dtype}, in {seconds:.1f} s"
    )
    try:
        tokenizer = load_tokenizer(args.model, config.vocab_size)
    except ValueError as error:
        tokenizer = None
        out.print(f"prompts  token numbers only: {error}")
    own = config.max_position_embeddings
    longest = args.max_model_len or min(own, 8192)
    if longest > own:
        out.print(
            f"warning  --max-model-len {longest} is more than the model's own maximum, {own}: what"
            " it answers beyond that may make no sense"
        )
    with _named_as_options():
        engine_config = EngineConfig(
            max_model_len=longest,
            block_size=args.block_size,
            budget=args.budget,
            max_requests=args.max_requests,
            max_prefills=args.max_prefills,
            max_waiting=args.max_waiting,
            cache_bytes=args.cache_bytes,
            checkpoints=args.checkpoints,
            checkpoint_blocks=args.checkpoint_blocks,
            drop_draft_block=args.drop_draft_block,
            live_tokens=args.live_tokens,
        )
        engine, runner = build_engine(model, engine_config)
    sizes = engine.sizes
    reason = sizes.spec.reason
    if not (args.checkpoints and args.cache_bytes):
        reason = "--cache-bytes 0" if args.checkpoints else "--no-checkpoints"
    state = "on" if sizes.rule.enabled else f"off: {reason}"
    out.print(f"backend  {backend_text(args.backend, which(config.kda, args.backend))}")
    out.print(f"cache    {sizes.cache_bytes:,} bytes, blocks of {args.block_size} tokens;")
    out.print(f"         checkpoints inside prompts are {state}")
    if args.warm_up != 0:
        out.print("warm-up  compiling the steps' shapes (--warm-up 0: none before listening)")
        with _room_for_steps(sizes.total_bytes):
            out.print(f"warm-up  {warm(runner, limit=args.warm_up)}")
    name = args.name or Path(args.model).resolve().name
    service = Service(engine, name, tokenizer, max_body=4096 + _BYTES_OF_A_TOKEN * longest)
    with engine:
        Server(service, args.host, args.port).run(sockets=[bound])
    out.print("ended    all requests are finished" if not engine.problem else engine.problem)
    return 0 if engine.state == "closed" else 1


@contextlib.contextmanager
def _named_as_options() -> Iterator[None]:
    """The library names its arguments, cache_bytes; who typed --cache-bytes wants that."""
    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    # The one without an underscore that is no word of a sentence, too.
    names = "|".join(name for name in fields if "_" in name or name == "budget")
    try:
        yield
    except (ValueError, MemoryError) as error:
        shown = re.sub(rf"\b({names})\b", lambda m: "--" + m[0].replace("_", "-"), str(error))
        raise CliError(shown) from None


@contextlib.contextmanager
def _room_for_steps(pools: int) -> Iterator[None]:
    """What a step takes beside the pools is known only when the device refuses it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CliError(
            f"a step does not fit the device beside the model and pools of {bytes_text(pools)}:"
            " lower --budget, --cache-bytes, --max-requests or --max-model-len"
            f" ({str(error).splitlines()[0]})"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    """The address, taken; nobody is answered before the server listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        why = error.strerror or str(error)
        raise CliError(
            f"--host {host} --port {port}: {why}; give another (--port 0 takes any free one)"
        ) from None
    return found
