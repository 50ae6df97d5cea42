"""Checkpoints: published files into (sharded) arrays, and back.

model = from_pretrained(folder)                 # config.json and *.safetensors
model = from_pretrained(folder, mesh=mesh)      # every device reads its own part, no more
save_pretrained(model, folder)
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from safetensors.numpy import save_file

from .config import ModelConfig, check_x64
from .decoder import LanguageModel
from .folder import INDEX, open_tensors, read_config
from .hf_config import to_config
from .kimi_k3 import KimiK3
from .kimi_linear import KimiLinear
from .names import (
    Source,
    WeightsError,
    canonical,
    parameter_name,
    parameter_view,
    parameters,
    published_arrays,
    source,
)
from .sharding import parameter_spec
from .views import Index, View, bounded, part, without_axis

_AT_MOST = 20  # names of one kind in a message


def model_class(config: ModelConfig) -> type[LanguageModel]:
    """KimiK3 with attention residuals, else KimiLinear."""
    return KimiLinear if config.attn_res_block_size is None else KimiK3


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The model with shapes in place of weights: nothing is computed or allocated.

    Raises:
      ValueError: the dtype needs jax_enable_x64.
    """
    check_x64(config.dtype)  # before what was kept, perhaps with it on
    return jax.tree.map(lambda leaf: leaf, _abstract(config))


@functools.lru_cache(maxsize=8)
def _abstract(config: ModelConfig) -> LanguageModel:
    return jax.eval_shape(lambda: model_class(config)(config, rngs=None))


def from_pretrained(
    path: str | Path, *, mesh: Mesh | None = None, quiet: bool = False, **overrides: Any
) -> LanguageModel:
    """Loads a model.

    Args:
      path: a folder with config.json and one or more safetensors files, with the published names
        or transformers'. Experts in MXFP4 are dequantised.
      mesh: with axes "model", "expert" or "data"; each device reads its own shard (see
        `sharding.parameter_spec`). None: one device.
      quiet: do not say how many vision tensors were left out.
      **overrides: fields of `ModelConfig`, e.g. dtype="float32" or backend="chunked".

    Returns:
      `KimiLinear` or `KimiK3`.

    Raises:
      FileNotFoundError: there is no such folder, no config.json or no safetensors file.
      WeightsError: tensors are missing, unexpected or misshapen; all of them at once, by name. Or
        a file is damaged.
      ValueError: config.json is damaged, or not the config of a model built here; or float64
        without jax_enable_x64.
    """
    folder = Path(path)
    config = read_config(folder, overrides)
    tensors, skipped = canonical(open_tensors(folder))
    if skipped and not quiet:
        print(f"left out {skipped} vision tensors of {folder.name}")
    abstract = abstract_model(config)
    sources = {name: source(name, leaf.shape) for name, leaf in parameters(abstract).items()}
    _verify(sources, tensors, config, folder)

    def load(key: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_name(key)
        src = sources[name]
        view = parameter_view(src.kind, [tensors[n] for n in src.names])
        sharding: Any = SingleDeviceSharding(jax.devices()[0])
        if mesh is not None:
            sharding = NamedSharding(mesh, parameter_spec(name, leaf.shape, mesh))

        def shard(index: Index | None) -> np.ndarray:
            here = bounded(index or (), leaf.shape)
            return np.ascontiguousarray(view.read(here).astype(leaf.dtype))

        return jax.make_array_from_callback(leaf.shape, sharding, shard)

    return jax.tree_util.tree_map_with_path(load, abstract)


def save_pretrained(
    model: LanguageModel, path: str | Path, *, max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Writes config.json and safetensors files with the published names; one tensor at a time.

    Args:
      model: the weights, in the dtype in which they are written.
      path: a folder; made if it is not there.
      max_shard_bytes: of one file, unless one parameter needs more.

    Returns:
      The files with weights.

    Raises:
      ValueError: max_shard_bytes is below 1.
      NotADirectoryError: path, or a folder that it would lie in, is a file.
      TypeError: model is no model, or max_shard_bytes no integer.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model is a {type(model).__name__}, want a KimiLinear or KimiK3")
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int | np.integer):
        raise TypeError(f"max_shard_bytes is {max_shard_bytes!r}, want an integer")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}, want at least 1")
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(
                f"path is {str(folder)!r}, but {str(place)!r} is a file: want a folder; it is made"
                " if it is not there"
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_config(model.config), indent=2) + "\n")
    leaves = parameters(model)
    shards: list[list[str]] = [[]]
    size = 0
    for name, leaf in leaves.items():
        if shards[-1] and size + leaf.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += leaf.nbytes
    files: list[Path] = []
    index: dict[str, str] = {}
    for i, names in enumerate(shards):
        single = len(shards) == 1
        file = (
            "model.safetensors" if single else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        )
        arrays = {
            published: array
            for name in names
            for published, array in _published(model.config, name, leaves[name])
        }
        save_file(arrays, folder / file, metadata={"format": "pt"})
        files.append(folder / file)
        index |= dict.fromkeys(arrays, file)
    if len(files) > 1:
        total = sum(leaf.nbytes for leaf in leaves.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    # What an earlier save left would be read instead of this one, or beside it.
    for stale in set(folder.glob("model*.safetensors")) - set(files):
        stale.unlink()
    return files


def _published(config: ModelConfig, name: str, leaf: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
    src = source(name, leaf.shape)
    prefix = "language_model." if config.model_type == "kimi_k3" else ""
    for published, array in zip(
        src.names, published_arrays(src.kind, np.asarray(leaf)), strict=True
    ):
        layer = published.split(".")[2] if published.startswith("model.layers.") else ""
        if layer and config.is_moe(int(layer)):
            published = published.replace(".mlp.", ".block_sparse_moe.")
        if src.kind == "A_log" and config.model_type == "kimi_linear":
            array = array.reshape(1, 1, -1, 1)
        yield prefix + published, np.ascontiguousarray(array)


def _verify(
    sources: dict[str, Source], tensors: dict[str, View], config: ModelConfig, folder: Path
) -> None:
    wanted = {name for src in sources.values() for name in src.names}
    missing = sorted(wanted - tensors.keys())
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unexpected = sorted(tensors.keys() - wanted - ignored)
    misshapen = []
    for src in sources.values():
        for name in (n for n in src.names if n in tensors):
            if src.kind == "A_log":
                tensors[name] = _a_log(tensors[name], src.shape[0])
            if tensors[name].shape != src.shape:
                misshapen.append(f"{name} {tensors[name].shape}, want {src.shape}")
    problems = []
    for what, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("misshapen", sorted(misshapen)),
    ):
        if names:
            more = f" and {len(names) - _AT_MOST} more" if len(names) > _AT_MOST else ""
            problems.append(f"{len(names)} {what}: " + ", ".join(names[:_AT_MOST]) + more)
    if problems:
        raise WeightsError(
            f"the files in {folder} do not hold this model; check config.json and the download. "
            + "; ".join(problems)
        )


def _a_log(view: View, heads: int) -> View:
    """[H] from [H], [1, 1, H, 1] or [H and zeros]; anything else as it is, to be reported."""
    if len(view.shape) == 4 and math.prod(view.shape) == heads == view.shape[2]:
        return without_axis(without_axis(without_axis(view, 3), 1), 0)
    if len(view.shape) == 1 and view.shape[0] > heads and not np.any(view.all()[heads:]):
        return part(view, 0, 0, heads)
    return view
