"""A source that compiles if the table's dynamic LDS is what the prologue kernels take.

    python tools/amd/shared_sizes.py tools/amd/resources.json > sizes.hip

driver.hip launches `prologue_kernel<Tiles, ...>` with sizeof(Prologue<Tiles, ...>::Shared) bytes
and four threads for each row of a chunk (a wave of 64 for 16 tokens). The compiler's report knows
nothing of it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_PROLOGUE = re.compile(r"kda::base::prologue_kernel<(.*, \d+, (\d+), (?:true|false))>")


def source(launch: dict[str, dict[str, int]]) -> str:
    """One static_assert for each kernel."""
    lines = ["#define KDA_IO BF16", "#define KDA_K 64", '#include "driver.hip"']
    for kernel, how in sorted(launch.items()):
        match = _PROLOGUE.fullmatch(kernel)
        if match is None:
            raise SystemExit(f"shared_sizes.py: {kernel} is no prologue kernel")
        arguments, rows = match.groups()
        lines.append(
            f"static_assert(sizeof(kda::base::Prologue<{arguments}>::Shared) == "
            f'{how["dynamic_lds"]}, "the dynamic LDS in resources.json is wrong");'
        )
        if how["threads"] != 4 * int(rows):
            raise SystemExit(f"shared_sizes.py: {kernel} has {4 * int(rows)} threads")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(source(json.loads(Path(sys.argv[1]).read_text())["launch"]), end="")
