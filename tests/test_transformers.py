"""Parity with transformers: code that this project did not write, on the same weights.

`make parity-test` installs what it needs (extra `parity`) and runs it. Without torch or
transformers every test here is skipped; tests/test_models.py checks the stored cases anyway.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make parity-test")
pytest.importorskip("transformers", reason="transformers is not installed: make parity-test")
modeling = pytest.importorskip(
    "transformers.models.glm5_next.modeling_glm5_next",
    reason="this transformers has no glm5_next: make parity-test",
)

import transformers_models as theirs  # noqa: E402
from model_cases import layer_from  # noqa: E402
from programs import FUSED  # noqa: E402

from kda_jax import Capacity, ChunkMetadata, chunk_kda_prefill, models  # noqa: E402
from kda_jax.layer import KDALayerConfig, KimiDeltaAttention  # noqa: E402

# What is compared with `fused` here is compared with `chunked` everywhere else: CI leaves it out.
BACKENDS = [pytest.param("chunked", marks=pytest.mark.slow), FUSED]
LONGEST = 130
close = {"rtol": 1e-4, "atol": 1e-4}


class Pair:
    """One model of theirs, and ours from its files."""

    def __init__(self, folder, **changes):
        self.theirs = theirs.linear_model(**changes)
        self.theirs.save_pretrained(folder)
        self.ours = models.from_pretrained(folder)
        self.text = theirs.text(LONGEST + 20, self.ours.config.vocab_size)
        with torch.no_grad():
            self.out = self.theirs(self.tensor(self.text), output_hidden_states=True)
        self.logits = self.out.logits[0].numpy()

    def tensor(self, tokens):
        return torch.tensor(np.asarray(tokens)[None], dtype=torch.long)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"q_lora_rank": 10, "num_expert_group": 2, "topk_group": 1, "moe_renormalize": False},
    ],
    ids=["plain", "q_lora_and_groups"],
)
def pair(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("hf"), **request.param)


CAPACITY = Capacity(512, 64, 128)


def run(pair, parts, cache=None, backend="chunked", **options):
    metadata = ChunkMetadata.from_seq_lens([len(p) for p in parts], capacity=CAPACITY)
    tokens = metadata.pad_tokens(np.concatenate(parts).astype(np.int32), 0)
    if cache is None:
        cache = models.empty_cache(pair.ours.config, 64, 192)
    return models.prefill(pair.ours, tokens, metadata, cache, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_length_up_to_130(pair, backend):
    """Prompts of uneven lengths packed into steps, each on its own in their model."""
    left = list(range(1, LONGEST + 1))
    while left:
        group = []
        while left and len(group) < 64 and sum(group) + left[0] <= 512:
            group.append(left.pop(0))
        out, cache = run(pair, [pair.text[:n] for n in group], backend=backend)
        np.testing.assert_allclose(
            out.logits[: len(group)], pair.logits[np.array(group) - 1], **close
        )
        np.testing.assert_array_equal(cache.length[: len(group)], group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_of_every_layer(pair, backend):
    out, _ = run(pair, [pair.text[:100]], backend=backend, all_logits=True, hidden_states=True)
    assert len(out.hidden_states) == len(pair.out.hidden_states)
    for ours, reference in zip(out.hidden_states, pair.out.hidden_states, strict=True):
        np.testing.assert_allclose(ours[:100], reference[0, :100].numpy(), **close)
    np.testing.assert_allclose(out.logits[:100], pair.logits[:100], **close)


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_prefill_and_decode(pair, backend):
    """The parts of a prompt in several steps, then tokens one by one."""
    cache, done = None, 0
    for n in (1, 2, 63, 1, 60):
        out, cache = run(pair, [pair.text[done : done + n]], cache, backend=backend)
        done += n
        np.testing.assert_allclose(out.logits[0], pair.logits[done - 1], **close)
    active = jnp.arange(64) < 1
    for _ in range(20):
        tokens = jnp.full((64,), int(pair.text[done]), jnp.int32)
        out, cache = models.decode_step(pair.ours, tokens, cache, active)
        np.testing.assert_allclose(out.logits[0], pair.logits[done], **close)
        done += 1


def test_their_own_cache_says_the_same(pair):
    """Their split prefill and decode, with their cache, against our one prefill."""
    out, _ = run(pair, [pair.text[:LONGEST]], all_logits=True)
    cache, done = None, 0
    for n in (37, 64, 1, 1, 3):
        with torch.no_grad():
            theirs_out = pair.theirs(
                pair.tensor(pair.text[done : done + n]), past_key_values=cache, use_cache=True
            )
        cache = theirs_out.past_key_values
        np.testing.assert_allclose(
            out.logits[done : done + n], theirs_out.logits[0].numpy(), **close
        )
        done += n


def test_their_padded_batch_says_the_same(pair):
    lengths = [5, 64, 33, 1]
    ids = np.zeros((4, 64), np.int64)
    mask = np.zeros((4, 64), np.int64)
    for row, n in enumerate(lengths):
        ids[row, 64 - n :] = pair.text[row : row + n]
        mask[row, 64 - n :] = 1
    with torch.no_grad():
        reference = pair.theirs(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits[:, -1]
    out, _ = run(pair, [pair.text[row : row + n] for row, n in enumerate(lengths)])
    np.testing.assert_allclose(out.logits[:4], reference.numpy(), **close)


def test_greedy_generation(pair):
    prompts = [pair.text[:n] for n in (3, 40)]
    ours = models.generate(pair.ours, prompts, 12, eos=())
    for prompt, new in zip(prompts, ours, strict=True):
        with torch.no_grad():
            reference = pair.theirs.generate(
                pair.tensor(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        assert reference[0, len(prompt) :].tolist() == new


def test_our_files_load_there(pair, tmp_path):
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    models.save_pretrained(pair.ours, tmp_path, max_shard_bytes=100_000)
    model = KimiLinearForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(pair.tensor(pair.text)).logits[0]
    np.testing.assert_allclose(logits.numpy(), pair.logits, atol=1e-6)


@pytest.mark.parametrize("backend", ["scan", *BACKENDS])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_bounded_operator(length, backend):
    """glm5_next's recurrence with Kimi-K3's gate, with a state that goes in and comes out."""
    random = np.random.default_rng(length)
    H, D = 2, 64
    q, k, v, raw_g = random.standard_normal((4, 1, length, H, D)).astype("f")
    raw_beta = random.standard_normal((1, length, H)).astype("f")
    A_log = random.standard_normal(H).astype("f") * 0.3
    dt_bias = random.standard_normal((H, D)).astype("f") - 3
    state = random.standard_normal((1, H, D, D)).astype("f")
    result = chunk_kda_prefill(
        q, k, v, raw_g, raw_beta, A_log, dt_bias, initial_state=state, backend=backend
    )
    g = -5 * torch.sigmoid(
        torch.exp(torch.tensor(A_log))[:, None] * (torch.tensor(raw_g) + torch.tensor(dt_bias))
    )
    for function in ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"):
        out, final = getattr(modeling, function)(
            *map(torch.tensor, (q, k, v)),
            g=g,
            beta=torch.sigmoid(torch.tensor(raw_beta)),
            initial_state=torch.tensor(state.swapaxes(-1, -2).copy()),  # theirs is K first
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        np.testing.assert_allclose(result.out, out.numpy(), **close)
        np.testing.assert_allclose(result.final_state, final.numpy().swapaxes(-1, -2), **close)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused_projections", [False, True])
def test_bounded_layer(backend, fused_projections):
    """glm5_next's layer, whose forget gate is Kimi-K3's."""
    layer = theirs.bounded_layer()
    config = KDALayerConfig(
        hidden=40,
        heads=2,
        head_dim=64,
        dtype="float32",
        backend=backend,
        full_rank_gate=False,
        fused_projections=fused_projections,
    )
    tensors = {name: t.numpy() for name, t in layer.state_dict().items()}
    ours = layer_from(KimiDeltaAttention(config, rngs=None), tensors)
    for length in (1, 2, 64, 130):
        x = np.random.default_rng(length).standard_normal((length, 40)).astype("f")
        with torch.no_grad():
            want = layer(torch.tensor(x[None]))[0].numpy()
        y, _ = ours(x, ChunkMetadata.from_seq_lens([length]))
        np.testing.assert_allclose(y, want, **close)


def test_tokenizer_json(tmp_path):
    """The text of a prompt, through the tokenizer file of a folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    from kda_jax.models.tokenizer import load_tokenizer

    words = {"delta": 0, "attention": 1, "?": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path, 3)
    assert ours.encode("attention delta gamma") == [1, 0, 2]
    assert ours.decode([1, 0]) == "attention delta"
