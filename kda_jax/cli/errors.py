"""What the user did wrong, or what this machine lacks: one line, exit code 2."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class CliError(Exception):
    """The message says what is wrong and what to do about it."""


def check_output(option: str, path: str | None, others: Sequence[str] = ()) -> None:
    """Before the long part: can this file be written, and is it none of the ``others``?"""
    if path is None:
        return
    target = Path(path).resolve()
    if target.is_dir():
        raise CliError(f"{option} {path}: is a folder, name a file in it")
    if target.exists() and not target.is_file():
        raise CliError(f"{option} {path}: is not an ordinary file, choose another name")
    if not target.parent.is_dir():
        raise CliError(f"{option} {path}: its folder does not exist, create it first")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CliError(f"{option} {path}: cannot be written, choose another place")
    if any(target == Path(name).resolve() for name in others):
        raise CliError(f"{option} {path}: is one of the documents or outputs, choose another name")
