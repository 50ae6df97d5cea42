"""Finds the native libraries, checks that this jaxlib can load them, registers their FFI handlers.

Each platform has a library of its own: one whose runtime is missing leaves the others alone.

The check comes before the registration: jaxlib refuses a handler that was built against newer FFI
headers than its own by failing *every* backend of the process, so such a library must never reach
it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.resources
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import jax

TARGET = "kda_prefill_v1"
POOL_TARGET = "kda_prefill_pool_v1"
CONV_TARGET = "kda_conv_v1"  # on GPUs
PLATFORMS = ("cpu", "cuda", "rocm")
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}
_MODULES = {"cpu": "_native", "cuda": "_native_cuda", "rocm": "_native_rocm"}
_REBUILD = "reinstall kda_jax with a C++17 compiler present (BUILD.md), or use backend='chunked'"
_lock = threading.Lock()


@dataclass(frozen=True)
class NativeStatus:
    """What of the native code works in this process.

    Attributes:
      available_platforms: those of "cpu", "cuda", "rocm" whose handlers are registered.
      reasons: for each other platform, why not, and what to do.
      libraries: by platform, the paths of the extension modules that load.
      ffi_versions: by platform, (major, minor) of the FFI headers that they were built with.
      jaxlib_ffi_version: (major, minor) of the installed jaxlib.
      cpu_instruction_set: what the CPU kernel uses on this machine.
      architectures: by GPU platform, what its kernels were compiled for, e.g. "80,90".
      token_chunks: the platforms whose kernels take chunks of one token.
      convolutions: the platforms that have a kernel for the short convolution.
    """

    available_platforms: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    ffi_versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    jaxlib_ffi_version: tuple[int, int] | None = None
    cpu_instruction_set: str | None = None
    architectures: dict[str, str] = field(default_factory=dict)
    token_chunks: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()

    @property
    def library(self) -> str | None:
        """Path of the CPU's extension module, None if there is none."""
        return self.libraries.get("cpu")

    @property
    def ffi_version(self) -> tuple[int, int] | None:
        """Of the CPU's extension module, None if there is none."""
        return self.ffi_versions.get("cpu")


def status() -> NativeStatus:
    """Loads and registers the native library at the first call; never raises."""
    with _lock:  # threads may make their first call at the same time
        return _status()


@functools.cache
def _status() -> NativeStatus:
    jaxlib_version = jaxlib_ffi_version()
    reasons: dict[str, str] = {}
    libraries: dict[str, str] = {}
    architectures: dict[str, str] = {}
    versions: dict[str, tuple[int, int]] = {}
    tokens: list[str] = []
    convolutions: list[str] = []
    instruction_set = None
    for platform in PLATFORMS:
        try:
            module = _import(platform)
            libraries[platform] = str(module.__file__)
            versions[platform] = module.ffi_version()
            if problem := version_problem(versions[platform], jaxlib_version):
                raise ImportError(problem)
            if platform == "cpu":
                instruction_set = module.instruction_set()
            else:
                architectures[platform] = module.architectures()
                if getattr(module, "token_chunks", False):  # not in a library of an older build
                    tokens.append(platform)
            handlers = module.handlers()
            if missing := [name for name in (TARGET, POOL_TARGET) if name not in handlers]:
                raise ImportError(f"the native library has no {missing[0]}; {_REBUILD}")
            for target, capsule in handlers.items():
                jax.ffi.register_ffi_target(target, capsule, platform=_XLA_NAMES[platform])
            if CONV_TARGET in handlers:  # not in a library of an older build
                convolutions.append(platform)
        except ImportError as error:
            reasons[platform] = str(error)
        except Exception as error:  # whatever it is, the rest of the library works without it
            why = f"{type(error).__name__}: {error}"
            reasons[platform] = f"the native library does not fit this kda_jax ({why}); {_REBUILD}"
    return NativeStatus(
        available_platforms=tuple(p for p in PLATFORMS if p not in reasons),
        reasons=reasons,
        libraries=libraries,
        ffi_versions=versions,
        jaxlib_ffi_version=jaxlib_version,
        cpu_instruction_set=instruction_set,
        architectures=architectures,
        token_chunks=tuple(tokens),
        convolutions=tuple(convolutions),
    )


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


def _import(platform: str) -> ModuleType:
    if os.environ.get("KDA_JAX_DISABLE_NATIVE", "0") not in ("", "0"):
        raise ImportError("the native library is switched off by KDA_JAX_DISABLE_NATIVE")
    try:
        return importlib.import_module(f"kda_jax.{_MODULES[platform]}")
    except ModuleNotFoundError:
        raise ImportError(_why_missing(platform)) from None
    except ImportError as error:
        raise ImportError(f"the native library does not load ({error}); {_REBUILD}") from error


def _installed_elsewhere(platform: str) -> Path | None:
    """Where pip put this platform's library, if Python took the package from another folder.

    So it does in a checkout after `pip install .`: the current folder comes first.
    """
    try:
        installed = importlib.metadata.distribution("kda-jax").locate_file("kda_jax")
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(installed))
    return folder if any(folder.glob(f"{_MODULES[platform]}.*")) else None


def _why_missing(platform: str) -> str:
    if folder := _installed_elsewhere(platform):
        return (
            f"the native library is installed in {folder}, but Python took kda_jax from "
            f"{Path(__file__).parent}; start it in another folder, or install with "
            "`pip install --editable .`"
        )
    # Not next to this file in an editable install.
    note = importlib.resources.files(__package__) / "_native_build.txt"
    if note.is_file():
        return f"{note.read_text().strip()}; {_REBUILD}"
    if platform == "cpu":
        return f"the native library is not built; {_REBUILD}"
    return (
        f"kda_jax has no kernel for {platform} in it; build it (BUILD.md, GPU kernels) or use"
        " 'chunked'"
    )
