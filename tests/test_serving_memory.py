"""Pools that do not fit are refused before they are made, with what would fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from cli_checks import one_line_error
from model_cases import k3

from kda_jax.cli import generate as generate_command
from kda_jax.cli import main, serve
from kda_jax.cli.errors import CliError
from kda_jax.models import from_config
from kda_jax.serving import EngineConfig, PoolSizes, memory

MODEL = from_config(k3(), backend="chunked")
CONFIG = EngineConfig(max_model_len=512, block_size=16, max_requests=4, cache_bytes=2**20)
RECALL = str(Path(__file__).parent / "data" / "recall")


def gpu(free: int) -> Any:
    """A device of which the allocator says what it has."""
    stats = {"bytes_limit": free + 1000, "bytes_in_use": 1000}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def sizes(**changes: int) -> tuple[EngineConfig, PoolSizes]:
    config = dataclasses.replace(CONFIG, **changes)
    return config, PoolSizes.of(config, MODEL)


def refused(free: int, **changes: int) -> str:
    with pytest.raises(MemoryError) as caught:
        memory.check_pools(*sizes(**changes), gpu(free))
    return str(caught.value)


def test_what_fits_passes() -> None:
    config, made = sizes()
    memory.check_pools(config, made, gpu(made.total_bytes))
    refused(made.total_bytes - 1)


def no_stats() -> Any:
    raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: memory_stats")


@pytest.mark.parametrize("stats", [lambda: None, lambda: {"bytes_limit": 0}, no_stats])
def test_a_device_that_does_not_say_is_let_pass(stats: Any) -> None:
    memory.check_pools(*sizes(), SimpleNamespace(platform="gpu", memory_stats=stats))


@pytest.mark.parametrize(
    ("changes", "free", "names", "proposed"),
    [
        ({"cache_bytes": 2**40}, 2**30, r"cache_bytes is 1099511627776 \(1,024.0 GiB\)", "cache_b"),
        ({"max_requests": 1000}, 2**23, "max_requests is 1000 and max_model_len 512", "max_req"),
        ({"live_tokens": 10**7}, 2**23, "live_tokens is 10000000", "live_tokens"),
        ({"max_model_len": 10**6}, 2**23, "and max_model_len 1000000", "max_requests 1 and max_m"),
    ],
)
def test_the_proposed_size_fits(
    changes: dict[str, int], free: int, names: str, proposed: str
) -> None:
    changes = {"budget": 2048, **changes}
    text = refused(free, **changes)
    assert re.search(names, text) and f"gpu has {memory.bytes_text(free)} free" in text
    tail = text[text.rindex(": ") if "; " not in text else text.rindex("; ") :]
    assert proposed in tail
    found = {name: int(n) for name, n in re.findall(r"([a-z_]+) (\d+)M?(?: |$)", tail)}
    if "cache_bytes" in changes:
        found["cache_bytes"] <<= 20
    memory.check_pools(*sizes(**changes | {"cache_bytes": 0} | found), gpu(free))


def test_nothing_fits() -> None:
    assert "not even one request of one block fits" in refused(1000)


def test_the_host_has_memory() -> None:
    free = memory.free_bytes(SimpleNamespace(platform="cpu", memory_stats=lambda: None))
    assert free is None or 2**20 < free < 2**50


def test_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    cpu = SimpleNamespace(platform="cpu", memory_stats=lambda: None)
    assert memory.free_bytes(cpu) == 8000 << 10
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 1\nfile 5\ninactive_file 100000\nactive_file 600000\nslab_reclaimable 300000\n"
    )
    for limit, free in (("max", 8000 << 10), ("5000000", 3000000), ("1000000", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.free_bytes(cpu) == free
    (tmp_path / "meminfo").unlink()
    assert memory.free_bytes(cpu) is None


def test_options_are_named_as_they_are_typed(capsys: pytest.CaptureFixture) -> None:
    run = ["serve", RECALL, "--port", "0", "--warm-up", "0"]
    one_line_error(
        capsys,
        [*run, "--cache-bytes", "1000000G"],
        "--cache-bytes is 1073741824000000 (1,000,000.0 GiB), but cpu has ",
        "(--max-requests) take ",
        "M would fit",
    )
    one_line_error(
        capsys,
        [*run, "--live-tokens", "500"],
        "--live-tokens is 500, want at least --max-model-len, 8192",
    )
    one_line_error(
        capsys, [*run, "--budget", "9"], "--budget is 9, want at least 80", "--max-requests (16)"
    )


def test_a_step_that_does_not_fit_beside_the_pools() -> None:
    with (
        pytest.raises(CliError, match=r"beside the model and pools of 2.0 GiB: lower --budget"),
        serve._room_for_steps(2**31),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError), serve._room_for_steps(2**31):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_more_new_tokens_than_fit(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["generate", "--model", RECALL, "--prompt", "ab"]
    one_line_error(
        capsys,
        [*run, "--max-new-tokens", str(10**12)],
        "--max-new-tokens 1000000000000: the cache of 1 prompt(s) would take ",
        "would fit",
    )
    monkeypatch.setattr(generate_command, "free_bytes", lambda device: 1000)
    one_line_error(
        capsys, run, "--max-new-tokens 64", "1000 bytes free", "not even the prompts fit"
    )


def test_longer_than_the_models_own_maximum(capsys: pytest.CaptureFixture) -> None:
    run = ["serve", RECALL, "--port", "0", "--max-model-len", "8193", "--budget", "9"]
    assert main(run) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "warning --max-model-len 8193 is more than the model's own maximum, 8192" in out
