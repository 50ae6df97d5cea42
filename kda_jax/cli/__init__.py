"""The command line: prefill text, resume it from a checkpoint, say what works on this machine."""

from .app import main

__all__ = ["main"]
