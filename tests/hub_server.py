"""A Hub on loopback, as far as models need one: listings with sizes and digests, files with HEAD, redirects and ranges, and every
way in which it fails. Counts what it serves."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = 4096  # bytes from which files are listed as large ones, by their SHA-256


@dataclass
class Repository:
    """files: of every revision. token: that one has to bring. gated: 403 for all files, though the listing is given. wrong: files
    that come with another content. cut: bytes after which a connection breaks, by file, each once."""

    files: Mapping[str, bytes]
    commit: str = "a" * 40
    revisions: tuple[str, ...] = ("main",)
    token: str = ""
    gated: bool = False
    status: int = 0
    wrong: set[str] = field(default_factory=set)
    cut: dict[str, list[int]] = field(default_factory=dict)


def repository_of(folder: Path, **settings: object) -> Repository:
    """All files of a directory."""
    return Repository({p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}, **settings)


class Hub:
    """url: for HF_ENDPOINT. repositories: by id. served: bytes of each file's content that went out. asked: methods and paths."""

    def __init__(self, url: str):
        self.url, self.cdn = url, url.replace("127.0.0.1", "localhost")  # another host: tokens do not go there
        self.repositories: dict[str, Repository] = {}
        self.served: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []
        self.at_cdn: set[str] = set()  # tokens that came to the other host
        self.hold, self.held = threading.Event(), threading.Event()  # cleared, no large file goes on; set, one waits
        self.hold.set()


def digest(content: bytes) -> str:
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._listing(hub, found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(hub, found[1], found[2], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            hub.at_cdn.add(self.headers.get("Authorization", ""))
            if self.command == "GET" and not hub.hold.is_set():
                hub.held.set()
                hub.hold.wait()
            self._content(hub, hub.repositories[found[1]], f"{found[1]}/{found[2]}", hub.repositories[found[1]].files[found[2]])
        else:
            self._send(404, b"{}")

    def _repository(self, hub: Hub, repo: str, revision: str) -> Repository | None:
        there = hub.repositories.get(repo)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if there is not None and there.status:
            self._send(there.status, b"{}")
        elif given and there is not None and there.token and given != there.token:
            self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif there is None or (there.token and given != there.token):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (*there.revisions, there.commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return there
        return None

    def _listing(self, hub: Hub, repo: str, revision: str) -> None:
        if (there := self._repository(hub, repo, revision)) is None:
            return
        siblings = []
        for name, content in there.files.items():
            about = {"rfilename": name, "size": len(content), "blobId": digest(content) if len(content) < LARGE else "b" * 40}
            if len(content) >= LARGE:
                about["lfs"] = {"sha256": digest(content), "size": len(content), "pointerSize": 134}
            siblings.append(about)
        self._send(200, json.dumps({"id": repo, "modelId": repo, "sha": there.commit, "siblings": siblings}).encode())

    def _file(self, hub: Hub, repo: str, revision: str, name: str) -> None:
        if (there := self._repository(hub, repo, revision)) is None:
            return
        about = {"X-Repo-Commit": there.commit}
        if there.gated:
            self._send(403, b"{}", {**about, "X-Error-Code": "GatedRepo"})
        elif name not in there.files:
            self._send(404, b"{}", {**about, "X-Error-Code": "EntryNotFound"})
        elif len(content := there.files[name]) >= LARGE:  # large files are somewhere else, and as everywhere without the token
            more = {"X-Linked-Etag": f'"{digest(content)}"', "X-Linked-Size": str(len(content))}
            self._send(302, b"", {**about, **more, "Location": f"{hub.cdn}/cdn/{repo}/{name}"})
        else:
            self._content(hub, there, f"{repo}/{name}", content, {**about, "ETag": f'"{digest(content)}"'})

    def _content(self, hub: Hub, there: Repository, key: str, content: bytes, about: Mapping[str, str] | None = None) -> None:
        name = key.split("/", 2)[2]
        start = 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
        if name in there.wrong:
            content = bytes(b ^ 1 for b in content)
        status, more = (206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}) if start else (200, {})
        piece, cuts = content[start:], there.cut.get(name) or []
        self._head(status, len(piece), {**(about or {}), **more})
        if self.command == "HEAD":
            return
        if cuts:
            piece = piece[: cuts.pop(0)]
            self.close_connection = True
        hub.served[key] = hub.served.get(key, 0) + len(piece)
        self.wfile.write(piece)

    def _send(self, status: int, body: bytes, about: Mapping[str, str] | None = None) -> None:
        self._head(status, len(body), about or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, about: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
