"""What JAX's devices are, and whether the native library has code for them.

A kernel that was not compiled for a device must say so before it is called: its launch would fail
at run time, inside a jit, with the runtime's own words.
"""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import jax

# An entry of CMAKE_CUDA_ARCHITECTURES: a bare number is machine code and PTX.
_CUDA_ENTRY = re.compile(r"(\d+)(\d)([af]?)(-real|-virtual)?")
_ANSWERS = {
    "cuda": "build kda_jax with it in KDA_CUDA_ARCHITECTURES (BUILD.md)",
    "rocm": "build kda_jax with it in KDA_ROCM_ARCHITECTURES (BUILD.md)",
}


def platform_of(device: Any) -> str:
    """ "cpu", "cuda", "rocm" or another name; JAX itself calls both of the GPUs' "gpu"."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def architecture(device: Any) -> str | None:
    """What the device runs: "9.0" (CUDA's compute capability), "gfx942"; None where unknown."""
    found = getattr(device, "compute_capability", None)
    return str(found).split(":")[0] if found else None  # gfx942:sramecc+:xnack-


def uncovered(platform: str, device: str | None, built: str | None) -> str | None:
    """Why code built for the list ``built`` does not run on a device of that architecture.

    Args:
      platform: "cuda" or "rocm"; any other has one architecture.
      device: from `architecture`.
      built: what the library was compiled for, separated by commas: "80,90", "gfx942,gfx950".

    Returns:
      One sentence, or None: it runs, or there is no telling.
    """
    if platform not in _ANSWERS or device is None or built is None:
        return None
    entries = [entry.strip() for entry in built.split(",") if entry.strip()]
    runs = _runs_on_cuda if platform == "cuda" else _runs_on_rocm
    if any(runs(device, entry) for entry in entries):
        return None
    name = f"compute capability {device}" if platform == "cuda" else device
    return (
        f"its kernel was compiled for {', '.join(entries) or 'nothing'} and does not run on a "
        f"device of {name}; {_ANSWERS[platform]}, or use 'chunked'"
    )


def _runs_on_cuda(device: str, entry: str) -> bool:
    parts = _CUDA_ENTRY.fullmatch(entry)
    if not parts:
        return False
    major, _, minor = device.partition(".")
    has, want = (int(major), int(minor or 0)), (int(parts[1]), int(parts[2]))
    if parts[3] == "a":  # bound to one chip
        return has == want
    if parts[3] == "f":  # bound to one family
        return has[0] == want[0] and has >= want
    machine_code = parts[4] != "-virtual" and has[0] == want[0] and has >= want
    ptx = parts[4] != "-real" and has >= want  # the driver compiles it for anything newer
    return machine_code or ptx


def _runs_on_rocm(device: str, entry: str) -> bool:
    return device == entry.split(":")[0]


def uncovered_here(platform: str, built: str | None) -> str | None:
    """`uncovered` for the devices of this process that a call on ``platform`` may run on.

    That is the default device, if one is set there, else all: which of them a sharded program
    uses is not known when it is traced. None, too, where the process has no such device.
    """
    if platform not in _ANSWERS:
        return None
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is not None and not isinstance(default, str) and platform_of(default) == platform:
        found: tuple[str | None, ...] = (architecture(default),)
    else:
        found = _architectures(platform)
    return next((why for each in found if (why := uncovered(platform, each, built))), None)


@functools.cache
def _architectures(platform: str) -> tuple[str | None, ...]:
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:  # lowering for a platform that is not here
        return ()
    return tuple(dict.fromkeys(architecture(d) for d in devices if platform_of(d) == platform))


def all_devices() -> list[Any]:
    """The devices of the default platform, and those of the CPU where JAX has them as well."""
    devices = jax.local_devices()
    if all(device.platform != "cpu" for device in devices):
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave it out
            devices = devices + jax.local_devices(backend="cpu")
    return devices
