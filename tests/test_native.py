"""The native library missing, broken or built for another jaxlib: the rest works, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from programs import needs_fused

import kda_jax
from kda_jax import checkpoint_alignment, chunk_kda_prefill, native, supports
from kda_jax.testing import make_case, relative_error


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As if nothing had been loaded yet; what the test changes is gone after it."""
    native._status.cache_clear()
    monkeypatch.delenv("KDA_JAX_DISABLE_NATIVE", raising=False)
    yield monkeypatch
    monkeypatch.undo()
    native._status.cache_clear()


@pytest.fixture
def no_registration(reload: pytest.MonkeyPatch) -> list[str]:
    """Whatever would have been handed to jaxlib."""
    registered: list[str] = []
    reload.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    return registered


def assert_reported(*parts: str, platform: str = "cpu") -> None:
    """fused says why it is unavailable, auto takes chunked and says the same, the op obeys."""
    status = native.status()
    assert platform not in status.available_platforms
    fused, auto = (supports(name, platform=platform, K=64) for name in ("fused", "auto"))
    assert not fused and auto and auto.backend == "chunked"
    for part in parts:
        assert part in status.reasons[platform]
        assert part in fused.reason
        assert part in auto.reason
    assert checkpoint_alignment("auto", platform=platform) == 1
    if platform == "cpu":
        case = make_case("random", seq_lens=[5], H=1, K=64, V=16)
        with (
            jax.default_device(jax.devices("cpu")[0]),
            pytest.raises(NotImplementedError, match="backend 'fused' cannot run this call"),
        ):
            chunk_kda_prefill(*case.args, **case.kwargs, backend="fused")
        assert jax.jit(lambda x: x + 1)(1) == 2


@needs_fused
def test_loads_again(reload: pytest.MonkeyPatch) -> None:
    """Registering the same handlers twice is no error."""
    status = native.status()
    assert "cpu" in status.available_platforms and "cpu" not in status.reasons
    assert status.library and Path(status.library).is_file()
    assert status.ffi_version and status.jaxlib_ffi_version
    assert native.version_problem(status.ffi_version, status.jaxlib_ffi_version) is None
    assert status.ffi_version == (0, 1), "one binary for every jaxlib since 0.7.1"
    assert status is native.status()


@needs_fused
@pytest.mark.parametrize("jaxlib", [(0, 0), (1, 1), None])
def test_another_ffi_version_never_reaches_jaxlib(
    jaxlib: Any, reload: pytest.MonkeyPatch, no_registration: list[str]
) -> None:
    reload.setattr(native, "jaxlib_ffi_version", lambda: jaxlib)
    assert_reported("FFI", "reinstall" if jaxlib is None else "rebuild")
    assert native.status().library, "it is there, and the doctor shows where"
    assert not no_registration


def test_version_rule() -> None:
    """A handler runs on the major version it was built for, from its minor version on."""
    for built, jaxlib in (((0, 1), (0, 1)), ((0, 1), (0, 5)), ((2, 3), (2, 4))):
        assert native.version_problem(built, jaxlib) is None
    for built, jaxlib in (((0, 2), (0, 1)), ((1, 0), (0, 9)), ((0, 9), (1, 0))):
        assert "built for XLA FFI" in (native.version_problem(built, jaxlib) or "")
    version = native.jaxlib_ffi_version()
    assert version is not None and version >= (0, 1)


def test_version_that_cannot_be_read(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reload.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert native.jaxlib_ffi_version() is None
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define SOMETHING_ELSE 1\n")
    assert native.jaxlib_ffi_version() is None


def _package_without_library(reload: pytest.MonkeyPatch, folder: Path) -> None:
    """kda_jax looks for extension modules in ``folder``."""
    for name in ("_native", "_native_cuda", "_native_rocm"):
        reload.delitem(sys.modules, f"kda_jax.{name}", raising=False)
        reload.delattr(kda_jax, name, raising=False)
    reload.setattr(kda_jax, "__path__", [str(folder)])
    reload.setattr(native, "_installed_elsewhere", lambda platform: None)
    # An editable install finds the library by a hook of its own, wherever the package looks.
    hooks = [x for x in sys.meta_path if "Redirecting" not in type(x).__name__]
    reload.setattr(sys, "meta_path", hooks)


def test_missing(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package_without_library(reload, tmp_path)
    assert_reported("is not built", "BUILD.md")
    assert native.status().library is None


def test_missing_in_a_checkout(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`pip install .`, then Python in the checkout: it takes the sources, which have no library."""
    found = native._installed_elsewhere
    _package_without_library(reload, tmp_path / "checkout")
    reload.setattr(native, "_installed_elsewhere", found)
    installed = SimpleNamespace(locate_file=lambda name: tmp_path / "site-packages" / name)
    reload.setattr(native.importlib.metadata, "distribution", lambda name: installed)
    folder = tmp_path / "site-packages" / "kda_jax"
    folder.mkdir(parents=True)
    assert "is not built" in native.status().reasons["cpu"]
    native._status.cache_clear()
    (folder / "_native.cpython-313-x86_64-linux-gnu.so").touch()
    assert_reported(f"is installed in {folder}", "start it in another folder", "--editable")
    assert "no kernel for cuda" in native.status().reasons["cuda"]


def test_missing_says_what_the_build_said(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package_without_library(reload, tmp_path)
    (tmp_path / "_native_build.txt").write_text("the native code did not build: no compiler\n")
    reload.setattr(native.importlib.resources, "files", lambda package: tmp_path)
    assert_reported("did not build: no compiler", "reinstall kda_jax")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF\x02\x01\x01" + bytes(57), b"#!/bin/sh\n"],
    ids=["empty", "no machine", "script"],
)
def test_not_a_library_of_this_machine(
    content: bytes, reload: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Truncated, for another processor, or something else altogether."""
    _package_without_library(reload, tmp_path)
    (tmp_path / "_native.so").write_bytes(content)
    assert_reported("does not load", "reinstall kda_jax")


def test_a_python_error_while_loading(reload: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _package_without_library(reload, tmp_path)
    (tmp_path / "_native.py").write_text("raise SystemError('initialization failed')\n")
    assert_reported("initialization failed", "reinstall kda_jax")


def test_a_library_of_another_version(reload: pytest.MonkeyPatch) -> None:
    """An old build next to newer Python code: without what the code asks it."""
    old = SimpleNamespace(__file__="old.so", ffi_version=lambda: (0, 1))
    reload.setitem(sys.modules, "kda_jax._native", old)  # type: ignore[arg-type]
    assert_reported("does not fit this kda_jax", "reinstall kda_jax")


@needs_fused
def test_jaxlib_refuses_it(reload: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Duplicate registration")

    reload.setattr(jax.ffi, "register_ffi_target", refuse)
    assert_reported("Duplicate registration", "reinstall kda_jax")


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_no_kernel_for_the_platform(platform: str) -> None:
    if platform in native.status().available_platforms:
        pytest.skip(f"built for {platform} here")
    fused = supports("fused", platform=platform)
    assert not fused and platform in fused.reason
    auto = supports(platform=platform)
    assert auto.backend == "chunked" and platform in auto.reason


def test_a_broken_gpu_library_leaves_the_cpu_alone(reload: pytest.MonkeyPatch) -> None:
    """Such as one whose CUDA runtime is not installed."""
    real = native.importlib.import_module

    def load(name: str) -> Any:
        if name == "kda_jax._native_cuda":
            raise ImportError("libcudart.so.13: cannot open shared object file")
        return real(name)

    reload.setattr(native.importlib, "import_module", load)
    status = native.status()
    assert "libcudart" in status.reasons["cuda"]
    assert bool(supports("fused", platform="cpu", K=64)) == ("cpu" in status.available_platforms)
    assert_reported("libcudart", platform="cuda")


def test_switched_off() -> None:
    """In a process of its own: nothing was loaded before."""
    script = """
import json, sys
import jax.numpy as jnp, kda_jax
from kda_jax.testing import make_case
case = make_case("random", seq_lens=[9, 3], H=1, K=64, V=16, chunk_size=16)
result = kda_jax.chunk_kda_prefill(*case.args, **case.kwargs)
print(json.dumps({
    "sum": float(jnp.arange(4).sum()),
    "out": [float(x) for x in jnp.ravel(result.out)],
    "auto": kda_jax.supports()._asdict(),
    "fused": kda_jax.supports("fused")._asdict(),
    "loaded": [name for name in sys.modules if name.startswith("kda_jax._native")],
}))
"""
    root = str(Path(kda_jax.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags}
    environment["KDA_JAX_DISABLE_NATIVE"] = "1"
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["sum"] == 6 and not found["loaded"]
    assert found["auto"]["backend"] == "chunked" and not found["fused"]["supported"]
    for backend in ("auto", "fused"):
        assert "switched off by KDA_JAX_DISABLE_NATIVE" in found[backend]["reason"]
    case = make_case("random", seq_lens=[9, 3], H=1, K=64, V=16, chunk_size=16)
    want = chunk_kda_prefill(*case.args, **case.kwargs, backend="scan").out
    assert relative_error(np.array(found["out"]), np.ravel(want)) < 1e-5
