"""Makes the library of tools/amd/library.sh importable as kda_jax._native_rocm."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_NATIVE = _ROOT / "build" / "amd" / "native"


def library() -> Path:
    """Where the library for this Python is, whether built or not."""
    return _NATIVE / f"_native_rocm{sysconfig.get_config_var('EXT_SUFFIX')}"


def provide() -> None:
    """Call it before the first import of kda_jax, which looks for the module and registers it."""
    name = "kda_jax._native_rocm"
    assert "kda_jax" not in sys.modules
    spec = importlib.util.spec_from_file_location(name, library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    sys.path.insert(0, str(_ROOT))
