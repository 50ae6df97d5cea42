"""Compile jitted functions for AMD GPUs with XLA's own ROCm backend on a machine without one.

    tools/amd/aot_setup.sh
    build/amd/aot-venv/bin/python tools/amd/aot.py check

`check` compiles a plain program and one with an FFI call for each GPU in DEVICES, prints the custom
calls of the compiled modules and asserts what they hold. As a module, :func:`compile_for` does it
for any function, after :func:`register` for each FFI target: XLA refuses to compile a call of a
target that is not registered for ROCM, so that success proves the registration, too. Nothing is
executed and nothing is timed.

The plugin registers itself only if it counts an AMD GPU, and asks a private JAX function, which is
replaced here; hence the exact versions in pyproject.toml's extra "rocm". The descriptions of the
GPUs, *.txtpb, are XLA's own (xla/tools/hlo_opt/gpu_specs).
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_BUILD = _HERE.parents[1] / "build" / "amd"
_STUBS = _BUILD / "stub-rocm"
DEVICES = {"MI300X": "gfx942", "MI350X": "gfx950"}
_SHAPE = re.compile(r"(\w+\[[\d,]*\])(?:\{([\d,]*)[^}]*\})?")


def with_stub_libraries() -> None:
    """Start this process again with the stubs on the loader's path, if they are not there yet."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    if str(_STUBS) in path.split(":"):
        return
    if not _STUBS.is_dir():
        raise SystemExit("aot.py: run tools/amd/aot_setup.sh first")
    environment = os.environ | {"LD_LIBRARY_PATH": f"{_STUBS}:{path}", "JAX_PLATFORMS": "cpu"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


@dataclass(frozen=True)
class CustomCall:
    """A custom call of a compiled module; shapes are like "bf16[16,64]{1,0}", with the layout."""

    target: str
    operands: tuple[str, ...]
    results: tuple[str, ...]


def _shapes(text: str) -> tuple[str, ...]:
    found = _SHAPE.findall(re.sub(r"/\*.*?\*/", "", text))
    return tuple(f"{shape}{{{layout}}}" for shape, layout in found)


def custom_calls(hlo: str) -> list[CustomCall]:
    """The custom calls in the text of a compiled module."""
    calls = []
    for line in hlo.splitlines():
        match = re.search(r"= (.*?) custom-call\((.*)\), custom_call_target=\"([^\"]+)\"", line)
        if match is None:
            continue
        results, arguments, target = match.groups()
        constraints = re.search(r"operand_layout_constraints=\{(.*?)\}(?:, \w+=|$)", line)
        operands = _shapes(constraints.group(1) if constraints else arguments)
        calls.append(CustomCall(target, operands, _shapes(results)))
    return calls


def register(name: str, library: str | Path, symbol: str) -> None:
    """Register the FFI handler ``symbol`` of ``library`` as target ``name`` on platform ROCM."""
    import jax

    handler = getattr(ctypes.CDLL(str(library)), symbol)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="ROCM")


def _topology(device: str) -> Any:
    import jax
    from jax._src import hardware_utils

    hardware_utils.num_available_amd_gpus = lambda *args, **kwargs: 1
    from jax.experimental import topologies

    jax.devices()
    return topologies.get_topology_desc(
        platform="rocm",
        topology_name=device,
        target_config=(_HERE / f"{device}.txtpb").read_text(),
        topology="1x1x1",
    )


def compile_for(device: str, fn: Callable, *args: Any) -> Any:
    """``jax.jit(fn)`` compiled for ``device``; the leaves of ``args`` have shape and dtype.

    Returns jax's Compiled; :func:`custom_calls` reads its ``as_text()``.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(_topology(device).devices), ("x",))
    placed = NamedSharding(mesh, PartitionSpec())

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    traced = jax.jit(fn).trace(*jax.tree.map(spec, args))
    return traced.lower(lowering_platforms=("rocm",)).compile()


def _check_library() -> Path:
    """aot_check.cc, compiled against the FFI headers of the installed jaxlib."""
    import jax

    library = _BUILD / "aot_check.so"
    command = ["g++", "-std=c++17", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, "-o", str(library), str(_HERE / "aot_check.cc")], check=True)
    return library


def check() -> None:
    """A plain program and an FFI call compile, and the module holds what was asked for."""
    import jax
    import jax.numpy as jnp

    register("aot_check", _check_library(), "aot_check")
    x = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
    result = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.softmax((a + b).astype(jnp.float32), axis=-1)

    def with_call(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("aot_check", result)(a * 2, b) + 1

    def unregistered(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("nobody_registered_this", result)(a, b)

    for device, arch in DEVICES.items():
        text = compile_for(device, plain, x, x).as_text()
        assert custom_calls(text) == [], text
        print(f"{device} ({arch}): the plain program compiles")
        calls = custom_calls(compile_for(device, with_call, x, x).as_text())
        print(f"{device} ({arch}): {calls}")
        operand = "bf16[16,64]{1,0}"
        assert calls == [CustomCall("aot_check", (operand, operand), ("f32[16,16]{1,0}",))]
        try:
            compile_for(device, unregistered, x, x)
        except jax.errors.JaxRuntimeError as error:
            assert "nobody_registered_this" in str(error), error
        else:
            raise AssertionError("a target that is not registered compiled")
    print("ok: compiled, not executed")


if __name__ == "__main__":
    if sys.argv[1:] != ["check"]:
        raise SystemExit(__doc__)
    with_stub_libraries()
    check()
