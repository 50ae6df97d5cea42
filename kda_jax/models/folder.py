"""A model's folder: config.json, and views of the tensors in its safetensors files.

What is wrong with a file is said with its path: it was often downloaded, and not whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .hf_config import from_config
from .names import WeightsError
from .views import Index, View

INDEX = "model.safetensors.index.json"
# As safetensors calls them: what NumPy has, with ml_dtypes' bfloat16. F8 and the like are not read.
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")


def read_config(folder: Path, overrides: dict[str, Any]) -> ModelConfig:
    """The config of a folder.

    Raises:
      FileNotFoundError: there is no folder, or no config.json in it.
      ValueError: config.json is no JSON, or not the config of a model built here.
    """
    file = folder / "config.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"path is {str(folder)!r}: there is no such folder")
    if not file.is_file():
        raise FileNotFoundError(f"path is {str(folder)!r}: there is no config.json in it")
    found = _read_json(file)
    try:
        return from_config(found, **overrides)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def open_tensors(folder: Path) -> dict[str, View]:
    """Views of all tensors of a folder's safetensors files, by the names in the files.

    Raises:
      FileNotFoundError: there is no safetensors file, or not one that the index names.
      WeightsError: a file is damaged, a tensor is given twice; reading a view: NumPy does not have
        its dtype.
      ValueError: the index is damaged.
    """
    views: dict[str, View] = {}
    for file in _files(folder):
        try:
            handle = safe_open(file, framework="numpy")
        except SafetensorError as error:
            raise WeightsError(
                f"{file}: not a safetensors file or a damaged one ({error}): download it again"
            ) from error
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            if name in views:
                raise WeightsError(f"{name} is given twice, in {file.name} and in a file before it")
            views[name] = _view(handle.get_slice(name), f"{file}: {name}")
    return views


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
            raise ValueError(f"{index}: weight_map is missing or damaged: download it again")
        files = sorted({folder / name for name in names.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{index} names {len(missing)} files that are not there, as {missing[0]}:"
                " download them"
            )
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"path is {str(folder)!r}: there is no safetensors file in it")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{file}: no JSON or damaged ({error}): download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: holds a {type(found).__name__}, want a JSON object")
    return found


def _view(data: Any, where: str) -> View:
    shape, dtype = tuple(data.get_shape()), data.get_dtype()

    def read(index: Index) -> np.ndarray:
        if dtype not in _DTYPES:
            raise WeightsError(
                f"{where} is {dtype}, want BF16, F16 or F32 (experts also in MXFP4, as U8):"
                " convert the weights"
            )
        return np.asarray(data[index if shape else ...])

    return View(shape, read)
