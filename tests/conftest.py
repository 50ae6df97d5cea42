"""Fixtures shared by all tests, and on which platform and in which dtype they run.

    pytest                              # JAX's default device
    pytest --kda-platform cuda          # an error unless that is a CUDA device with the kernel
    pytest --kda-dtype bfloat16         # what tests/cases.py makes; on a GPU that is the default

References are computed on the CPU. A GPU's kernel has no float32 and no chunks of 16: a test of
these is skipped there, with the kernel's own reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest

from kda_jax import backends, supports

PLATFORMS = ("cpu", "cuda", "rocm")
DTYPES = ("float32", "bfloat16", "float16")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kda_jax")
    group.addoption("--kda-platform", choices=PLATFORMS, help="default: JAX's default device")
    group.addoption("--kda-dtype", choices=DTYPES, help="default: float32, on a GPU bfloat16")


def pytest_configure(config: pytest.Config) -> None:
    platform = config.getoption("--kda-platform")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    found = backends.current_platform()
    dtype = config.getoption("--kda-dtype") or ("float32" if found == "cpu" else "bfloat16")
    os.environ["KDA_TEST_DTYPE"] = dtype  # for tests/cases.py
    if platform is None:
        return
    if found != platform:
        raise pytest.UsageError(f"--kda-platform {platform}: JAX's default device is on {found}")
    # Without this, a kernel that is missing would skip its tests and the run would pass.
    support = supports("fused", dtype="bfloat16", K=64, V=32)
    if not support:
        raise pytest.UsageError(f"--kda-platform {platform}: {support.reason}")


# The files that take longest, first, so that the last one to finish is a short one where each file
# is with one process (pytest-xdist with --dist loadfile --no-loadscope-reorder).
LONGEST = (
    *("serving_model", "state_pool_transforms", "recall_training", "recall_model", "cli"),
    *("savings", "prefix_check", "models_steps", "parity", "models_generation", "chunked"),
    *("state_pool_memory", "models", "serving_process", "models_sharding", "gradients"),
    *("sharding", "transforms", "benchmarks", "isolation", "hazards", "layer", "layer_pool"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("loadscopereorder", True):  # without --no-loadscope-reorder: as collected
        return
    order = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_report_header() -> str:
    device = jax.devices()[0]
    return (
        f"kda_jax: {backends.current_platform()} ({device.device_kind}), "
        + os.environ["KDA_TEST_DTYPE"]
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skips what a GPU's kernel says it does not have; on the CPU this is an error as any other."""
    try:
        return (yield)
    except NotImplementedError as error:
        if "on a GPU its kernel" in str(error) and backends.current_platform() != "cpu":
            pytest.skip(str(error))
        raise


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 arrays and arithmetic."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that the test registers are gone after it."""
    monkeypatch.setattr(backends, "_registry", dict(backends._registry))


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The CPU is the default device, whatever else is there."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
