"""How large a model is: counted from shapes, so that no weight is needed.

python -m kda_jax.models.sizes            # the released models on 8 devices
"""

from __future__ import annotations

import dataclasses
import math
import sys

import jax
from jax.sharding import AbstractMesh, Mesh

from ..layer_types import KDAState
from .cache import empty_cache
from .config import ModelConfig
from .decoder import LanguageModel
from .hf_config import from_config
from .mla import MLACache
from .names import parameters
from .published import KIMI_K3, KIMI_LINEAR_48B_A3B
from .sharding import device_bytes, parameter_spec
from .weights import abstract_model

# A 4-bit float per weight, and one byte of scale per 32 weights.
_MXFP4_BYTES = 0.5 + 1 / 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Counts and bytes; device: of one device of the mesh.

    parameters: all. active: those that one token uses, without the embedding (a table look-up).
    file_bytes: with experts in MXFP4 and the rest in 16 bits, as Kimi-K3 is published.
    device_bytes: as held here, in the config's dtype; device_file_bytes: as in file_bytes.
    recurrent_bytes, conv_bytes: of one request in one KDA layer on one device.
    mla_bytes: of one token of one request in all MLA layers on one device.
    kda_layers, mla_layers: how many.
    """

    parameters: int
    active: int
    file_bytes: int
    device_bytes: int
    device_file_bytes: int
    recurrent_bytes: int
    conv_bytes: int
    mla_bytes: int
    kda_layers: int
    mla_layers: int

    def request_bytes(self, tokens: int) -> int:
        """What one request of that many tokens keeps on one device."""
        return self.kda_layers * (self.recurrent_bytes + self.conv_bytes) + self.mla_bytes * tokens

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e9:,.1f} billion parameters, {self.active / 1e9:,.1f} active; "
            f"{self.file_bytes / 1e9:,.0f} GB with experts in MXFP4\n"
            f"per device: {self.device_bytes / 1e9:,.1f} GB, "
            f"{self.device_file_bytes / 1e9:,.1f} GB with experts in MXFP4\n"
            f"per request and device: {self.recurrent_bytes / 2**20:.2f} MiB of state and "
            f"{self.conv_bytes / 2**10:.1f} KiB of window in each of {self.kda_layers} KDA layers, "
            f"{self.mla_bytes / 2**10:.1f} KiB per token in {self.mla_layers} MLA layers together"
        )


def parameter_count(model: LanguageModel) -> int:
    """Of a model or of its shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


def sizes(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Sizes:
    """Of a model on a mesh, which may be abstract.

    Raises:
      ValueError: a parameter does not divide over the mesh; names it.
    """
    model = abstract_model(config)
    experts = held_experts = 0
    for name, leaf in parameters(model).items():
        if ".mlp.experts." in name:
            experts += math.prod(leaf.shape)
            spec = parameter_spec(name, leaf.shape, mesh)
            split = math.prod(mesh.shape[axis] for axis in spec if axis is not None)
            held_experts += math.prod(leaf.shape) // split
    total = parameter_count(model)
    used = config.num_experts_per_token / max(1, config.num_experts)
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    held = device_bytes(model, mesh)
    expert_bytes = model.embed_tokens.weight.dtype.itemsize
    heads = config.linear_num_heads // mesh.shape.get("model", 1)
    tokens = 64
    cache = jax.eval_shape(lambda: empty_cache(config, 1, tokens, heads=heads))
    kda = [x for x in cache.layers if isinstance(x, KDAState)]
    mla = [x for x in cache.layers if isinstance(x, MLACache)]
    return Sizes(
        parameters=total,
        active=round(total - experts * (1 - used)) - table,
        file_bytes=round(experts * _MXFP4_BYTES) + 2 * (total - experts),
        device_bytes=held,
        device_file_bytes=round(held - held_experts * (expert_bytes - _MXFP4_BYTES)),
        recurrent_bytes=_bytes(kda[0].recurrent) if kda else 0,
        conv_bytes=_bytes(kda[0].conv) if kda else 0,
        mla_bytes=sum(_bytes(x.rows) for x in mla) // tokens,
        kda_layers=len(kda),
        mla_layers=len(mla),
    )


def _bytes(x: jax.Array) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def main() -> int:
    mesh = AbstractMesh((8,), ("model",))
    for name, config in (("Kimi-Linear-48B-A3B", KIMI_LINEAR_48B_A3B), ("Kimi-K3", KIMI_K3)):
        print(f"{name}, heads over 8 devices\n{sizes(from_config(config), mesh)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
