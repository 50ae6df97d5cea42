"""Arguments, and how errors reach the user: one line on stderr, exit code 2, no traceback.

Commands are imported when they run, so `--help` is quick and `doctor` works where a package that
only the others need is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .errors import CliError
from .options import BACKENDS, DTYPES, Integer, add_prefix_check, add_serve

# Which extra brings a package that a command needs.
_EXTRAS = {"matplotlib": "plot"} | dict.fromkeys(
    ("starlette", "uvicorn", "prometheus_client", "httpx"), "serve"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: an error; 1: a check found one)."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse exits; a caller of main() gets a number instead
        return stop.code if isinstance(stop.code, int) else 0
    try:
        code = _command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to tell, and nothing left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ImportError as error:
        missing = (error.name or str(error)).split(".")[0]
        extra = f"'kda-jax[{_EXTRAS[missing]}]'" if missing in _EXTRAS else missing
        message = f"the package {missing!r} does not load ({error}): pip install {extra}"
    except CliError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror or error}" if error.filename else str(error)
    except (ValueError, NotImplementedError, RuntimeError, MemoryError) as error:
        # The library's own messages say what to do; XLA's errors are RuntimeErrors.
        message = str(error) or type(error).__name__
    print(f"{parser.prog} {args.command}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _command(args: argparse.Namespace) -> int:
    if args.command == "doctor":
        from .doctor import doctor

        return doctor(as_json=args.json)
    if args.command == "prefix-check":  # a client: it needs no device
        from .prefix_check import prefix_check

        return prefix_check(args)
    from .devices import device_problem

    if problem := device_problem():
        raise CliError(f"{problem} (see `python -m kda_jax doctor`)")
    if args.command == "verify":
        from .verify import verify

        return verify(args)
    if args.command == "prefill":
        from .prefill import prefill

        return prefill(args)
    if args.command == "generate":
        from .generate import generate

        return generate(args)
    if args.command == "serve":
        from .serve import serve

        return serve(args)
    from .resume import resume

    return resume(args)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m kda_jax",
        description="Kimi Delta Attention in JAX: prefill text files and resume them, run a model,"
        " check this machine and a server.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "prefill",
        help="prefill text files as one packed batch",
        description="Prefill text files as one packed batch: bytes -> seeded embedding -> one"
        " KDA layer in Kimi-K3's form. The results are compared with `scan` in float64.",
    )
    run.add_argument("files", nargs="+", metavar="FILE", help="text file; one document each")
    run.add_argument(
        "--checkpoint-every",
        type=Integer(0),
        default=256,
        metavar="TOKENS",
        help="export the state at each multiple inside a document; 0: none (default 256)",
    )
    run.add_argument("--save", metavar="PATH", help="write all states to a safetensors file")
    run.add_argument("--plot", metavar="PNG", help="plot error and time per backend over length")
    run.add_argument("--heads", type=Integer(1), default=4, help="default 4 (Kimi-K3: 96)")
    run.add_argument("--head-dim", type=Integer(1, 256), default=128, help="1..256, default 128")
    run.add_argument("--hidden", type=Integer(1), default=256, help="default 256 (Kimi-K3: 7168)")
    run.add_argument("--seed", type=Integer(0, 2**32 - 1), default=0, help="weights, default 0")
    run.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    run.add_argument("--backend", choices=BACKENDS, default="auto", help="default auto")

    again = commands.add_parser(
        "resume",
        help="continue a document from a saved checkpoint",
        description="Continue a document from a saved checkpoint and compare with a run in one"
        " piece; exit code 1 if they differ.",
    )
    again.add_argument("file", metavar="FILE", help="the document, as it was prefilled")
    again.add_argument("--states", required=True, metavar="PATH", help="from prefill --save")
    again.add_argument(
        "--document",
        metavar="NAME|INDEX",
        help="which document of the saved batch FILE is (default: the one with FILE's name)",
    )
    again.add_argument(
        "--checkpoint", type=Integer(1), metavar="OFFSET", help="token offset (default: the last)"
    )
    again.add_argument("--backend", choices=BACKENDS, help="default: what prefill was asked for")

    write = commands.add_parser(
        "generate",
        help="continue prompts with a model from a folder",
        description="Continue prompts with a Kimi-Linear or Kimi-K3 model from a folder with"
        " config.json and safetensors files. Several prompts run as one batch.",
    )
    write.add_argument(
        "--model", required=True, metavar="DIR", help="folder with config.json and safetensors"
    )
    write.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be given more than once"
    )
    write.add_argument(
        "--tokens", action="append", metavar="1,2,3", help="a prompt as token numbers"
    )
    write.add_argument(
        "--max-new-tokens", type=Integer(1), default=64, metavar="N", help="default 64"
    )
    write.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy"
    )
    write.add_argument(
        "--seed",
        type=Integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of the sampling, default 0",
    )
    write.add_argument("--dtype", choices=DTYPES, help="default: the model's")
    write.add_argument("--backend", choices=BACKENDS, default="auto", help="default auto")

    add_serve(commands)
    add_prefix_check(commands)

    check = commands.add_parser(
        "verify",
        help="check results, exactness and hazards on every device here",
        description="Run every check on every device that jax sees, against a float64 reference on"
        " the CPU; exit code 1 if a backend gets wrong what it claims to support. Takes a minute or"
        " two.",
    )
    check.add_argument("--report", metavar="FILE", help="write all results to a JSON file")
    check.add_argument(
        "--platform", choices=("cpu", "cuda", "rocm"), help="its devices only (default: all)"
    )

    check.add_argument(
        "--backend",
        action="append",
        choices=BACKENDS[1:],
        help="this one only; may be given more than once (default: all three)",
    )

    look = commands.add_parser(
        "doctor",
        help="say what works on this machine and why the rest does not",
        description="Versions, plugins, FFI API, devices, and which backends work here. The exit"
        " code is 0, whatever is missing.",
    )
    look.add_argument("--json", action="store_true", help="the same as one JSON object")
    return parser
