"""OpenAI's completions over HTTP; needs the extra `serve`."""

from .app import make_app
from .completions import Service
from .server import Server

__all__ = ["Server", "Service", "make_app"]
