"""`doctor`: what is installed, which devices jax sees, which backends work here and why not."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import __version__, backends, native
from ..devices import all_devices, platform_of, uncovered
from ..devices import architecture as device_architecture
from ..ops import chunk_kda_prefill
from .devices import device_problem

# Dimensions of the trial call: every released model has K = V = 128.
_DIM = 128
_PLUGIN = re.compile(r"jax[-_].*(plugin|pjrt)$", re.IGNORECASE)


def doctor(*, as_json: bool) -> int:
    """Print the report; the exit code is 0, whatever is missing."""
    found = report()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        from .doctor_text import show  # rich is not needed for --json

        show(found)
    return 0


def report() -> dict[str, Any]:
    """The whole report, JSON-ready."""
    devices, failure = _devices()
    return {
        **describe_software(paths=True),
        "default_backend": None if failure else backends.current_platform(),
        "devices": devices,
        "device_error": failure,
        "backends": [] if failure else [_backend(name) for name in _names()],
    }


def describe_software(*, paths: bool = False) -> dict[str, Any]:
    """Versions and the native libraries; without ``paths`` nothing in it names a user or a host."""
    native = _native()
    if not paths:
        for library in native["libraries"]:
            library["path"] = Path(library["path"]).name
    return {
        "kda_jax": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "plugins": _plugins(),
        "native": native,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins() -> list[dict[str, str | None]]:
    """Installed jax plugins; `problem` is set where one cannot work with this jax."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if _PLUGIN.match(name) or name.lower() in ("jaxlib-rocm", "jax-metal", "libtpu"):
            found[name] = distribution.version
    return [
        {"name": name, "version": version, "problem": plugin_problem(name, version)}
        for name, version in sorted(found.items())
    ]


def plugin_problem(name: str, version: str, jaxlib: str | None = None) -> str | None:
    """Why a plugin of this version cannot serve this jaxlib, and what to do; None: it can.

    The rule is jaxlib's own (plugin_support.check_plugin_version): equal numbers, where 0.12.0.1
    is not 0.12.0 and a suffix such as .post1 does not count. jaxlib waives it for ROCm and leaves
    it to pip's pins, which a later upgrade of jax alone can break.
    """
    jaxlib = jaxlib or _version("jaxlib") or ""
    if name.lower() == "jaxlib-rocm":
        return "abandoned in 2023: uninstall it, install jax-rocm7-plugin and jax-rocm7-pjrt"
    if not _PLUGIN.match(name):
        return None  # versioned on its own
    number = re.compile(r"\d+(?:\.\d+)*")
    has, want = number.match(version), number.match(jaxlib)
    if has and want and has[0] == want[0]:
        return None
    return (
        f"does not match jaxlib {jaxlib}: install '{name}=={jaxlib}', or jax and jaxlib"
        f" of version {has[0] if has else version}"
    )


def _native() -> dict[str, Any]:
    status = native.status()

    def dotted(pair: tuple[int, int] | None) -> str | None:
        return None if pair is None else ".".join(map(str, pair))

    return {
        "libraries": [
            {
                "platform": platform,
                "path": path,
                "ffi_version": dotted(status.ffi_versions.get(platform)),
                "architectures": status.architectures.get(platform),
            }
            for platform, path in status.libraries.items()
        ],
        "cpu_instruction_set": status.cpu_instruction_set,
        "jaxlib_ffi_version": dotted(status.jaxlib_ffi_version),
        "available_platforms": list(status.available_platforms),
        "reasons": dict(status.reasons),
    }


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """The devices of all platforms, or why jax found none."""
    failure = device_problem()
    if failure:
        return [], failure
    return [_device(device) for device in all_devices()], None


def _device(device: Any) -> dict[str, Any]:
    """`problem`: why the native library has no code for it; None where it has."""
    name, architecture = platform_of(device), device_architecture(device)
    built = native.status().architectures.get(name)
    return {
        "platform": name,
        "kind": device.device_kind,
        "id": str(device.id),
        "architecture": architecture,
        "problem": uncovered(name, architecture, built),
    }


def _names() -> list[str]:
    names = list(backends.names())
    return names if "auto" in names else ["auto", *names]


def _backend(name: str) -> dict[str, Any]:
    """Whether a backend takes a small call here, and whether its numbers are right."""
    dtype = _trial_dtype()
    support = backends.supports(name, dtype=dtype, K=_DIM, V=_DIM, H=1)
    works, reason = bool(support), support.reason
    if works:
        try:
            error = _trial(name)
            works = error < (1e-4 if dtype == "float32" else 1e-2)
            reason = reason if works else f"wrong numbers: error {error:.1e} against scan"
        except Exception as failure:
            # A report must not die of what it reports.
            works, reason = False, f"{type(failure).__name__}: {failure}".splitlines()[0]
    return {
        "name": name,
        "works": works,
        "runs": support.backend,
        "checkpoint_alignment": backends.checkpoint_alignment(
            name, dtype=dtype, K=_DIM, V=_DIM, H=1
        ),
        "reason": reason,
    }


def _trial_dtype() -> str:
    # The kernels of the GPUs have no float32.
    return "float32" if backends.current_platform() == "cpu" else "bfloat16"


def _trial(name: str) -> float:
    """Relative error of out against scan on 70 random tokens (two chunks)."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), _trial_dtype())

    tokens = 70
    q, k, v, raw_g = (normal(1, tokens, 1, _DIM) for _ in range(4))
    inputs = (q, k, v, raw_g, normal(1, tokens, 1), normal(1), normal(1, _DIM) - 4)
    out, reference = (
        np.asarray(chunk_kda_prefill(*inputs, backend=each).out, np.float64)
        for each in (name, "scan")
    )
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))
