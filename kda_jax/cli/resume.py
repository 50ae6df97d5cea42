"""`resume`: continue a document from a saved checkpoint, and check it against one run."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

from ..layer import KDACache, KDAState
from . import documents as docs
from . import screen, states_file
from .backend import which
from .errors import CliError
from .measure import relative_error
from .model import Model
from .states_file import Saved

# Limits on the relative error of (out, recurrent state) between two float32 or two half-precision
# runs of the same prefix that were cut at different tokens.
_LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 5e-3), "float16": (2e-2, 5e-3)}


def resume(args: argparse.Namespace) -> int:
    """Run the command: 0 if the resumed run equals the one-shot run, 1 if not."""
    saved = states_file.load(args.states)
    document = docs.read(args.file)
    index = _find(saved, args.document, args.file)
    if document.sha256 != saved.sha256[index]:
        raise CliError(
            f"{args.file}: differs from what was prefilled as {saved.names[index]!r}"
            " (sha256), pass the same file or run prefill again"
        )
    offset = _offset(saved, index, args.checkpoint)
    backend = args.backend or saved.config.backend
    # A resumed step carries no checkpoints of its own.
    support = which(saved.config, backend, checkpoints=False)

    out = screen.console()
    with screen.progress() as progress:
        task = progress.add_task("one-shot run", total=2)
        model = Model(saved.config, saved.seed)
        if model.fingerprint() != saved.weights_sha256:
            raise CliError(
                f"{args.states}: seed {saved.seed} gives other weights here than with"
                f" {saved.made_with}, run prefill again with the versions installed now"
            )
        tokens, metadata = docs.pack([document])
        y, states = model.prefill(tokens, metadata, backend=backend)
        progress.update(task, advance=1, description="resumed run")
        rest = docs.Document(document.name, document.data[offset:])
        tokens, metadata = docs.pack([rest])
        cache = KDACache(
            KDAState(*(metadata.pad_states(x) for x in saved.checkpoint(index, offset)))
        )
        y_rest, states_rest = model.prefill(tokens, metadata, cache, backend=backend)
        progress.update(task, advance=1)

    total, left = len(document.data), len(rest.data)
    y, states, y_rest, states_rest = jax.device_get((y, states, y_rest, states_rest))
    final = saved.final(index)
    limit_out, limit_state = _LIMITS[saved.config.dtype]
    end, one_shot = states_rest.final, states.final
    checks = [
        (f"out, tokens {offset:,}..{total - 1:,}", y_rest[:left], y[offset:total], limit_out),
        ("final state", end.recurrent[:1], one_shot.recurrent[:1], limit_state),
        ("final conv state", end.conv[:1], one_shot.conv[:1], limit_out),
        ("final state, as saved", end.recurrent[:1], final.recurrent, limit_state),
        ("final conv state, as saved", end.conv[:1], final.conv, limit_out),
    ]
    table = screen.table(
        f"Resumed at token {offset:,} of {total:,} against one run",
        "result",
        "error",
        "limit",
        "equal",
    )
    good = True
    for name, value, reference, limit in checks:
        error = relative_error(value, reference)
        equal = error <= limit  # false for NaN
        good = good and equal
        table.add_row(name, screen.error_text(error), f"{limit:.0e}", "yes" if equal else "NO")
    out.print(table)
    out.print(f"document  {saved.names[index]}", soft_wrap=True)
    out.print(f"backend   {support.backend}: {support.reason}")
    skipped = f"{offset * 100 // total}% of the prefill skipped"
    out.print(
        f"the resumed run equals the one-shot run; {skipped}"
        if good
        else "the resumed run DIFFERS from the one-shot run: the states file does not belong to"
        " this document, or a backend is wrong here (see `python -m kda_jax doctor`)"
    )
    return 0 if good else 1


def _find(saved: Saved, wanted: str | None, path: str) -> int:
    """Which saved document FILE is: by exact name, by index, or by a base name that is unique."""
    names = saved.names
    key = path if wanted is None else wanted
    exact = [i for i, name in enumerate(names) if name == key]
    base = [i for i, name in enumerate(names) if Path(name).name == Path(key).name]
    if len(exact) == 1:
        return exact[0]
    if not exact and wanted is not None and wanted.isdecimal() and int(wanted) < len(names):
        return int(wanted)
    if not exact and len(base) == 1:
        return base[0]
    several = exact or base
    have = ", ".join(f"{i} = {names[i]}" for i in several or range(len(names)))
    problem = "is more than one document" if several else "is not a document"
    raise CliError(f"{key!r} {problem} of {saved.path}, pass --document with one of: {have}")


def _offset(saved: Saved, index: int, wanted: int | None) -> int:
    """The checkpoint's offset, by default the last."""
    have = saved.offsets(index)
    name, length = saved.names[index], int(saved.seq_lens[index])
    if not have:
        raise CliError(
            f"{name!r} ({length} tokens) has no checkpoints in {saved.path},"
            " run prefill again with a smaller --checkpoint-every"
        )
    if wanted is None:
        return have[-1]
    if wanted not in have:
        some = ", ".join(map(str, have)) if len(have) <= 12 else _ends(have)
        raise CliError(f"{name!r} has no checkpoint at {wanted}, available: {some}")
    return wanted


def _ends(offsets: list[int]) -> str:
    head = ", ".join(map(str, offsets[:6]))
    return f"{head}, ..., {offsets[-1]} ({len(offsets)} in all)"
