"""Models can be trained through the kernel: its gradients, and the loss of a few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from model_cases import k3, random_model, text
from programs import needs_fused, quick_jit

from kda_jax import Capacity, ChunkMetadata
from kda_jax.models.names import parameters
from kda_jax.models.training import next_token_loss

ROOT = Path(__file__).parents[1]


@needs_fused
@pytest.mark.parametrize(
    ("layers", "full"), [(1, ()), pytest.param(2, (2,), marks=pytest.mark.slow)]
)
def test_gradients_through_fused_equal_those_of_scan(layers, full):
    """Of a packed batch with padding; with two layers also through MLA and experts."""
    linear = k3(layers, full)["text_config"]["linear_attn_config"]
    linear |= {"num_heads": 1}
    model = random_model(k3(layers, full, linear_attn_config=linear))
    metadata = ChunkMetadata.from_seq_lens([40, 0, 17], capacity=Capacity(64, 4, 8), chunk_size=16)
    tokens = text(64)

    def run(backend):
        def loss(model):
            return next_token_loss(model, tokens, metadata, max_length=64, backend=backend)

        value, gradient = quick_jit(jax.value_and_grad(loss))(model)
        return value, parameters(gradient)

    (want_loss, want), (loss, got) = run("scan"), run("fused")
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name, value in want.items():
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(
            got[name], value, rtol=1e-3, atol=1e-4 * scale + 1e-8, err_msg=name
        )
        # Nothing is cut off, but the bias that only chooses and the mix of one candidate.
        none = name.endswith("e_score_correction_bias") or name.startswith("self_attention_res.0")
        assert (scale == 0) == none, name


@needs_fused
@pytest.mark.slow
def test_training_on_real_text_lowers_the_loss_as_scan_does():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from train import train
    finally:
        sys.path.pop(0)
    # A text that does not change: a token between two experts may go to the other one in `scan`,
    # and the runs part there.
    content = np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8)
    fused, scan = (np.array(train(content, 30, backend)) for backend in ("fused", "scan"))
    assert fused[-5:].mean() < 0.8 * fused[:2].mean()
    np.testing.assert_allclose(fused[:10], scan[:10], rtol=1e-3)
    assert abs(fused[-5:].mean() - scan[-5:].mean()) < 0.1


def test_the_example_names_what_is_wrong(tmp_path):
    """Before anything is built: a text that is not there, one that is too short, no step."""
    (tmp_path / "tiny.txt").write_text("x" * 100)
    cases = {
        ("tiny.txt",): "tiny.txt: 100 bytes, want more than 100, the longest sequence of a step",
        ("missing.txt",): "missing.txt cannot be read: No such file or directory; name text files",
        (".",): ". cannot be read: Is a directory; name text files",
        ("tiny.txt", "--steps", "0"): "--steps is 0, want at least 1",
    }
    script = f"""
import contextlib, io, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import train
for arguments in {list(cases)!r}:
    sys.argv, said = ["train.py", *arguments], io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        train.main()
    print(said.getvalue().splitlines()[-1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stdout.splitlines(), cases.values(), strict=True):
        assert message in line
