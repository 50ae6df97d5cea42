"""Whether jax has a device to run on."""

from __future__ import annotations

import os

import jax


def device_problem() -> str | None:
    """Why jax cannot start a backend, in one line; None: it can."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # jax asserts, without a message, where JAX_PLATFORMS names a platform with no plugin.
        asked = os.environ.get("JAX_PLATFORMS")
        why = " ".join(str(error).split()) or "no plugin for this platform is installed"
        return f"jax finds no device{f' for JAX_PLATFORMS={asked}' if asked else ''}: {why}"
    return None
