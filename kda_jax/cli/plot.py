"""A picture of the operator on the documents' text: error and time per backend over length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..backends import supports
from ..metadata import ChunkMetadata
from . import documents as docs
from . import screen
from .errors import CliError
from .measure import median_seconds, relative_error
from .model import Model

BACKENDS = ("fused", "chunked", "scan")
LENGTHS = (64, 512, 4096)  # each costs one compile per backend, seconds for chunked
_COLORS = {"fused": "#d1495b", "chunked": "#00798c", "scan": "#6b6b6b"}
_MARKERS = {"fused": "o", "chunked": "s", "scan": "^"}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One backend: relative error of out and median seconds of a warm call, one per length."""

    backend: str
    errors: list[float]
    seconds: list[float]


def plot(path: str, model: Model, batch: Sequence[docs.Document]) -> None:
    """Measure and draw; the text is repeated where it is shorter than a length."""
    curves = measure(model, b"".join(document.data for document in batch))
    # A figure without pyplot draws with Agg and touches no display and no global state.
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    config = model.config
    for curve in curves:
        style = {
            "label": curve.backend,
            "color": _COLORS[curve.backend],
            "marker": _MARKERS[curve.backend],
        }
        left.plot(LENGTHS, curve.errors, **style)
        right.plot(LENGTHS, [s * 1e3 for s in curve.seconds], **style)
    _dress(left, "Error of out", "relative error against scan in float64")
    _dress(right, "Time of a warm call", "milliseconds (median)")
    figure.suptitle(
        f"KDA prefill of one sequence of text: {config.heads} heads x {config.head_dim},"
        f" {config.dtype}, on {jax.devices()[0].device_kind}"
    )
    figure.savefig(path, format="png", dpi=130)


def measure(model: Model, text: bytes) -> list[Curve]:
    """Every backend that works here, at every length, on the layer's own q, k, v and gates."""
    if not text:
        raise CliError("--plot needs text: all documents are empty")
    config = model.config
    heads, dim = config.heads, config.head_dim
    names = [n for n in BACKENDS if supports(n, dtype=config.dtype, K=dim, V=dim, H=heads)]
    curves = [Curve(name, [], []) for name in names]
    longest = max(LENGTHS)
    tokens = np.frombuffer((text * (longest // len(text) + 1))[:longest], np.uint8)
    with screen.progress() as progress:
        task = progress.add_task("plot", total=1 + len(LENGTHS) * len(names))
        # Everything is causal: a shorter run's inputs and outputs are the first rows of these.
        metadata = ChunkMetadata.from_seq_lens([longest], chunk_size=docs.CHUNK_SIZE)
        everything = model.op_inputs(tokens.astype(np.int32), metadata)
        reference = model.reference(everything).out
        progress.update(task, advance=1)
        for length in LENGTHS:
            inputs = jax.tree.map(lambda x, n=length: x[:, :n], everything)
            for curve in curves:
                progress.update(task, description=f"plot: {curve.backend}, {length} tokens")
                call = functools.partial(model.operator, inputs, backend=curve.backend)
                curve.errors.append(relative_error(call().out, reference[:, :length]))
                curve.seconds.append(median_seconds(call, budget=0.3, at_least=2))
                progress.update(task, advance=1)
    return curves


def _dress(axes: Axes, title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    # Whole decades: an axis that spans less than one would have a single label.
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high)))
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("tokens")
    axes.set_ylabel(label)
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False)
