"""The HTTP server: OpenAI's and Anthropic's APIs over one engine."""

from ninfer_jax.server.app import build_app
from ninfer_jax.server.backend import Backend, Piece, Running
from ninfer_jax.server.service import Service, Settings

__all__ = ["Backend", "Piece", "Running", "Service", "Settings", "build_app"]
