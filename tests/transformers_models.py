"""Small random models of transformers, and what they compute: for the parity tests.

Nothing here is imported where torch or transformers is missing. As a script it writes the stored
cases of tests/data that the ordinary suite checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"


def small_config(**changes: Any) -> dict[str, Any]:
    """Fields of a small Kimi-Linear; K = V = 64, so that the native kernel takes it."""
    fields = {
        "vocab_size": 96,
        "hidden_size": 40,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "linear_attn_config": {
            "head_dim": 64,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
        },
    }
    return fields | changes


def randomize(module: Any, seed: int) -> None:
    """Weights of a size at which every part matters; no norm weight is 1 and no bias is 0."""
    import torch

    random = torch.Generator().manual_seed(seed)
    state = module.state_dict()
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=random)
        if name.endswith("A_log"):
            new = noise * 0.3
        elif name.endswith("dt_bias"):
            new = noise - 3
        elif name.endswith("e_score_correction_bias"):
            new = noise * 0.05
        elif "norm" in name:
            new = 1 + 0.2 * noise
        elif name.endswith("conv1d.weight"):
            new = noise * 0.5
        else:
            new = noise * tensor.shape[-1] ** -0.5
        tensor.copy_(new)


def linear_model(seed: int = 0, **changes: Any) -> Any:
    """transformers' Kimi-Linear, float32, eager attention."""
    import torch
    from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(**small_config(**changes), attn_implementation="eager")
    with torch.no_grad():
        model = KimiLinearForCausalLM(config).eval()
        randomize(model, seed)
    return model


def bounded_layer(seed: int = 0, heads: int = 2, head_dim: int = 64, hidden: int = 40) -> Any:
    """transformers' KDA layer of glm5_next: Kimi-K3's bounded gate, low-rank output gate."""
    import torch
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

    config = Glm5NextTextConfig(
        hidden_size=hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=heads,
        linear_head_dim=head_dim,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    )
    with torch.no_grad():
        layer = Glm5NextTextLinearAttention(config, 0).eval()
        randomize(layer, seed)
    return layer


def text(length: int, vocab: int, seed: int = 1) -> np.ndarray:
    """Token numbers; neither the padding nor the end of text among them."""
    return np.random.default_rng(seed).integers(3, vocab, length).astype(np.int32)


def write_cases() -> None:
    """The stored cases: a model with its logits and hidden states, and the bounded layer."""
    import torch
    from safetensors.numpy import save_file

    DATA.mkdir(exist_ok=True)
    changes = {"num_hidden_layers": 3, "hidden_size": 24, "vocab_size": 48, "num_experts": 4}
    changes |= {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    linear = small_config()["linear_attn_config"]
    linear |= {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 1}
    model = linear_model(7, **changes, linear_attn_config=linear)
    model.save_pretrained(DATA / "kimi_linear")
    (DATA / "kimi_linear" / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((DATA / "kimi_linear" / "config.json").read_text())
    tokens = text(80, config["vocab_size"])
    with torch.no_grad():
        out = model(torch.tensor(tokens[None], dtype=torch.long), output_hidden_states=True)
        layer = bounded_layer(3, heads=2, head_dim=16, hidden=16)
        x = torch.randn((1, 70, 16), generator=torch.Generator().manual_seed(5))
        y = layer(x)
    arrays = {"tokens": tokens, "logits": out.logits[0].numpy()}
    arrays |= {f"hidden.{i}": h[0].numpy() for i, h in enumerate(out.hidden_states)}
    save_file(arrays, DATA / "kimi_linear_outputs.safetensors")
    arrays = {name: t.numpy() for name, t in layer.state_dict().items()}
    save_file(arrays | {"x": x[0].numpy(), "y": y[0].numpy()}, DATA / "bounded_layer.safetensors")


if __name__ == "__main__":
    write_cases()
