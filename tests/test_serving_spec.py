"""`KDACacheSpec`: shapes and bytes, and checkpoints on or off for every mix of backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from model_cases import LINEAR

from kda_jax import CallSpec, ChunkMetadata, KDAResult, backends, register_backend
from kda_jax.layer_types import KDALayerConfig
from kda_jax.models import from_config
from kda_jax.serving import KDACacheSpec, kda_cache_specs

K3 = KDALayerConfig()


@dataclasses.dataclass(frozen=True)
class Fake:
    """A backend that only answers questions. ``bounded_only`` refuses the softplus gate."""

    name: str
    checkpoint_alignment: int | None
    refuses: str | None = None
    bounded_only: bool = False
    refuses_checkpoints: bool = False

    def unsupported(self, spec: CallSpec) -> str | None:
        if self.bounded_only and spec.gate != "bounded":
            return "it has the bounded gate only; use 'chunked'"
        if self.refuses_checkpoints and spec.checkpoints:
            return "it is built without export; rebuild it"
        return self.refuses

    def run(self, inputs: Any, config: Any, metadata: ChunkMetadata) -> KDAResult:
        raise AssertionError("a spec must not run anything")


# What "fused" is, by case.
FUSED = {
    "exports": Fake("fused", 1),
    "aligned": Fake("fused", 64),
    "mute": Fake("fused", None),
    "missing": backends._Missing("it is not built here; use 'chunked'"),
    "bounded": Fake("fused", 1, bounded_only=True),
    "no export": Fake("fused", 1, refuses_checkpoints=True),
}
# What is configured, by case: a name, or a third party's backend.
CONFIGURED = {
    "auto": "auto",
    "chunked": "chunked",
    "scan": "scan",
    "fused": "fused",
    "third exports": Fake("third", 16),
    "third mute": Fake("third", None),
}
OFF = (None, None)
# (alignment, backend of the steps with checkpoints) by what is configured and what "fused" is.
# None: no step can run, so there is no spec. "bounded" is "exports" or, with softplus, "missing".
WANT: dict[str, dict[str, tuple[int | None, str | None] | None]] = {
    "auto": {
        "exports": (1, "fused"),
        "aligned": (64, "fused"),
        "mute": (1, "chunked"),
        "missing": (1, "chunked"),
        "no export": (1, "chunked"),
    },
    "chunked": dict.fromkeys(FUSED, (1, "chunked")),
    "scan": dict.fromkeys(FUSED, (1, "scan")),
    "fused": {
        "exports": (1, "fused"),
        "aligned": (64, "fused"),
        "mute": OFF,
        "missing": None,
        "no export": OFF,
    },
    "third exports": dict.fromkeys(FUSED, (16, "third")),
    "third mute": {
        "exports": (1, "fused"),
        "aligned": (64, "fused"),
        "mute": OFF,
        "missing": OFF,
        "no export": OFF,
    },
}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("flag", ["on", "use_prefill_checkpoint", "enable_prefix_caching", "0"])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("configured", CONFIGURED)
def test_every_combination(
    configured: str, fused: str, gate: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = FUSED[fused]
    monkeypatch.setattr(backends, "_fused", lambda: (stub, stub))
    backend = CONFIGURED[configured]
    if isinstance(backend, Fake):
        register_backend(backend)
        backend = backend.name
    config = dataclasses.replace(
        K3, backend=backend, lower_bound=-5.0 if gate == "bounded" else None
    )
    flags: dict[str, Any] = {}
    if flag == "0":
        flags["checkpoint_blocks"] = 0
    elif flag != "on":
        flags[flag] = False

    acts_as = {"bounded": "exports" if gate == "bounded" else "missing"}.get(fused, fused)
    want = WANT[configured][acts_as]
    if want is None:
        with pytest.raises(NotImplementedError, match="backend 'fused' cannot run this call"):
            KDACacheSpec.from_config(config, block_size=64, platform="rocm", **flags)
        return
    spec = KDACacheSpec.from_config(config, block_size=64, platform="rocm", **flags)
    alignment, exporter = want if flag == "on" else OFF
    assert spec.prefill_checkpoint_alignment == alignment
    assert spec.checkpoint_backend == exporter
    assert spec.num_prefill_checkpoint_blocks == (1 if exporter else 0)
    if configured == "third mute":  # plain steps stay where they were configured to run
        assert spec.backend == "third"
    assert spec.reason


@pytest.mark.usefixtures("registry")
def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(Fake("third", None))
    config = dataclasses.replace(K3, backend="third")
    monkeypatch.setattr(backends, "_fused", lambda: (FUSED["missing"],) * 2)
    reason = KDACacheSpec.from_config(config, block_size=64).reason
    assert "'third' cannot export" in reason and "not built here" in reason
    monkeypatch.setattr(backends, "_fused", lambda: (FUSED["exports"],) * 2)
    assert "runs on 'fused'" in KDACacheSpec.from_config(config, block_size=64).reason
    off = KDACacheSpec.from_config(config, block_size=64, use_prefill_checkpoint=False)
    assert off.reason == "use_prefill_checkpoint is False"


def test_kimi_k3_at_tp8() -> None:
    spec = KDACacheSpec.from_config(
        dataclasses.replace(K3, backend="chunked"), block_size=1536, heads=12, checkpoint_blocks=3
    )
    assert spec.state_shape == (12, 128, 128) and spec.state_dtype == "float32"
    assert spec.state_bytes == 3 * 2**18  # 0.75 MiB
    assert spec.conv_shape == (3 * 12 * 128, 3) and spec.conv_dtype == "bfloat16"
    assert spec.conv_bytes == 3 * 12 * 128 * 3 * 2
    assert spec.row_bytes == spec.state_bytes + spec.conv_bytes
    assert (spec.block_size, spec.num_prefill_checkpoint_blocks) == (1536, 3)
    hash(spec)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes(dtype: str) -> None:
    config = dataclasses.replace(K3, dtype=dtype, backend="chunked")
    spec = KDACacheSpec.from_config(config, block_size=64, heads=1)
    assert spec.conv_dtype == dtype
    assert spec.state_dtype == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size is 0, want at least 1"),
        ({"block_size": 64, "heads": 0}, "heads is 0, want at least 1"),
        ({"block_size": 64, "heads": 97}, "heads is 97, but the layer has 96"),
        ({"block_size": 64, "checkpoint_blocks": -1}, "checkpoint_blocks is -1"),
    ],
)
def test_refusals(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KDACacheSpec.from_config(K3, **arguments)  # type: ignore[arg-type]


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'triton', want one of"):
        KDACacheSpec.from_config(dataclasses.replace(K3, backend="triton"), block_size=64)


def test_a_model_has_one_spec_per_kda_layer() -> None:
    specs = kda_cache_specs(from_config(LINEAR), block_size=64, checkpoint_blocks=2)
    assert list(specs) == [0, 2]  # the config's list counts from 1; layer 1 is MLA
    assert specs[0] == specs[2]
    assert specs[0].state_shape == (2, 8, 8) and specs[0].conv_shape == (48, 3)
    assert specs[0].num_prefill_checkpoint_blocks == 2
