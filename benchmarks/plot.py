"""The plot beside the page: time over length, one panel per number of heads and dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLORS = {"fused": "#d62728", "chunked": "#1f77b4", "scan": "#2ca02c"}


def save(results: dict[str, Any], path: Path) -> bool:
    """Write a PNG of the one-sequence rows; False if there are none. Wrong results are not drawn.

    Raises:
      ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
