"""The released models at full size, from shapes alone: counts, bytes, and programs for ROCm."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from kda_jax import Capacity, ChunkMetadata, models, supports
from kda_jax.models.published import KIMI_K3, KIMI_LINEAR_48B_A3B
from kda_jax.models.sharding import ShardedSteps, cache_specs, model_shardings
from kda_jax.models.sizes import main, sizes
from kda_jax.models.weights import abstract_model

TP8 = AbstractMesh((8,), ("model",))


def test_published_sizes(capsys):
    """Kimi-K3: 2.8T parameters, 104B active, 1.56 TB of files, about 195 GB on each of 8 GPUs.
    Kimi-Linear: 48B and 3B by its name."""
    k3 = sizes(models.from_config(KIMI_K3), TP8)
    assert k3.parameters == pytest.approx(2.8e12, rel=0.01)
    assert k3.active == pytest.approx(104e9, rel=0.01)
    assert k3.file_bytes == pytest.approx(1.56e12, rel=0.005)
    # What is whole on every device (the way into the experts' latent space, low ranks) adds 4 %.
    assert 195e9 <= k3.device_file_bytes <= 205e9
    assert (k3.kda_layers, k3.mla_layers) == (69, 24)
    assert k3.recurrent_bytes == 0.75 * 2**20 and k3.conv_bytes == 3 * 12 * 128 * 3 * 2
    assert k3.mla_bytes == 24 * 576 * 2
    assert k3.request_bytes(0) == 69 * (k3.recurrent_bytes + k3.conv_bytes)
    linear = sizes(models.from_config(KIMI_LINEAR_48B_A3B), TP8)
    assert linear.parameters == pytest.approx(48e9, rel=0.03)
    assert linear.active == pytest.approx(3e9, rel=0.05)
    assert (linear.kda_layers, linear.mla_layers) == (20, 7)
    assert main() == 0
    printed = capsys.readouterr().out
    assert "2,779.5 billion parameters, 104.2 active; 1,560 GB" in printed
    assert "0.75 MiB of state and 27.0 KiB of window in each of 69 KDA layers" in printed


@functools.cache
def lowered(name):
    """The whole prefill on 8 devices, lowered for ROCm: shapes of its logits, and its text."""
    config = models.from_config({"k3": KIMI_K3, "linear": KIMI_LINEAR_48B_A3B}[name])
    steps = ShardedSteps(config, TP8)
    metadata = ChunkMetadata.from_seq_lens([5000, 3000], capacity=Capacity.bucket(8192, 4, 4))
    shape = jax.ShapeDtypeStruct
    metadata = jax.tree.map(lambda x: shape((1, *x.shape), x.dtype), metadata)
    cache = jax.eval_shape(lambda: models.empty_cache(config, 4, 16384))
    cache = jax.tree.map(
        lambda x, spec: shape((1, *x.shape), x.dtype, sharding=NamedSharding(TP8, spec)),
        cache,
        cache_specs(config, TP8),
    )
    model = abstract_model(config)
    model = jax.tree.map(
        lambda x, s: shape(x.shape, x.dtype, sharding=s), model, model_shardings(model, TP8)
    )
    # Where the native code is not built the program is that of the plain backend.
    backend = "fused" if supports("fused") else "chunked"
    traced = steps.prefill.trace(
        model, shape((1, 8192), jnp.int32), metadata, cache, backend=backend
    )
    return traced.out_info, traced.lower(lowering_platforms=("rocm",)).as_text(), backend


@pytest.mark.parametrize(("name", "heads"), [("k3", 12), ("linear", 4)])
def test_whole_prefill_lowers_for_rocm(name, heads):
    (logits, checkpoints, after), text, backend = lowered(name)
    assert logits.shape == (1, 4, 163840) and logits.dtype == jnp.float32
    assert after.length.shape == (1, 4)
    assert after.layers[0].recurrent.shape == (1, 4, 8 * heads, 128, 128)
    assert after.layers[3].rows.shape == (1, 4, 16384, 576)
    assert checkpoints.layers[0].recurrent.shape == (1, 4, 8 * heads, 128, 128)
    assert checkpoints.layers[3] is None
    # Only sums between the devices: after attention, after the MLPs and the experts, and of the
    # embedding. Nothing is gathered, around the operator or elsewhere.
    moved = set(re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text))
    assert moved == {"all_reduce"}
    if backend == "fused":
        calls = re.findall(r"custom_call @kda_prefill_v1.*", text)
        assert calls  # one function for all layers
        for call in calls:
            assert f"tensor<8192x{heads}x128xbf16>" in call
