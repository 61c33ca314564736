"""The page at `/`: files of this package, and nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Whatever a model writes, the browser runs and fetches only what this server serves.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def index(request: Request) -> Response:
    """The page."""
    return _response("index.html")


async def page_file(request: Request) -> Response:
    """A file of the page."""
    name = request.path_params["name"]
    if name not in _files():
        raise HTTPException(404)
    return _response(name)


def _response(name: str) -> Response:
    return Response(_files()[name], media_type=_KINDS[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _files() -> dict[str, bytes]:
    folder = files("ninfer_jax.server").joinpath("page")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _KINDS}
