"""The command line: prefill text, resume it, run a model, check and describe this machine."""

from .app import main

__all__ = ["main"]
