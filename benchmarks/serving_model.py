"""The models that the serving benchmarks run: a folder's, or a random one in Kimi-K3's shape."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from flax import nnx

from kda_jax.models import KimiK3, LanguageModel, from_config, from_pretrained
from kda_jax.models.published import KIMI_K3

RECALL = Path(__file__).parents[1] / "tests" / "data" / "recall"


def random_k3(
    *, layers: int, hidden: int, heads: int, experts: int, vocab: int, dtype: str
) -> LanguageModel:
    """Kimi-K3 with fewer layers (MLA every fourth) and the widths that are given.

    All other widths are those of the released model, or scaled with `hidden` where they belong to
    the stream.
    """
    config: dict[str, Any] = copy.deepcopy(KIMI_K3)
    text = config["text_config"]
    scale = hidden / text["hidden_size"]
    for name in ("intermediate_size", "moe_intermediate_size", "routed_expert_hidden_size"):
        text[name] = max(64, round(text[name] * scale / 64) * 64)
    text |= {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_token": min(text["num_experts_per_token"], experts),
        "vocab_size": vocab,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    text["linear_attn_config"] |= {
        "kda_layers": [i for i in range(1, layers + 1) if i % 4],
        "full_attn_layers": list(range(4, layers + 1, 4)),
        "num_heads": heads,
    }
    return KimiK3(from_config(config, dtype=dtype), rngs=nnx.Rngs(0))


def describe(model: LanguageModel) -> dict[str, Any]:
    """Its sizes, JSON-compatible."""
    c = model.config
    return {
        "layers": c.num_hidden_layers,
        "mla_layers": len(c.full_attn_layers),
        "hidden": c.hidden_size,
        "heads": c.linear_num_heads,
        "head_dim": c.linear_head_dim,
        "experts": c.num_experts,
        "dtype": c.dtype,
    }


def line(facts: dict[str, Any]) -> str:
    """One line for a page."""
    kda = facts["layers"] - facts["mla_layers"]
    return (
        f"{kda} KDA and {facts['mla_layers']} MLA layer(s), hidden {facts['hidden']},"
        f" {facts['heads']} KDA heads of {facts['head_dim']}, {facts['experts']} experts,"
        f" {facts['dtype']}"
    )


def load(folder: Path) -> LanguageModel:
    """A published folder's model in its own dtype."""
    return from_pretrained(folder, quiet=True)
