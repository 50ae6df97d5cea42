"""The trainer of the recall model: its data, its gradient, and that a resumed run is the same."""

from __future__ import annotations

import copy
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import quick_jit

from benchmarks.recall import __main__ as command
from benchmarks.recall import data
from benchmarks.recall.config import CONFIG
from benchmarks.recall.trainer import Settings, Trainer, right_share
from kda_jax import ChunkMetadata
from kda_jax.models import from_config
from kda_jax.models.training import mean_loss, next_token_loss
from kda_jax.serving.recall_text import ANSWER_SIZE, QUESTION_SIZE

TINY = copy.deepcopy(CONFIG)
TINY["text_config"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
TINY["text_config"]["linear_attn_config"] |= {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 1,
    "head_dim": 16,
}


def tiny() -> Settings:
    """A level is passed at once; equal settings share their compiled steps."""
    return Settings(
        rooms=(64, 128), tokens=128, warmup=2, pass_mark=0.0, backend="chunked", config=TINY
    )


@pytest.fixture(scope="module", autouse=True)
def quick():
    """The trainer's steps, compiled without optimization."""
    with mock.patch.object(jax, "jit", quick_jit):
        yield


def test_marked_bytes_are_the_answers_to_the_questions_before_them():
    packed = data.batch(128, 256, (0, data.TRAINING, 5))
    starts, lengths = packed.metadata.seqs[:, 0], packed.metadata.seqs[:, 1]
    assert len(starts) == 2 and (lengths <= 128).all() and (lengths > 100).all()
    asked = 0
    for start, length in zip(starts, lengths, strict=True):
        text = bytes(packed.tokens[start : start + length].astype(np.uint8)).decode()
        marks = packed.weights[start : start + length] > 0
        listed, *questions = text.split("?")
        values = {line[:2]: line[2:] for line in listed.splitlines() if line[0].isalpha()}
        section = listed[listed.rindex("@") + 1]
        right = "".join(f"{values[each[:2]]}{section}\n" for each in questions)
        assert questions and text[len(listed) :] == "".join(
            f"?{each[:2]}{values[each[:2]]}{section}\n" for each in questions
        )
        assert "".join(np.array(list(text))[marks]) == right
        period = np.arange(length - len(listed)) % (QUESTION_SIZE + ANSWER_SIZE)
        assert (marks[len(listed) :] == (period >= QUESTION_SIZE)).all()
        assert not marks[: len(listed)].any()
        asked += len(questions)
    assert packed.weights.sum() == asked * ANSWER_SIZE


def test_training_and_held_out_sequences_differ():
    one, other = (data.batch(128, 256, (0, kind, 0)).tokens for kind in (0, 1))
    assert (one != other).any()
    assert (one == data.batch(128, 256, (0, 0, 0)).tokens).all()


def test_right_share_counts_whole_answers():
    packed = data.batch(128, 256, (0, data.HELD_OUT, 1))
    logits = np.zeros((256, 256), np.float32)
    logits[np.arange(255), packed.tokens[1:]] = 1
    answers = round(packed.weights.sum()) // ANSWER_SIZE
    assert right_share(logits, packed.tokens, packed.weights) == 1
    # One wrong digit in one of the answers, and one wrong byte outside of all.
    first = int(np.argmax(packed.weights))
    logits[first + 1] = 0
    logits[0] = 0
    share = right_share(jnp.asarray(logits), packed.tokens, packed.weights)
    assert share == pytest.approx(1 - 1 / answers)


def test_weights_choose_what_the_loss_is_the_mean_of():
    random = np.random.default_rng(0)
    metadata = ChunkMetadata.from_seq_lens([5, 9], capacity="bucket")
    tokens = random.integers(0, 11, 64).astype(np.int32)
    logits = random.normal(size=(64, 11)).astype(np.float32)
    weights = random.uniform(0, 2, 64).astype(np.float32)
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    pairs = [i for i in range(1, 14) if i != 5]  # rows that the row before predicts
    nll = np.array([-log_p[i - 1, tokens[i]] for i in pairs])
    np.testing.assert_allclose(mean_loss(logits, tokens, metadata), nll.mean(), rtol=1e-5)
    want = (nll * weights[pairs]).sum() / weights[pairs].sum()
    np.testing.assert_allclose(mean_loss(logits, tokens, metadata, weights), want, rtol=1e-5)
    assert mean_loss(logits, tokens, metadata, np.zeros(64, np.float32)) == 0


def test_the_gradient_is_finite_and_lowers_the_loss_of_a_fixed_batch():
    trainer = Trainer.start(tiny())
    packed = data.batch(128, 128, (0, data.TRAINING, 0))

    def loss(model):
        return next_token_loss(
            model,
            packed.tokens,
            packed.metadata,
            max_length=128,
            weights=packed.weights,
            backend="chunked",
        )

    gradient_of = quick_jit(jax.value_and_grad(loss))
    model, losses = trainer.model, []
    for _ in range(3):
        value, gradient = gradient_of(model)
        losses.append(float(value))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
        model = jax.tree.map(lambda w, g: w - 0.02 * g, model, gradient)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path):
    through, file = Trainer.start(tiny()), tmp_path / "state.safetensors"
    losses = [through.advance() for _ in range(4)]
    stopped = Trainer.start(tiny())
    assert [stopped.advance() for _ in range(2)] == losses[:2]
    stopped.save(file)
    resumed = Trainer.resume(tiny(), file)
    assert [resumed.advance() for _ in range(2)] == losses[2:]
    assert (resumed.step, resumed.level, resumed.share) == (4, through.level, through.share)
    for one, other in zip(
        jax.tree.leaves((through.model, through.average, through.optimizer)),
        jax.tree.leaves((resumed.model, resumed.average, resumed.optimizer)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert resumed.held_out(1) == through.held_out(1)
    # And it did move: both the weights and their average.
    start = Trainer.start(tiny())
    for name in ("model", "average"):
        before, after = getattr(start, name), getattr(resumed, name)
        assert (before.lm_head.weight[...] != after.lm_head.weight[...]).any(), name


def test_the_command_writes_the_model_and_what_it_took(tmp_path, monkeypatch):
    """Unless it answers too little; a run that has ended is judged again, not trained on."""

    def run(least: str) -> int:
        where = ["--run", tmp_path / "run", "--output", tmp_path / "model", "--results", tmp_path]
        more = ["--least", least, "--every", "2", "--batches", "1", "--steps", "3"]
        monkeypatch.setattr("sys.argv", ["recall", *map(str, where), *more])
        return command.main()

    monkeypatch.setattr(command, "Settings", lambda **_: tiny())
    assert run("0.5") == 1 and not (tmp_path / "model").exists()
    assert run("0") == 0
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    results = json.loads((tmp_path / "recall_cpu.json").read_text())
    assert (results["steps"], results["settings"]["seed"]) == (3, 0)
    assert set(results["held_out"]) == {"64", "128"}
    page = (tmp_path / "recall_cpu.md").read_text()
    assert "3 steps, seed 0" in page and "| 128 | 0.00% |" in page


def test_levels_advance_when_the_running_share_passes():
    trainer = Trainer.start(tiny())
    rooms = {trainer.next_room()}
    trainer.advance()
    assert rooms == {64} and (trainer.level, trainer.share) == (1, 0.0)
    for _ in range(4):
        rooms.add(trainer.next_room())
        trainer.advance()
    assert rooms == {64, 128} and trainer.level == 1


def test_rooms_that_do_not_fill_a_step_are_refused():
    with pytest.raises(ValueError, match=r"rooms holds 96, want multiples of 64"):
        Settings(rooms=(64, 96), tokens=960)
    with pytest.raises(ValueError, match=r"that divide tokens, 960"):
        Settings(rooms=(128,), tokens=960)


def test_the_shipped_config_is_a_kimi_k3():
    config = from_config(CONFIG)
    kinds = [config.is_full_attention(i) for i in range(config.num_hidden_layers)]
    assert config.model_type == "kimi_k3" and kinds == [False, False, False, True]
    assert config.moe_layers == (1, 2, 3) and config.gate_lower_bound == -5.0
    assert config.linear_head_dim in (64, 128)  # what `fused` takes
