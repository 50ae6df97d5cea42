"""The registry, `supports`, and the policy for steps that carry checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest

from kda_jax import (
    CallSpec,
    ChunkMetadata,
    KDAResult,
    backends,
    checkpoint_alignment,
    chunk_kda_prefill,
    register_backend,
    supports,
)
from kda_jax.testing import assert_matches_scan, make_case

SPEC = CallSpec(
    platform="cpu",
    q_dtype="float32",
    k_dtype="float32",
    v_dtype="float32",
    g_dtype="float32",
    beta_dtype="float32",
    H=2,
    K=64,
    V=64,
    gate="bounded",
    chunk_size=64,
    checkpoints=False,
    groups=None,
)
WITH_CHECKPOINTS = dataclasses.replace(SPEC, checkpoints=True)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A third party's backend: the recurrence, which notes that it ran."""

    name: str = "recording"
    checkpoint_alignment: int | None = None
    refuses: str | None = None
    calls: tuple[list[int], ...] = dataclasses.field(default=([],), hash=False)

    def unsupported(self, spec: CallSpec) -> str | None:
        return self.refuses

    def run(self, inputs: Any, config: Any, metadata: ChunkMetadata) -> KDAResult:
        self.calls[0].append(metadata.capacity.tokens)
        return backends.get("scan").run(inputs, config, metadata)


class FusedStub(Recording):
    """Stands in for the fused backend, so that the policy is tested where it is not built."""


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> FusedStub:
    stub = FusedStub(name="fused", checkpoint_alignment=1, calls=([],))
    monkeypatch.setattr(backends, "_fused", lambda: (stub, stub))
    return stub


@pytest.fixture
def no_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = backends._Missing("it is not built here; use 'chunked'")
    monkeypatch.setattr(backends, "_fused", lambda: (missing, missing))


def test_names_and_unknown() -> None:
    assert set(backends.names()) >= {"scan", "chunked", "fused"}
    for call in (
        lambda: backends.get("triton"),
        lambda: supports("triton"),
        lambda: backends.resolve("triton", SPEC),
    ):
        with pytest.raises(ValueError, match=r"'triton', want one of \('auto', 'fused'"):
            call()


def test_auto_without_fused(no_fused: None) -> None:
    support = supports(K=64)
    assert support and support.backend == "chunked"
    assert "not built here" in support.reason
    assert supports(checkpoints=True).backend == "chunked"
    assert checkpoint_alignment() == 1


def test_fused_missing_is_said(no_fused: None) -> None:
    support = supports("fused")
    assert not support and support.backend is None and "not built here" in support.reason
    with pytest.raises(NotImplementedError, match=r"backend 'fused' cannot run.*not built here"):
        backends.resolve("fused", SPEC)


def test_auto_takes_fused_where_it_supports_the_call(fused: FusedStub) -> None:
    assert supports().backend == "fused"
    object.__setattr__(fused, "refuses", "not this K; use 'chunked'")
    assert supports().backend == "chunked"
    assert not supports("fused")


def test_groups_belong_to_fused(no_fused: None) -> None:
    for name in ("scan", "chunked", "auto"):
        support = supports(name, groups=4)
        assert not support and "groups" in support.reason


def test_checkpoints_go_to_fused_and_nothing_else_does(registry: None, fused: FusedStub) -> None:
    register_backend(Recording())
    assert backends.resolve("recording", SPEC)[0].name == "recording"
    backend, reason = backends.resolve("recording", WITH_CHECKPOINTS)
    assert backend is fused and "cannot export" in reason
    assert checkpoint_alignment("recording") == 1


def test_policy_in_the_operator(registry: None, fused: FusedStub) -> None:
    mine = Recording(calls=([],))
    register_backend(mine)
    run = functools.partial(chunk_kda_prefill, backend="recording")
    assert_matches_scan(run, make_case("random", seq_lens=[20, 3], K=16, V=8))
    assert mine.calls[0] and not fused.calls[0]
    mine.calls[0].clear()
    case = make_case("random", seq_lens=[20, 3], K=16, V=8, checkpoint_offsets=[[7], []])
    assert_matches_scan(run, case)
    assert fused.calls[0] and not mine.calls[0]


def test_no_export_anywhere_is_said(registry: None, no_fused: None) -> None:
    register_backend(Recording())
    assert supports("recording") and not supports("recording", checkpoints=True)
    assert checkpoint_alignment("recording") is None
    case = make_case("random", seq_lens=[20], K=16, V=8, checkpoint_offsets=[[7]])
    with pytest.raises(NotImplementedError, match=r"cannot export states.*Split the prompt"):
        chunk_kda_prefill(*case.args, **case.kwargs, backend="recording")


def test_explicit_names_never_fall_back(registry: None, fused: FusedStub) -> None:
    register_backend(Recording(refuses="only on Sundays; use 'chunked'"))
    for spec in (SPEC, WITH_CHECKPOINTS):
        with pytest.raises(NotImplementedError, match=r"backend 'recording'.*only on Sundays"):
            backends.resolve("recording", spec)


def test_alignment_is_checked_on_the_host(registry: None) -> None:
    register_backend(Recording(checkpoint_alignment=64))
    assert checkpoint_alignment("recording") == 64
    case = make_case("random", seq_lens=[70, 100], K=16, V=8, checkpoint_offsets=[[64], [65]])
    run = functools.partial(chunk_kda_prefill, backend="recording")
    with pytest.raises(ValueError, match="65 on sequence 1 is not a multiple of 64"):
        run(*case.args, **case.kwargs)
    aligned = make_case("random", seq_lens=[70, 100], K=16, V=8, checkpoint_offsets=[[64], []])
    assert_matches_scan(run, aligned)


def test_registration(registry: None) -> None:
    first, second = Recording(), Recording(checkpoint_alignment=1)
    register_backend(first)
    with pytest.raises(ValueError, match="registered already"):
        register_backend(second)
    register_backend(second, replace=True)
    assert backends.get("recording") is second
    for reserved in ("auto", "scan", "chunked", "fused"):
        with pytest.raises(ValueError, match="reserved"):
            register_backend(Recording(name=reserved), replace=True)


def test_platform_follows_the_default_device() -> None:
    assert backends.current_platform() in ("cpu", "cuda", "rocm", "tpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert backends.current_platform() == "cpu"


def test_supports_takes_any_dtype_form() -> None:
    for dtype in ("float32", np.float32, jax.numpy.bfloat16):
        assert supports("chunked", dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is int8, want bfloat16, float16 or float32"),
        ({"K": 257}, "K is 257, want 1..256"),
        ({"V": 0}, "V is 0, want 1..256"),
        ({"H": 0}, "H is 0, want at least 1"),
        ({"lower_bound": -9}, "lower_bound is -9, want a number in [-5, 0)"),
        ({"chunk_size": 48}, "chunk_size is 48, want one of"),
        ({"groups": 0}, "groups is 0, want an integer >= 1"),
        ({"platform": "xyz"}, "platform is 'xyz', want one of ('cpu', 'cuda', 'rocm', 'tpu'), or"),
        ({"platform": "gpu"}, "JAX's 'gpu' is either 'cuda' or 'rocm'"),
        ({"platform": ""}, "platform is '', want one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_supports_refuses_what_the_operator_refuses(options: Any, message: str) -> None:
    """A mistake is no answer: "chunked" would not run it either."""
    with pytest.raises(ValueError, match=re.escape(message)):
        supports(**options)


def test_assert_matches_scan_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chex", None)
    with pytest.raises(ImportError, match=r"the package chex .*pip install 'kda-jax\[test\]'"):
        assert_matches_scan(chunk_kda_prefill)
