"""Hazard 28: a device that the kernel was not compiled for reports itself, before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kda_jax import ChunkMetadata, chunk_kda_prefill, devices, fused, native, supports
from kda_jax.native import NativeStatus


def fake(platform: str, arch: str | None, number: int = 0) -> Any:
    """A device as JAX would show it."""
    version = {"cuda": "PJRT C API\ncuda 13000", "rocm": "PJRT C API\nrocm 70200"}[platform]
    return SimpleNamespace(
        platform="gpu",
        client=SimpleNamespace(platform_version=version),
        compute_capability=arch,
        device_kind="a card",
        id=number,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(platform, built, devices): a process with these devices and a library for ``built``.

    It does not touch JAX's own idea of its devices: nothing here runs on them.
    """
    real = jax.local_devices

    def make(platform: str, built: str, found: list[Any]) -> None:
        def local_devices(*args: Any, backend: str | None = None, **kwargs: Any) -> list[Any]:
            return found if backend == platform else real(*args, backend=backend, **kwargs)

        status = NativeStatus(
            available_platforms=("cpu", platform),
            libraries={"cpu": "/lib/_native.so", platform: f"/lib/_native_{platform}.so"},
            ffi_versions={"cpu": (0, 1), platform: (0, 1)},
            jaxlib_ffi_version=(0, 3),
            architectures={platform: built},
        )
        monkeypatch.setattr(jax, "local_devices", local_devices)
        monkeypatch.setattr(native, "status", lambda: status)
        devices._architectures.cache_clear()

    yield make
    devices._architectures.cache_clear()


@pytest.mark.parametrize(
    ("device", "built", "runs"),
    [
        ("9.0", "80,90", True),
        ("8.0", "80,90", True),
        ("8.6", "80,90", True),  # machine code of the same generation
        ("8.9", "80,90", True),
        ("10.0", "80,90", True),  # the driver compiles the PTX
        ("12.0", "80,90", True),
        ("7.5", "80,90", False),
        ("7.0", "80", False),
        ("8.0", "90", False),
        ("9.0", "80-real", False),
        ("8.6", "80-real", True),
        ("8.0", "86-real", False),
        ("9.0", "90a", True),
        ("10.0", "90a", False),
        ("10.0", "80-real, 90-virtual", True),
        ("8.9", "80-real,90-virtual", True),
        ("10.3", "100f", True),
        ("12.0", "100f", False),
        ("9.0", "", False),
        ("9.0", "what", False),
    ],
)
def test_cuda(device: str, built: str, runs: bool) -> None:
    why = devices.uncovered("cuda", device, built)
    assert (why is None) == runs
    if why:
        assert f"compute capability {device}" in why and "KDA_CUDA_ARCHITECTURES" in why


@pytest.mark.parametrize(
    ("device", "built", "runs"),
    [
        ("gfx942", "gfx90a,gfx942,gfx950", True),
        ("gfx950", "gfx942, gfx950", True),
        ("gfx942", "gfx942:sramecc+:xnack-", True),
        ("gfx940", "gfx90a,gfx942,gfx950", False),
        ("gfx90a", "gfx942,gfx950", False),
        ("gfx1100", "gfx90a,gfx942,gfx950", False),
    ],
)
def test_rocm(device: str, built: str, runs: bool) -> None:
    why = devices.uncovered("rocm", device, built)
    assert (why is None) == runs
    if why:
        assert device in why and "KDA_ROCM_ARCHITECTURES" in why and "'chunked'" in why


def test_where_there_is_no_telling() -> None:
    assert devices.uncovered("cpu", None, None) is None
    assert devices.uncovered("cuda", None, "80") is None
    assert devices.uncovered("rocm", "gfx942", None) is None
    assert devices.uncovered_here("cpu", None) is None
    assert devices.uncovered_here("cuda", "80") is None  # no such device here


def test_what_a_device_is() -> None:
    assert devices.platform_of(fake("rocm", None)) == "rocm"
    assert devices.platform_of(fake("cuda", "9.0")) == "cuda"
    assert devices.platform_of(jax.local_devices(backend="cpu")[0]) == "cpu"
    assert devices.architecture(fake("rocm", "gfx942:sramecc+:xnack-")) == "gfx942"
    assert devices.architecture(jax.local_devices(backend="cpu")[0]) is None


@pytest.mark.parametrize(
    ("platform", "built", "good", "bad"),
    [("cuda", "80,90", "9.0", "7.5"), ("rocm", "gfx942,gfx950", "gfx950", "gfx1100")],
)
def test_fused_reports_the_architecture(
    machine: Any, platform: str, built: str, good: str, bad: str
) -> None:
    machine(platform, built, [fake(platform, good)])
    assert supports("fused", platform=platform)
    assert supports("auto", platform=platform).backend == "fused"

    # One of two is enough to refuse: a sharded program would use both.
    machine(platform, built, [fake(platform, good), fake(platform, bad, 1)])
    answer = supports("fused", platform=platform)
    assert not answer and bad in answer.reason and "does not run" in answer.reason
    answer = supports("auto", platform=platform)
    assert answer.backend == "chunked" and bad in answer.reason

    machine(platform, built, [])  # lowering for a machine that is elsewhere
    assert supports("fused", platform=platform)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_what_a_gpu_kernel_has(machine: Any, platform: str) -> None:
    machine(platform, "80", [])
    assert supports("fused", platform=platform, chunk_size=32)
    small = supports("fused", platform=platform, chunk_size=16)
    assert not small and "chunks of 32 and 64 tokens, not 16" in small.reason
    assert supports("fused", platform="cpu", chunk_size=16)
    wide = supports("fused", platform=platform, dtype="float32")
    assert not wide and "bfloat16" in wide.reason


@pytest.mark.parametrize(
    ("dtype", "chunk_size", "calls"),
    [("bfloat16", 64, True), ("float32", 64, False), ("bfloat16", 16, False)],
)
def test_a_portable_program_calls_only_kernels_that_take_it(
    machine: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, chunk_size: int, calls: bool
) -> None:
    """What the CPU's kernel takes and a GPU's does not: that platform gets the chunked form."""
    machine("cuda", "80,90", [])
    fused._differentiable.cache_clear()
    x = jnp.ones((1, 20, 2, 64), dtype)
    metadata = ChunkMetadata.from_seq_lens([20], chunk_size=chunk_size)
    names = jnp.zeros(2), jnp.zeros((2, 64))
    step = jax.jit(
        lambda x, m: chunk_kda_prefill(x, x, x, x, x[..., 0], *names, metadata=m, lower_bound=-4.9)
    )
    text = step.trace(x, metadata).lower(lowering_platforms=("cuda",)).as_text()
    assert (native.TARGET in text) == calls
    jax.clear_caches()  # what was traced under the false status
    fused._differentiable.cache_clear()
