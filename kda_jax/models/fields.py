"""What a config's fields may hold, and errors that name the field, its value and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..layer_types import DTYPES

ACTIVATIONS = ("silu", "situ")


class Kind(NamedTuple):
    """accepts: whether a value is one of these; want: what they are, in words."""

    accepts: Callable[[Any], bool]
    want: str


def integer(low: int) -> Kind:
    return Kind(lambda x: _is_integer(x) and x >= low, f"an integer of at least {low}")


def or_null(kind: Kind) -> Kind:
    return Kind(lambda x: x is None or kind.accepts(x), f"{kind.want}, or null")


def one_of(*names: str) -> Kind:
    return Kind(lambda x: isinstance(x, str) and x in names, f"one of {', '.join(names)}")


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)  # true is an int to Python


def _is_finite(x: Any) -> bool:
    return (_is_integer(x) or isinstance(x, float)) and math.isfinite(x)


# A model of that many layers is a mistake, and the lists of its layers would fill the memory.
LAYERS = Kind(lambda x: _is_integer(x) and 1 <= x <= 10_000, "an integer from 1 to 10000")
COUNT, TOKEN = integer(1), Kind(_is_integer, "an integer")
FLAG = Kind(lambda x: isinstance(x, bool), "true or false")
FINITE = Kind(_is_finite, "a finite number")
POSITIVE = Kind(lambda x: _is_finite(x) and x > 0, "a finite number above 0")
BOUND = Kind(lambda x: _is_finite(x) and -5 <= x < 0, "a number in [-5, 0)")
TEXT = Kind(lambda x: isinstance(x, str), "a string")
TOKENS = Kind(
    lambda x: isinstance(x, tuple) and all(map(_is_integer, x)), "an integer or a list of integers"
)

# By the names of ModelConfig, in the order in which they are checked.
KINDS: dict[str, Kind] = {
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "linear_num_heads",
            "linear_head_dim",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "short_conv_kernel_size",
            "num_expert_group",
            "topk_group",
            "max_position_embeddings",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size"), or_null(COUNT)
    ),
    **dict.fromkeys(
        ("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size"),
        integer(0),
    ),
    **dict.fromkeys(
        (
            "use_full_rank_gate",
            "mla_use_output_gate",
            "moe_renormalize",
            "latent_moe_use_norm",
            "tie_word_embeddings",
            "fused_projections",
        ),
        FLAG,
    ),
    "gate_lower_bound": or_null(BOUND),
    "moe_router_activation_func": one_of("sigmoid", "softmax"),
    "routed_scaling_factor": FINITE,
    "rms_norm_eps": POSITIVE,
    "eos_token_id": TOKENS,
    "bos_token_id": or_null(TOKEN),
    "pad_token_id": or_null(TOKEN),
    "dtype": one_of(*DTYPES),
    "backend": TEXT,
    "activation.name": one_of(*ACTIVATIONS),
    "activation.beta": POSITIVE,
    "activation.linear_beta": POSITIVE,
}


def check(fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Checks each field against its kind.

    Args:
      fields: values by the names of KINDS; others are passed over.
      names: what a field is called where it comes from, if not so.

    Raises:
      ValueError: names the field, its value and what it should be.
    """
    for field, kind in KINDS.items():
        if field in fields:
            expect(names.get(field, field), fields[field], kind)


def expect(name: str, value: Any, kind: Kind) -> None:
    """Raises the ValueError of `check` unless value is of the kind."""
    if not kind.accepts(value):
        raise ValueError(f"{name} is {shown(value)}, want {kind.want}")


def shown(value: Any) -> str:
    """A value in a message, which is one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
