"""What the AMD kernels execute, counted in the interpreter of tests/cdna_sim. Nothing is timed.

    make amd-static        or: python tools/amd/static_figures.py [FILE]

writes benchmarks/results/amd_static.md. Needs what tests/test_cdna_kernels.py needs.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

import cdna_prefill  # noqa: E402

from kda_jax.testing import make_case  # noqa: E402
from kda_jax.workspace import workspace  # noqa: E402

TOKENS, K, V, GROUPS = 256, 128, 128, 4
CLASSES = ("mfma", "valu", "trans", "salu", "lds", "global", "barrier")
_MFMA = re.compile(r"V_MFMA_F32_(\d+)X(\d+)X(\d+)_(\w+)")

HEAD = f"""# AMD kernels: instruction counts, not timed

One head, one sequence of {TOKENS} tokens in chunks of 64, K = V = 128, bfloat16, bounded gate, no
initial state; in {GROUPS} groups for the last three stages. The compiled kernels ran in the
interpreter of `tests/cdna_sim`, which executes every instruction and knows no clock, cache or
occupancy. **Not timed:** no line here says how fast anything is. No AMD GPU was involved.

Made by `make amd-static` (`tools/amd/static_figures.py`). Registers, LDS and occupancy are in
`tools/amd/resources.json`.

* Instructions are those of waves (64 lanes); *waves* is how many the launch started; *global*
  counts vector and scalar accesses to memory.
* MFMA share: matrix instructions among all. MFLOP: their multiplications and additions, useful or
  not.
* Global bytes are as the lanes ask for them, before any cache: each of the 8 slices of V reads a
  chunk's operands anew.
"""


def launches(arch: str, groups: int) -> dict[str, list]:
    """Statistics by stage of the one call."""
    case = make_case(
        "random", seq_lens=[TOKENS], H=1, K=K, V=V, dtype="bfloat16", initial_state=False
    )
    return cdna_prefill.prefill(arch, case, groups=groups).stats


def flops(opcodes: Counter[str]) -> int:
    """Of the matrix instructions."""
    total = 0
    for name, count in opcodes.items():
        if match := _MFMA.fullmatch(name):
            m, n, k = map(int, match.groups()[:3])
            total += 2 * m * n * k * count
    return total


def shapes(opcodes: Counter[str]) -> str:
    """The matrix instructions that ran, as "f16 16x16x16: 12"."""
    found = []
    for name, count in sorted(opcodes.items()):
        if match := _MFMA.fullmatch(name):
            m, n, k, kind = match.groups()
            found.append(f"{kind.lower()} {m}x{n}x{k}: {count}")
    return ", ".join(found) or "none"


def table(arch: str) -> list[str]:
    """Two tables in Markdown: the mix, and bytes with matrix instructions."""
    stages = launches(arch, 1)
    stages |= {name: stats for name, stats in launches(arch, GROUPS).items() if "groups" in name}
    mix = [
        f"| stage | waves | instructions | {' | '.join(CLASSES)} | MFMA share |",
        "|---|" + "---:|" * (len(CLASSES) + 3),
    ]
    data = [
        "| stage | MFLOP | global loaded | stored | LDS loaded | stored | matrix instructions |",
        "|---|" + "---:|" * 5 + "---|",
    ]
    for stage, (stats,) in stages.items():
        if stage.startswith("second"):  # nothing to do here
            continue
        counts = [stats.classes[name] for name in CLASSES]
        assert sum(counts) == stats.instructions, stats.classes
        share = f"{100 * counts[0] / stats.instructions:.1f} %"
        cells = [stage, stats.waves, stats.instructions, *counts, share]
        mix.append(f"| {' | '.join(map(str, cells))} |")
        sizes = [stats.global_loaded, stats.global_stored, stats.lds_loaded, stats.lds_stored]
        work = [f"{flops(stats.opcodes) / 1e6:.2f}", *(f"{size / 1024:.1f} KiB" for size in sizes)]
        data.append(f"| {' | '.join([stage, *work, shapes(stats.opcodes)])} |")
    return [*mix, "", *data]


def main() -> None:
    target = _ROOT / "benchmarks" / "results" / "amd_static.md"
    target = Path(sys.argv[1]) if sys.argv[1:] else target
    if reason := cdna_prefill.why_not():
        raise SystemExit(f"static_figures.py: {reason}")
    case = make_case("random", seq_lens=[TOKENS], H=1, K=K, V=V, dtype="bfloat16")
    bytes_ = workspace("rocm", 1, K, V, case.metadata).num_bytes
    lines = [HEAD]
    lines.append(f"Workspace: {bytes_ / TOKENS:.0f} bytes for each token of a head.\n")
    for arch in cdna_prefill.ARCHITECTURES:
        lines += [f"## {arch}\n", *table(arch), ""]
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(lines).rstrip() + "\n")
    print(target)


if __name__ == "__main__":
    main()
