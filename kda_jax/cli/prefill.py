"""`prefill`: text files as one packed batch through one KDA layer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import numpy as np
from rich.console import Console

from ..layer import KDALayerConfig
from ..metadata import ChunkMetadata
from ..types import KDAResult
from . import documents as docs
from . import screen, states_file
from .backend import text, which
from .errors import check_output
from .measure import median_seconds, relative_error
from .model import Model


def prefill(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batch = [docs.read(path) for path in args.files]
    check_output("--save", args.save, args.files)
    check_output("--plot", args.plot, [*args.files, *filter(None, [args.save])])
    if args.plot:
        # matplotlib only where it is used; missing, it is said before the work
        from .plot import plot
    tokens, metadata = docs.pack(batch, args.checkpoint_every)
    config = KDALayerConfig(
        hidden=args.hidden,
        heads=args.heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        backend=args.backend,
    )
    support = which(config, args.backend, checkpoints=metadata.num_checkpoints > 0)

    out = screen.console()
    with screen.progress() as progress:
        task = progress.add_task("compile and run", total=3)
        model = Model(config, args.seed)
        # Copied once, explicitly: the timed calls then move nothing between host and device.
        tokens, on_device = jax.device_put((tokens, metadata))
        states = jax.block_until_ready(model.prefill(tokens, on_device, backend=args.backend))[1]
        progress.update(task, advance=1, description="measure")
        seconds = median_seconds(lambda: model.prefill(tokens, on_device, backend=args.backend))
        progress.update(task, advance=1, description="compare with scan")
        inputs = model.op_inputs(tokens, on_device)
        result = model.operator(inputs, on_device, backend=args.backend)
        # The states are those of the layer's run; its `out` does not leave the layer.
        result = KDAResult(result.out, states.final.recurrent, states.checkpoint.recurrent)
        rows = _errors(metadata, result, model.reference(inputs, metadata))
        progress.update(task, advance=1)

    _print_documents(out, batch, metadata, rows)
    rate = metadata.num_tokens / seconds
    out.print(
        f"speed    {rate:,.0f} tokens/s ({metadata.num_tokens:,} tokens in"
        f" {seconds * 1e3:.1f} ms, warm median, {jax.default_backend()})"
    )
    out.print(
        f"layer    hidden {config.hidden}, {config.heads} heads x {config.head_dim},"
        f" {config.dtype}, seed {args.seed}"
    )
    out.print(f"backend  {text(args.backend, support)}")
    if args.save:
        states_file.save(args.save, model, batch, metadata, states, args.backend)
        out.print(f"saved    {args.save}", soft_wrap=True)
    if args.plot:
        plot(args.plot, model, batch)
        out.print(f"plot     {args.plot}", soft_wrap=True)
    return 0


def _errors(
    metadata: ChunkMetadata, result: KDAResult, reference: KDAResult
) -> list[tuple[float, float, float]]:
    """Per document: error of out, of the final state, of all its checkpoints."""
    got = jax.device_get(result)
    bounds, owner = metadata.cu_seqlens, np.asarray(metadata.checkpoints)[:, 0]
    rows = []
    for i in range(metadata.num_sequences):
        tokens, inside = slice(bounds[i], bounds[i + 1]), owner == i
        rows.append(
            (
                relative_error(got.out[0, tokens], reference.out[0, tokens]),
                relative_error(got.final_state[i], reference.final_state[i]),
                relative_error(got.checkpoint_state[inside], reference.checkpoint_state[inside]),
            )
        )
    return rows


def _print_documents(
    out: Console,
    batch: Sequence[docs.Document],
    metadata: ChunkMetadata,
    errors: Sequence[tuple[float, float, float]],
) -> None:
    table = screen.table(
        "Relative error of out and states against scan in float64",
        "document",
        "tokens",
        "chunks",
        "ckpts",
        "out",
        "final",
        "ckpt",
    )
    chunks = np.diff(metadata.chunk_offsets)
    for i, document in enumerate(batch):
        inside = len(metadata.checkpoint_offsets[i])
        values = [screen.error_text(e) for e in errors[i]]
        table.add_row(
            screen.fit(document.name),
            f"{len(document.data):,}",
            f"{chunks[i]:,}",
            f"{inside:,}",
            *values[:2],
            values[2] if inside else "-",
        )
    out.print(table)
