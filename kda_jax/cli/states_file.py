"""Saved states: one safetensors file that holds all that `resume` needs but the documents.

Tensors: {final,checkpoint}.{recurrent,conv} (rows as in layer.KDAState, without padding), seq_lens
int32 [N] and checkpoints int32 [M, 2] = (document, offset). String metadata: format, version, and
JSON for the layer's config, the seed, the weights' sha256 and each document's name and sha256.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save as serialize

from ..layer import KDALayerConfig, KDAState, LayerStates
from ..metadata import ChunkMetadata
from .documents import Document
from .errors import CliError
from .model import Model

FORMAT = "kda_jax.states"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Saved:
    """A states file's content. names, sha256, seq_lens: one per document."""

    path: str
    config: KDALayerConfig
    seed: int
    weights_sha256: str
    made_with: str
    names: list[str]
    sha256: list[str]
    seq_lens: np.ndarray
    checkpoints: np.ndarray
    states: LayerStates

    def offsets(self, document: int) -> list[int]:
        """Checkpoint offsets of one document, ascending."""
        return sorted(int(o) for d, o in self.checkpoints if d == document)

    def checkpoint(self, document: int, offset: int) -> KDAState:
        """The saved state before token `offset`, one row."""
        (row,) = np.flatnonzero((self.checkpoints == (document, offset)).all(1))
        return KDAState(*(part[row : row + 1] for part in self.states.checkpoint))

    def final(self, document: int) -> KDAState:
        return KDAState(*(part[document : document + 1] for part in self.states.final))


def save(
    path: str,
    model: Model,
    documents: Sequence[Document],
    metadata: ChunkMetadata,
    states: LayerStates,
    backend: str,
) -> None:
    """Write the states; `backend` is what the user asked for. The file appears whole or not."""
    sequences, checkpoints = metadata.num_sequences, metadata.num_checkpoints
    tensors = {
        "final.recurrent": states.final.recurrent[:sequences],
        "final.conv": states.final.conv[:sequences],
        "checkpoint.recurrent": states.checkpoint.recurrent[:checkpoints],
        "checkpoint.conv": states.checkpoint.conv[:checkpoints],
        "seq_lens": np.asarray(metadata.seq_lens, np.int32),
        "checkpoints": np.asarray(metadata.checkpoints[:checkpoints], np.int32),
    }
    config = dataclasses.asdict(model.config) | {"backend": backend}
    strings = {
        "format": FORMAT,
        "version": str(VERSION),
        "made_with": f"jax {jax.__version__}",
        "config": json.dumps(config),
        "seed": str(model.seed),
        "weights_sha256": model.fingerprint(),
        "documents": json.dumps([{"name": d.name, "sha256": d.sha256} for d in documents]),
    }
    target = Path(path).resolve()  # a link stays, and its target is replaced
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kda_jax-") as scratch:
        part = Path(scratch, "states")
        arrays = {name: jax.numpy.asarray(t) for name, t in tensors.items()}
        part.write_bytes(serialize(arrays, strings))
        os.replace(part, target)


def load(path: str) -> Saved:
    """Read and check a states file."""
    if Path(path).is_dir():
        raise CliError(f"{path}: is a folder, name the file that `prefill --save` wrote")
    if not Path(path).is_file():
        raise CliError(
            f"{path}: no such file, make it with `python -m kda_jax prefill FILE --save {path}`"
        )
    try:
        with safe_open(path, framework="flax") as file:
            strings = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CliError(
            f"{path}: not a safetensors file or a damaged one ({error}),"
            " pass what `python -m kda_jax prefill --save` wrote"
        ) from None
    if strings.get("format") != FORMAT:
        raise CliError(
            f"{path}: a safetensors file without kda_jax states,"
            " pass what `python -m kda_jax prefill --save` wrote"
        )
    if strings.get("version") != str(VERSION):
        raise CliError(
            f"{path}: states of version {strings.get('version')}, this kda_jax reads version"
            f" {VERSION}: run `python -m kda_jax prefill --save` again with this version"
        )
    try:
        return _parse(path, strings, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CliError(
            f"{path}: damaged states ({type(error).__name__}: {error}),"
            " run `python -m kda_jax prefill --save` again"
        ) from None


def _parse(path: str, strings: dict[str, str], tensors: dict[str, jax.Array]) -> Saved:
    documents = json.loads(strings["documents"])
    config = KDALayerConfig(**json.loads(strings["config"]))
    saved = Saved(
        path=path,
        config=config,
        seed=int(strings["seed"]),
        weights_sha256=strings["weights_sha256"],
        made_with=strings["made_with"],
        names=[d["name"] for d in documents],
        sha256=[d["sha256"] for d in documents],
        seq_lens=np.asarray(tensors["seq_lens"]),
        checkpoints=np.asarray(tensors["checkpoints"]),
        states=LayerStates(
            *(
                KDAState(tensors[f"{kind}.recurrent"], tensors[f"{kind}.conv"])
                for kind in ("final", "checkpoint")
            )
        ),
    )
    lengths, offsets = saved.seq_lens.shape, saved.checkpoints.shape
    if lengths != (len(documents),) or offsets != (len(saved.checkpoints), 2):
        raise ValueError(f"seq_lens and checkpoints have shapes {lengths}, {offsets}")
    rows = (len(documents), len(saved.checkpoints))
    for count, state in zip(rows, saved.states, strict=True):
        want = (
            (count, config.heads, config.head_dim, config.head_dim),
            (count, 3 * config.channels, config.conv_width - 1),
        )
        if (state.recurrent.shape, state.conv.shape) != want:
            raise ValueError(f"states have shapes {state.recurrent.shape}, {state.conv.shape}")
    return saved
