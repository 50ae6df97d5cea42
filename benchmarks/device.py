"""The device that a result was measured on, and JAX's settings that suit a measurement."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from kda_jax.backends import current_platform
from kda_jax.devices import architecture

GPUS = ("cuda", "rocm")


def share_memory() -> None:
    """Let other processes use the device too: JAX takes 3/4 of its memory at once otherwise.

    Only before JAX meets the device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def describe() -> dict[str, Any]:
    """Platform, kind, architecture and memory of JAX's default device, JSON-compatible."""
    device = jax.devices()[0]
    return {
        "platform": current_platform(),
        "kind": device.device_kind,
        "architecture": architecture(device),
        "memory": memory_limit(),
    }


def memory_limit() -> int | None:
    """Bytes that JAX may take on its default device; None where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit)


def slug(kind: str) -> str:
    """A device kind as part of a file's name: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def line(device: dict[str, Any]) -> str:
    """One line for a page: platform, kind, architecture."""
    parts = (device["platform"], device["kind"], device["architecture"])
    return " ".join(dict.fromkeys(filter(None, parts)))  # "cpu" is a platform and a kind
