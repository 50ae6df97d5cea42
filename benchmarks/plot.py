"""The plots beside the pages: time over length on a CPU, time by shape on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import gpu_table, peers

_COLORS = {
    "fused": "#d62728", "chunked": "#1f77b4", "scan": "#2ca02c",
    "kda_jax": "#d62728", "FLA": "#7f7f7f", "jla": "#9467bd",
}  # fmt: skip


def save(results: dict[str, Any], path: Path) -> bool:
    """Write a PNG of the one-sequence rows; False if there are none. Wrong results are not drawn.

    One panel per number of heads and dtype.

    Raises:
      ImportError: matplotlib is missing.
    """
    plt = _pyplot()
    rows = [row for row in results["prefill"] if row["sequences"] == 1]
    if not rows:
        return False
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    heads = sorted({row["H"] for row in rows})
    figure, axes = plt.subplots(
        len(dtypes), len(heads), sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(4.5 * len(heads), 3.5 * len(dtypes)),
    )  # fmt: skip
    for i, dtype in enumerate(dtypes):
        for j, H in enumerate(heads):
            panel = [row for row in rows if (row["dtype"], row["H"]) == (dtype, H)]
            _panel(axes[i, j], sorted(panel, key=lambda row: row["tokens"]), results["backends"])
            axes[i, j].set_title(f"H = {H}, {dtype}")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    for axis in axes[:, 0]:
        axis.set_ylabel("seconds")
    axes[0, 0].legend()
    figure.suptitle(f"{results['machine']['cpu']}, {results['machine']['cores']} cores", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def save_gpu(results: dict[str, Any], path: Path) -> bool:
    """Write a PNG with a group of bars for each shape; False if there is nothing to draw.

    Raises:
      ImportError: matplotlib is missing.
    """
    plt = _pyplot()
    rows = [row for row in results["rows"] if gpu_table.correct(row)]
    if not rows:
        return False
    bars = {
        "kda_jax": [gpu_table.seconds(row) for row in rows],
        **{
            name: [peers.time_of(results["peers"], name, row["shape"]) for row in rows]
            for name in peers.NAMES
        },
    }
    drawn = {name: values for name, values in bars.items() if any(values)}
    width = 0.8 / len(drawn)
    figure, axis = plt.subplots(figsize=(2 + 0.9 * len(rows), 4.5), layout="constrained")
    for i, (name, values) in enumerate(drawn.items()):
        x = [j + (i - (len(drawn) - 1) / 2) * width for j in range(len(rows))]
        heights = [(value or 0.0) * 1e6 for value in values]
        axis.bar(x, heights, width, label=name, color=_COLORS.get(name))
    for j, row in enumerate(rows):
        least = gpu_table.floor_of(results, row) * 1e6
        label = "floor (memory)" if j == 0 else None
        axis.plot([j - 0.45, j + 0.45], [least, least], "k--", lw=1, label=label)
    axis.set_yscale("log")
    axis.set_ylabel("microseconds")
    axis.set_xticks(range(len(rows)), [row["shape"] for row in rows], rotation=40, ha="right")
    axis.grid(True, axis="y", alpha=0.3)
    axis.legend()
    axis.set_title(f"KDA prefill, bfloat16, {results['device']['kind']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _panel(axis: Any, rows: list[dict[str, Any]], backends: list[str]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(True, which="major", alpha=0.3)
    for name in backends:
        points = [
            (row["tokens"], cell["median"], cell["low"], cell["high"])
            for row in rows
            if (cell := row["backends"].get(name)) and cell["parity"]
        ]
        if points:
            x, y, low, high = zip(*points, strict=True)
            axis.plot(x, y, "o-", color=_COLORS.get(name), label=name)
            axis.fill_between(x, low, high, color=_COLORS.get(name), alpha=0.2)
    axis.plot([r["tokens"] for r in rows], [r["floor_s"] for r in rows], "k--", lw=1, label="floor")
