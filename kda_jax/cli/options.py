"""argparse types that the commands share, and the options of the serving commands."""

from __future__ import annotations

import argparse
import re
from typing import Any

BACKENDS = ("auto", "fused", "chunked", "scan")
DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("recall", "prose")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Integer:
    """argparse type: an integer within bounds, named in the error."""

    def __init__(self, low: int, high: int | None = None):
        self.low, self.high = low, high

    def __call__(self, text: str) -> int:
        want = f"{self.low}..{self.high}" if self.high is not None else f"at least {self.low}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer, want {want}") from None
        if value < self.low or (self.high is not None and value > self.high):
            raise argparse.ArgumentTypeError(f"{value} is out of range, want {want}")
        return value


def seconds(text: str) -> float:
    """argparse type: a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def size_in_bytes(text: str) -> int:
    """argparse type: bytes, as 268435456, 256M or 4G."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, want e.g. 256M or 4G")
    return int(match[1]) * _UNITS[match[2].upper()]


def add_serve(commands: Any) -> None:
    """The options of `serve`."""
    run = commands.add_parser(
        "serve",
        help="serve a model over HTTP, in the form of OpenAI's completions",
        description="Serve a Kimi-Linear or Kimi-K3 model from a folder: /v1/completions,"
        " /v1/models, /reset_prefix_cache, /metrics, /health. SIGTERM ends it when all requests"
        " are finished.",
    )
    run.add_argument("model", metavar="MODEL_DIR", help="config.json and safetensors files")
    run.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    run.add_argument(
        "--port", type=Integer(0, 65535), default=8000, help="default 8000; 0: any free one"
    )
    run.add_argument("--name", help="of the model, for clients (default: the folder's)")
    for name, default, low, text in (
        ("--block-size", 256, 1, "tokens of a cache block"),
        ("--budget", 2048, 1, "tokens of one step"),
        ("--max-requests", 16, 1, "requests that run at a time"),
        ("--max-prefills", 4, 1, "prompts in one step"),
        ("--max-waiting", 256, 1, "requests that wait; one more gets 429"),
        ("--checkpoint-blocks", 1, 0, "checkpoints of one prompt, the deepest ones"),
    ):
        run.add_argument(
            name, type=Integer(low), default=default, metavar="N", help=f"{text}, default {default}"
        )
    run.add_argument(
        "--max-model-len",
        type=Integer(2),
        metavar="N",
        help="tokens of a prompt and its continuation (default: the model's, 8192 at most)",
    )
    run.add_argument(
        "--live-tokens",
        type=Integer(2),
        metavar="N",
        help="tokens of all running requests together, at least max-model-len (default:"
        " max-requests times max-model-len)",
    )
    run.add_argument(
        "--cache-bytes",
        type=size_in_bytes,
        default=256 * 2**20,
        metavar="BYTES",
        help="of the prefix cache, e.g. 4G; 0: none; default 256M",
    )
    run.add_argument(
        "--checkpoints",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="states inside prompts out of the same step (default), or by one step more",
    )
    run.add_argument(
        "--drop-draft-block",
        action="store_true",
        help="checkpoints one block earlier, as speculative decoding wants it",
    )
    run.add_argument("--dtype", choices=DTYPES, help="default: the model's")
    run.add_argument("--backend", choices=BACKENDS, default="auto", help="default auto")
    run.add_argument(
        "--warm-up",
        type=Integer(0),
        metavar="N",
        help="compile so many shapes before listening; 0: none (default: all)",
    )
    run.add_argument("--compilation-cache", metavar="DIR", help="keep compiled programs there")


def add_prefix_check(commands: Any) -> None:
    """The options of `prefix-check`."""
    check = commands.add_parser(
        "prefix-check",
        help="check a server's prefix cache, which it empties: right answers, warm and cold",
        description="Ask a server about lists of facts: A on an empty cache, B about the same list,"
        " B again on an empty cache. Exit code 1 if an answer is wrong, if the warm tokens differ"
        " from the cold ones, or if not as many tokens came from the cache as predicted. It empties"
        " the server's prefix cache (POST /reset_prefix_cache) before each question asked cold:"
        " on a server in use, the other clients' prompts are prefilled again, and their prompts"
        " disturb the count of steps.",
    )
    check.add_argument("url", metavar="URL", help="of the server, e.g. http://127.0.0.1:8000")
    check.add_argument(
        "--lengths",
        type=Integer(64),
        nargs="+",
        metavar="N",
        help="characters of the prompts (default: four that cross several of the server's blocks)",
    )
    check.add_argument("--model", help="default: the first that the server names")
    check.add_argument(
        "--block-size",
        type=Integer(1),
        metavar="N",
        help="tokens of a cache block, for a server that does not say it in /v1/models (without it"
        " such a server must read more than 0 tokens, no certain number)",
    )
    check.add_argument(
        "--drop-draft-block",
        action=argparse.BooleanOptionalAction,
        help="whether a lookup gives up one block (default: what the server says, or no)",
    )
    check.add_argument(
        "--format",
        choices=FORMATS,
        default="recall",
        help="recall: for the model in tests/data/recall; prose: for an instructed model",
    )
    check.add_argument(
        "--answers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether answers must be right; no: for a model that was not trained to answer",
    )
    check.add_argument("--seed", type=Integer(0), default=0, help="of the facts, default 0")
    check.add_argument(
        "--timeout", type=seconds, default=600, help="seconds for one request, default 600"
    )
