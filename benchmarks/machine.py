"""What a result must carry to be compared: the machine, the versions, the command, the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import kda_jax

# The instruction sets that decide how fast the host kernel can be.
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve")
_PACKAGES = ("jax", "jaxlib", "numpy")


def describe() -> dict[str, Any]:
    """The facts as one JSON-compatible object; nothing in it names a user, a host or a path."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "flags": _flags(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"kda_jax": kda_jax.__version__}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
    }


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command() -> str:
    """The command line that started this run, as one would type it at the repository's root."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = Path(sys.argv[0]).name
    if module:
        program = f"python -m {module.name.removesuffix('.__main__')}"
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _cpuinfo(*keys: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _cpu_model() -> str:
    name = _cpuinfo("model name") or platform.processor() or "unknown"
    numbers = [f"{k} {v}" for k in ("cpu family", "model", "stepping") if (v := _cpuinfo(k))]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _flags() -> list[str]:
    have = set(_cpuinfo("flags", "Features").split())
    return [flag for flag in _FLAGS if flag in have]
