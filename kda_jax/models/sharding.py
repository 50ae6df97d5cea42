"""How a model lies on a mesh, and its steps under `jax.shard_map`.

    axis     what it splits
    model    heads (KDA and MLA), columns of the MLPs and of each expert, vocabulary
    expert   experts
    data     independent batches: every array of a step gets a leading axis

A mesh may lack an axis. Weights split over heads meet in two sums per layer (after o_proj and after
the MLP); around the operator nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..layer_types import KDAState
from .batch import Axes, Batch
from .cache import Checkpoints, ModelCache, empty_cache
from .config import ModelConfig
from .decoder import LanguageModel, Outputs, forward
from .mla import MLACache
from .names import parameter_name, parameters

# The last parts of a name, and which of the parameter's axes lies on which mesh axis.
_COLUMNS = (
    "q_proj.kernel",
    "k_proj.kernel",
    "v_proj.kernel",
    "f_b_proj.kernel",
    "b_proj.kernel",
    "g_proj.kernel",
    "g_b_proj.kernel",
    "q_b_proj.kernel",
    "kv_b_proj.kernel",
    "gate_proj.kernel",
    "up_proj.kernel",
)
_ROWS = ("o_proj.kernel", "down_proj.kernel", "routed_expert_up_proj.kernel")
_FIRST = ("q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias")
_VOCAB = ("embed_tokens.weight", "lm_head.weight")


def _axes_of(name: str) -> tuple[str | None, ...]:
    """The mesh axis of each leading axis of the parameter; None and the rest: not split."""
    end = ".".join(name.split(".")[-2:])
    if end == "routed_expert_down_proj.kernel":
        return ()  # the latent is whole everywhere: it is summed over devices and normalised
    if end in _ROWS or end in _VOCAB or name.rpartition(".")[2] in _FIRST:
        return ("model",)
    if end in _COLUMNS:
        return (None, "model")
    if name.endswith((".qkv_proj", ".experts.gate", ".experts.up")):
        experts = "expert" if ".experts." in name else None
        return (experts, None, "model")
    if name.endswith(".qkv_conv1d"):
        return (None, "model")
    return ("expert", "model") if name.endswith(".experts.down") else ()


def parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """How the parameter `name` lies on the mesh.

    Raises:
      ValueError: an axis does not divide; names the parameter.
    """
    spec = []
    for size, axis in zip(shape, _axes_of(name), strict=False):
        axis = axis if axis in mesh.shape else None
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{name} has {size} rows or columns to split over mesh axis {axis!r} of size"
                f" {mesh.shape[axis]}: choose a size that divides {size}"
            )
        spec.append(axis)
    return P(*spec)


def model_shardings(model: LanguageModel, mesh: Mesh | AbstractMesh) -> Any:
    """A NamedSharding for each parameter, as a tree like the model."""

    def one(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(parameter_name(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, model)


def shard_model(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    """The model with its weights placed on the mesh."""
    return jax.device_put(model, model_shardings(model, mesh))


def _present(mesh: Mesh | AbstractMesh, axis: str) -> str | None:
    return axis if axis in mesh.shape else None


def cache_specs(config: ModelConfig, mesh: Mesh | AbstractMesh) -> ModelCache:
    """Specs of a cache with a leading data axis: KDA states over heads, MLA rows whole.

    Conv windows hold q, k and v channels of a device's heads together, in this order.
    """
    data, model = _present(mesh, "data"), _present(mesh, "model")
    layers = tuple(
        MLACache(P(data))  # type: ignore[arg-type]
        if config.is_full_attention(i)
        else KDAState(P(data, None, model), P(data, None, model))  # type: ignore[arg-type]
        for i in range(config.num_hidden_layers)
    )
    return ModelCache(layers, P(data))  # type: ignore[arg-type]


def sharded_cache(config: ModelConfig, mesh: Mesh, sequences: int, max_length: int) -> ModelCache:
    """An empty cache on the mesh: [data, sequences, ...], zeros made on their devices."""
    size = mesh.shape.get("data", 1)
    shapes = jax.eval_shape(lambda: empty_cache(config, sequences, max_length))
    specs = cache_specs(config, mesh)

    def zeros(x: Any, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jnp.zeros((size, *x.shape), x.dtype, device=sharding)

    return jax.tree.map(zeros, shapes, specs)


@dataclasses.dataclass(frozen=True)
class ShardedSteps:
    """`prefill` and `decode_step` of one config on one mesh.

    Arrays have a leading axis of the size of the mesh's data axis (1 without one); metadata is
    stacked likewise, with one capacity: `stack_metadata`.
    """

    config: ModelConfig
    mesh: Mesh | AbstractMesh

    @property
    def axes(self) -> Axes:
        """The axes that the layers sum over."""
        return Axes(_present(self.mesh, "model"), _present(self.mesh, "expert"))

    @functools.cached_property
    def prefill(self) -> Any:
        """Jitted (model, tokens [data, T], metadata, cache) -> (logits, checkpoints, cache).

        logits: [data, N, V]. Static keyword: backend.
        """

        @functools.partial(jax.jit, static_argnames=("backend",))
        def run(model: Any, tokens: Any, metadata: Any, cache: Any, backend: Any = None) -> Any:
            def local(model: Any, *arrays: Any) -> Any:
                tokens, metadata, cache = jax.tree.map(lambda x: x[0], arrays)
                batch = Batch(metadata=metadata, start=cache.length)
                out, after, _ = forward(
                    model, tokens, batch, cache, None, backend=backend, axes=self.axes
                )
                return _with_data_axis((out.logits, out.checkpoints, after))

            tokens, metadata = self._place((tokens, metadata))
            return self._shard_map(local, model, 2)(model, tokens, metadata, cache)

        return run

    @functools.cached_property
    def decode_step(self) -> Any:
        """Jitted (model, tokens [data, D], cache, active bool [data, D]) -> (logits, cache).

        The cache is donated.
        """

        @functools.partial(jax.jit, donate_argnames=("cache",))
        def run(model: Any, tokens: Any, cache: Any, active: Any) -> Any:
            def local(model: Any, *arrays: Any) -> Any:
                tokens, active, cache = jax.tree.map(lambda x: x[0], arrays)
                batch = Batch(active=active, decode_start=cache.length)
                out, _, after = forward(model, tokens, batch, None, cache, axes=self.axes)
                return _with_data_axis((out.logits, after))

            tokens, active = self._place((tokens, active))
            return self._shard_map(local, model, 2, False)(model, tokens, active, cache)

        return run

    def _place(self, arrays: Any) -> Any:
        """Splits inputs over the data axis; on axes of type Auto the partitioner does."""
        if not self.mesh.abstract_mesh.explicit_axes:
            return arrays
        return jax.reshard(arrays, NamedSharding(self.mesh, P(_present(self.mesh, "data"))))

    def _shard_map(self, local: Any, model: Any, inputs: int, checkpoints: bool = True) -> Any:
        data, heads = _present(self.mesh, "data"), _present(self.mesh, "model")
        weights = jax.tree_util.tree_map_with_path(
            lambda path, leaf: parameter_spec(parameter_name(path), leaf.shape, self.mesh), model
        )
        cache = cache_specs(self.config, self.mesh)
        saved = Checkpoints(
            tuple(c if isinstance(c, KDAState) else None for c in cache.layers),
            P(data),  # type: ignore[arg-type]
            P(data),  # type: ignore[arg-type]
        )
        logits = P(data, None, heads)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(weights, *(P(data),) * inputs, cache),
            out_specs=(logits, saved, cache) if checkpoints else (logits, cache),
            check_vma=False,
        )


def _with_data_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def stack_metadata(parts: Any) -> Any:
    """One metadata for the whole data axis, from one per part, all of one capacity.

    Raises:
      ValueError: the capacities differ.
    """
    capacities = {part.capacity for part in parts}
    if len(capacities) != 1:
        raise ValueError(
            f"metadata of one step has capacities {sorted(map(str, capacities))}: build all parts"
            " with the same capacity="
        )
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(i) for i in x]), *parts)


def device_bytes(model: LanguageModel, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of parameters that one device of the mesh holds."""
    total = 0
    for name, leaf in parameters(model).items():
        spec = parameter_spec(name, leaf.shape, mesh)
        shape = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        total += int(jnp.dtype(leaf.dtype).itemsize) * _product(shape)
    return total


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


__all__ = [
    "Outputs",
    "ShardedSteps",
    "cache_specs",
    "device_bytes",
    "model_shardings",
    "parameter_spec",
    "shard_model",
    "sharded_cache",
    "stack_metadata",
]
