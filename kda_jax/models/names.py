"""Names: a parameter of a model here, and the tensors of published files that it is made of.

The files have several ways to say the same. All are brought to one, the published names with `mlp`
for every kind of MLP, as views that read lazily.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .views import MX_BLOCK, View, mxfp4, part, stacked, transposed, without_axis

VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "vision_model.", "visual.")
_RENAME = (
    (re.compile(r"^(model\.)?language_model\.(model\.)?(?=layers|embed|norm|output)"), "model."),
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.forget_gate\."), "."),
    (re.compile(r"_res\.(proj|norm)_weight$"), r"_res_\1.weight"),
    (re.compile(r"_res\.(proj|norm)\.weight$"), r"_res_\1.weight"),
)
_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}


class WeightsError(ValueError):
    """The files do not hold the model: says what is missing, unexpected or misshapen, by name."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The published tensors of one parameter: their names, how they become it, their shape."""

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]


def parameter_name(path: tuple[Any, ...]) -> str:
    """`layers.0.self_attn.q_proj.kernel`, from a key path of `jax.tree_util`."""
    parts = (getattr(key, "name", getattr(key, "idx", getattr(key, "key", None))) for key in path)
    return ".".join(str(p) for p in parts).removesuffix(".value")


def parameters(model: Any) -> dict[str, Any]:
    """All parameters of a model (arrays or shapes) by name."""
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return {parameter_name(path): leaf for path, leaf in leaves}


def source(name: str, shape: tuple[int, ...]) -> Source:
    """Where the parameter `name` of that shape is in a published file."""
    residual = re.fullmatch(r"(self_attention_res|mlp_res)\.(\d+)\.(norm|proj)", name)
    if residual:
        which, layer, what = residual.groups()
        name = f"layers.{layer}.{which}_{what}"
    name = re.sub(r"^output_attn_res\.", "output_attn_res_", name)
    full = name if name.startswith("lm_head") else f"model.{name}"
    stem, _, last = full.rpartition(".")
    if last == "kernel":
        return Source((f"{stem}.weight",), "matrix", shape[::-1])
    if stem.endswith(".experts"):
        each = tuple(f"{stem}.{i}.{_EXPERTS[last]}.weight" for i in range(shape[0]))
        return Source(each, "experts", shape[:0:-1])
    if last == "qkv_proj":
        each = tuple(f"{stem}.{x}_proj.weight" for x in "qkv")
        return Source(each, "matrices", (shape[2], shape[0]))
    if last == "qkv_conv1d":
        each = tuple(f"{stem}.{x}_conv1d.weight" for x in "qkv")
        return Source(each, "convs", (shape[1], 1, shape[2]))
    if last.endswith("_conv1d"):
        return Source((f"{full}.weight",), "conv", (shape[0], 1, shape[1]))
    if last.endswith("_res_proj"):
        return Source((f"{full}.weight",), "row", (1, *shape))
    if last.endswith(("o_norm", "_res_norm")):
        return Source((f"{full}.weight",), "plain", shape)
    return Source((full,), "A_log" if last == "A_log" else "plain", shape)


def parameter_view(kind: str, views: list[View]) -> View:
    """The parameter, from views of its published tensors."""
    if kind == "matrix":
        return transposed(views[0])
    if kind == "experts":
        return stacked([transposed(v) for v in views], 0)
    if kind == "matrices":
        return stacked([transposed(v) for v in views], 1)
    if kind == "conv":
        return without_axis(views[0], 1)
    if kind == "convs":
        return stacked([without_axis(v, 1) for v in views], 0)
    return without_axis(views[0], 0) if kind == "row" else views[0]


def published_arrays(kind: str, array: np.ndarray) -> list[np.ndarray]:
    """The inverse of `parameter_view`, on a whole parameter."""
    if kind == "matrix":
        return [array.T]
    if kind == "experts":
        return [a.T for a in array]
    if kind == "matrices":
        return [array[:, i].T for i in range(array.shape[1])]
    if kind == "conv":
        return [array[:, None]]
    if kind == "convs":
        return [a[:, None] for a in array]
    return [array[None] if kind == "row" else array]


def canonical(tensors: Mapping[str, View]) -> tuple[dict[str, View], int]:
    """All tensors of the files under published names, and how many vision tensors were left out."""
    found: dict[str, View] = {}
    skipped = 0
    for raw, view in tensors.items():
        if raw.removeprefix("model.").startswith(VISION):
            skipped += 1
            continue
        name = raw
        for pattern, replacement in _RENAME:
            name = pattern.sub(replacement, name)
        parts = _split(name, view)
        if twice := sorted(found.keys() & parts.keys()):
            raise WeightsError(f"{twice[0]} is given twice, once as {raw}")
        found |= parts
    for name in [n for n in found if n.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        scale = found.get(f"{stem}_scale")
        packed = found[name]
        if scale is None or scale.shape != (packed.shape[0], 2 * packed.shape[-1] // MX_BLOCK):
            continue  # stays, and is reported as unexpected
        found[stem] = mxfp4(found.pop(name), found.pop(f"{stem}_scale"))
        found.pop(f"{stem}_shape", None)
    return found, skipped


def _split(name: str, view: View) -> dict[str, View]:
    """What transformers holds as one tensor, as the published ones."""
    stem, _, last = name.rpartition(".")
    if name.endswith(".self_attn.conv1d.weight") and view.shape[0] % 3 == 0:
        n = view.shape[0] // 3
        base = name.removesuffix("conv1d.weight")
        return {
            f"{base}{x}_conv1d.weight": part(view, 0, i * n, (i + 1) * n)
            for i, x in enumerate("qkv")
        }
    if not stem.endswith(".experts") or len(view.shape) != 3:
        return {name: view}
    rows = [without_axis(part(view, 0, i, i + 1), 0) for i in range(view.shape[0])]
    if last == "down_proj":
        return {f"{stem}.{i}.w2.weight": row for i, row in enumerate(rows)}
    if last == "gate_up_proj" and view.shape[1] % 2 == 0:
        half = view.shape[1] // 2
        gates = {f"{stem}.{i}.w1.weight": part(r, 0, 0, half) for i, r in enumerate(rows)}
        ups = {f"{stem}.{i}.w3.weight": part(r, 0, half, 2 * half) for i, r in enumerate(rows)}
        return gates | ups
    return {name: view}
