"""Text files as a packed batch of byte tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..metadata import ChunkMetadata
from .errors import CliError

CHUNK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Document:
    """A file's bytes; each byte is a token. An empty file is a legal document of no tokens."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def read(path: str) -> Document:
    """The file as a document named by the path as the user wrote it."""
    file = Path(path)
    if not file.exists():
        raise CliError(f"{path}: no such file, check the path")
    if not file.is_file():
        raise CliError(f"{path}: not a file, name text files one by one")
    return Document(path, file.read_bytes())


def pack(
    documents: Sequence[Document], checkpoint_every: int = 0
) -> tuple[np.ndarray, ChunkMetadata]:
    """Tokens int32 [capacity.tokens] and the metadata of one packed batch.

    Checkpoints lie at the multiples of checkpoint_every inside each document; its end is the final
    state, which the prefill returns anyway.
    """
    lengths = [len(document.data) for document in documents]
    offsets = None
    if checkpoint_every:
        offsets = [list(range(checkpoint_every, n, checkpoint_every)) for n in lengths]
    metadata = ChunkMetadata.from_seq_lens(
        lengths, chunk_size=CHUNK_SIZE, checkpoint_offsets=offsets, capacity="bucket"
    )
    joined = b"".join(document.data for document in documents)
    tokens = np.frombuffer(joined, np.uint8).astype(np.int32)
    return np.asarray(metadata.pad_tokens(tokens, 0)), metadata
