"""The command line: prefill text, resume it, say what works on this machine, verify it."""

from .app import main

__all__ = ["main"]
