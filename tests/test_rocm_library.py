"""The ROCm library on a machine without ROCm: it loads against a stub of the HIP runtime, registers
its handler, and programs lower and export for rocm with the custom call.

`make amd-library` builds it; `KDA_AMD=required` turns a skip for want of it into a failure. Each
test runs in a process of its own: what is registered stays registered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS, STUB = ROOT / "tools" / "amd", ROOT / "build" / "amd" / "stub"

PREAMBLE = f"""
import sys
sys.path.append({str(TOOLS)!r})
import rocm_module
"""

PROVIDED = """
rocm_module.provide()
import jax, jax.numpy as jnp, numpy as np
import kda_jax
from kda_jax import native
status = native.status()

def program(backend, dtype="bfloat16", K=128, V=64, T=128, N=2):
    metadata = kda_jax.ChunkMetadata.from_seq_lens(
        [70, 3], checkpoint_offsets=[[64], []], capacity="bucket")
    wide = jax.ShapeDtypeStruct((1, T, 4, K), dtype)
    args = (wide, wide, jax.ShapeDtypeStruct((1, T, 4, V), dtype), wide,
            jax.ShapeDtypeStruct((1, T, 4), dtype), jax.ShapeDtypeStruct((4,), jnp.float32),
            jax.ShapeDtypeStruct((4, K), jnp.float32), metadata)
    fn = lambda *a: kda_jax.chunk_kda_prefill(*a[:7], metadata=a[7], backend=backend)
    return jax.jit(fn), args

def calls(text):
    return [line for line in text.splitlines() if "@" + native.TARGET + "(" in line]
"""

REGISTERS = """
assert "rocm" in status.available_platforms, status
assert status.libraries["rocm"].endswith(".so"), status
assert status.architectures["rocm"] == "gfx90a,gfx942,gfx950", status
assert "cuda" in status.reasons, status
"""

LOWERS = """
for backend in ("auto", "fused"):
    fn, args = program(backend)
    text = fn.trace(*args).lower(lowering_platforms=("rocm",)).as_text()
    (call,) = calls(text)
    for shape in ("128x4x128xbf16", "128x4x64xbf16", "128x4xbf16", "4x128xf32", "2x4xi32"):
        assert f"tensor<{shape}>" in call, (shape, call)
"""

EXPORTS = """
from jax import export
for backend, platforms in (("auto", ["rocm"]), ("auto", ["cpu", "rocm"]), ("fused", ["rocm"])):
    fn, args = program(backend)
    checks = kda_jax.export_checks()
    out = export.export(fn, platforms=platforms, disabled_checks=checks)(*args)
    again = export.deserialize(bytearray(out.serialize()))
    assert again.platforms == tuple(platforms)
    found = len(calls(again.mlir_module()))
    want = len({*platforms} & {*status.available_platforms})
    assert found == want, (backend, platforms, found)
"""

CALLS_FAIL = """
import ctypes
hip = ctypes.CDLL("libamdhip64.so.7")
hip.hipGetErrorString.restype = ctypes.c_char_p
assert b"stub" in hip.hipGetErrorString(100)
"""


def run(script: str, library_path: str) -> subprocess.CompletedProcess[str]:
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    environment["LD_LIBRARY_PATH"] = library_path
    command = [sys.executable, "-c", PREAMBLE + script]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    where = run("print(rocm_module.library())", "").stdout.strip()
    if Path(where).exists() and STUB.is_dir():
        return
    reason = f"{where} is not built: make amd-library with this Python"
    if os.environ.get("KDA_AMD") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.parametrize("script", [REGISTERS, LOWERS, EXPORTS, CALLS_FAIL])
def test_with_a_stub_of_the_runtime(script: str) -> None:
    done = run(PROVIDED + script, str(STUB))
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_the_runtime_the_rest_works() -> None:
    if run("import ctypes; ctypes.CDLL('libamdhip64.so.7')", "").returncode == 0:
        pytest.skip("ROCm's runtime is installed here")
    done = run(
        """
import importlib.util, jax.numpy as jnp
class Finder:  # the module is there, its runtime is not
    def find_spec(name, path=None, target=None):
        if name == "kda_jax._native_rocm":
            return importlib.util.spec_from_file_location(name, rocm_module.library())
sys.meta_path.insert(0, Finder)
import kda_jax
status = kda_jax.native.status()
assert "rocm" not in status.available_platforms
print(status.reasons["rocm"])
x = jnp.ones((1, 5, 2, 64))
out = kda_jax.chunk_kda_prefill(x, x, x, x, x[..., 0], jnp.zeros(2), jnp.zeros((2, 64))).out
assert bool(jnp.isfinite(out).all())
""",
        "",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "libamdhip64.so.7" in done.stdout, done.stdout
