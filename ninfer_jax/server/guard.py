"""The door of the server: keys, origins, and a count of what goes through."""

from __future__ import annotations

import hashlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ninfer_jax.server.errors import ApiError, error_response
from ninfer_jax.server.service import Service

# Open to everybody: the page asks for the key itself, and a supervisor has none.
_OPEN = re.compile(r"/(|health|page/[\w.-]+|favicon\.ico)")


class Guard:
    """Lets requests through that have a key, if keys are asked for, and that no other site's page has sent."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        self._digests = [_digest(key) for key in service.settings.api_keys]
        self._routes: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status = scope["path"], 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check(path, Headers(scope=scope), scope["method"])
            except ApiError as error:
                await error_response(error, path)(scope, receive, counted)
                return
            await self._app(scope, receive, counted)
        finally:
            route = scope.get("route")
            known = getattr(route, "path", "other")
            self._service.metrics.requests.labels(known, str(status or 499)).inc()

    def _check(self, path: str, headers: Headers, method: str) -> None:
        origin = headers.get("origin")
        if origin is not None and method != "OPTIONS" and not self._may_call(origin, headers.get("host", "")):
            raise ApiError(403, "requests from other sites' pages are not allowed (ninfer-jax serve --cors ORIGIN allows them)")
        if self._digests and not _OPEN.fullmatch(path) and method != "OPTIONS":
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
            # Digests have one length and all are compared, so the time says nothing about a key.
            found = _digest(given)
            if not sum(hmac.compare_digest(found, digest) for digest in self._digests):
                what = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
                raise ApiError(401, what, code="invalid_api_key")

    def _may_call(self, origin: str, host: str) -> bool:
        cors = self._service.settings.cors
        return "*" in cors or origin in cors or origin.partition("://")[2] == host


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
