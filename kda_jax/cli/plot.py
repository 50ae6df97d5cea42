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
from ..ops import chunk_kda_prefill
from . import documents as docs
from . import screen
from .errors import CliError
from .measure import median_seconds, relative_error
from .model import Model

BACKENDS = ("fused", "chunked", "scan")
LENGTHS = (64, 256, 1024, 4096)
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
        f"KDA prefill of one document: {config.heads} heads x {config.head_dim}, {config.dtype},"
        f" {jax.devices()[0].device_kind}"
    )
    figure.savefig(path, format="png", dpi=130)


def measure(model: Model, text: bytes) -> list[Curve]:
    """Every backend that works here, at every length, on the layer's own q, k, v and gates."""
    if not text:
        raise CliError("--plot needs text: all documents are empty")
    config = model.config
    dims = {"K": config.head_dim, "V": config.head_dim, "H": config.heads}
    names = [n for n in BACKENDS if supports(n, dtype=config.dtype, **dims)]
    curves = [Curve(name, [], []) for name in names]
    gate = (model.A_log, model.dt_bias.reshape(config.heads, config.head_dim))
    with screen.progress() as progress:
        task = progress.add_task("plot", total=len(LENGTHS) * (len(names) + 1))
        for length in LENGTHS:
            tokens = np.frombuffer((text * (length // len(text) + 1))[:length], np.uint8)
            metadata = ChunkMetadata.from_seq_lens([length], chunk_size=docs.CHUNK_SIZE)
            inputs = (*model.op_inputs(tokens.astype(np.int32), metadata), *gate)
            reference = _reference(inputs, config.lower_bound)
            progress.update(task, advance=1)
            for curve in curves:
                call = functools.partial(_out, *inputs, config.lower_bound, curve.backend)
                curve.errors.append(relative_error(call(), reference))
                curve.seconds.append(median_seconds(call, budget=0.4))
                progress.update(task, advance=1, description=f"plot {curve.backend} {length}")
    return curves


@functools.partial(jax.jit, static_argnums=(7, 8))
def _out(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, backend):  # type: ignore[no-untyped-def]
    return chunk_kda_prefill(
        q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound=lower_bound, backend=backend
    ).out


def _reference(inputs: tuple[jax.Array, ...], lower_bound: float | None) -> np.ndarray:
    """out of the token recurrence in float64."""
    host = [np.asarray(x, np.float64) for x in jax.device_get(inputs)]
    with jax.enable_x64(True):
        return np.asarray(_out(*host, lower_bound, "scan"))


def _dress(axes: Axes, title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("tokens")
    axes.set_ylabel(label)
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False)
