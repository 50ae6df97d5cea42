"""Finds the native library, checks that this jaxlib can load it, and registers its FFI handlers.

The check comes before the registration: jaxlib refuses a handler that was built against newer FFI
headers than its own by failing *every* backend of the process, so such a library must never reach it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import jax

TARGET = "kda_prefill_v1"
PLATFORMS = ("cpu", "cuda", "rocm")
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}
_REBUILD = "reinstall kda_jax with a C++17 compiler present (BUILD.md), or use backend='chunked'"
_lock = threading.Lock()


@dataclass(frozen=True)
class NativeStatus:
    """What of the native code works in this process.

    Attributes:
      available_platforms: those of "cpu", "cuda", "rocm" whose handlers are registered.
      reasons: for each other platform, why not, and what to do.
      library: path of the extension module, None if there is none.
      ffi_version: (major, minor) of the FFI headers it was built with.
      jaxlib_ffi_version: (major, minor) of the installed jaxlib.
      cpu_instruction_set: what the CPU kernel uses on this machine.
    """

    available_platforms: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    library: str | None = None
    ffi_version: tuple[int, int] | None = None
    jaxlib_ffi_version: tuple[int, int] | None = None
    cpu_instruction_set: str | None = None


def status() -> NativeStatus:
    """Loads and registers the native library at the first call; never raises."""
    with _lock:  # threads may make their first call at the same time
        return _status()


@functools.cache
def _status() -> NativeStatus:
    jaxlib_version = jaxlib_ffi_version()
    try:
        module = _import()
    except ImportError as error:
        return _nothing(str(error), jaxlib_ffi_version=jaxlib_version)
    facts = {
        "library": module.__file__,
        "ffi_version": tuple(module.ffi_version()),
        "jaxlib_ffi_version": jaxlib_version,
        "cpu_instruction_set": module.cpu_instruction_set(),
    }
    problem = version_problem(module.ffi_version(), jaxlib_version)
    if problem:
        return _nothing(problem, **facts)
    handlers = module.handlers()
    reasons = {}
    for platform in PLATFORMS:
        if platform not in handlers:
            reasons[platform] = f"the native library holds no kernel for {platform}"
            continue
        for target, capsule in handlers[platform].items():
            jax.ffi.register_ffi_target(target, capsule, platform=_XLA_NAMES[platform])
    available = tuple(p for p in PLATFORMS if p not in reasons)
    return NativeStatus(available, reasons, **facts)


def version_problem(built: tuple[int, int], jaxlib: tuple[int, int] | None) -> str | None:
    """Why handlers built with FFI version ``built`` must not be registered; None if they may."""
    if jaxlib is None:
        return "the FFI version of this jaxlib cannot be read from its headers; reinstall jaxlib"
    if built[0] != jaxlib[0] or built[1] > jaxlib[1]:
        have, want = (".".join(map(str, v)) for v in (built, jaxlib))
        return (
            f"the native library was built for XLA FFI {have} and this jaxlib has {want}; install "
            "a newer jaxlib, or rebuild kda_jax against older headers (BUILD.md)"
        )
    return None


def jaxlib_ffi_version() -> tuple[int, int] | None:
    """(major, minor) of the FFI of the installed jaxlib, read from the headers it ships."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0][1]), int(found[1][1])


def _import() -> ModuleType:
    if os.environ.get("KDA_JAX_DISABLE_NATIVE", "0") not in ("", "0"):
        raise ImportError("the native library is switched off by KDA_JAX_DISABLE_NATIVE")
    try:
        return importlib.import_module("kda_jax._native")
    except ModuleNotFoundError:
        # Not next to this file in an editable install.
        note = importlib.resources.files(__package__) / "_native_build.txt"
        why = note.read_text().strip() if note.is_file() else "the native library is not built"
        raise ImportError(f"{why}; {_REBUILD}") from None
    except ImportError as error:
        raise ImportError(f"the native library does not load ({error}); {_REBUILD}") from error


def _nothing(reason: str, **facts: object) -> NativeStatus:
    return NativeStatus((), dict.fromkeys(PLATFORMS, reason), **facts)  # type: ignore[arg-type]
