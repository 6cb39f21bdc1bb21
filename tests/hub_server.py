"""A hub on this machine: the few routes of Hugging Face's that a download asks, with faults that a test turns on.

Content is a folder's. Files over `large_from` bytes are as LFS files are: known by their SHA-256, and sent by another
host than the hub. It runs in a thread, so that whoever asks may block.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "acme/tiny"
_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/revision/(?P<revision>.+)")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class HubServer:
    """The hub; `with HubServer(folder) as hub:`, then `hub.url`."""

    folder: Path
    large_from: int = 4096
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, COMMIT: COMMIT})
    token: str = ""
    """The one that may read; empty: everybody may."""
    is_gated: bool = False
    statuses: list[int] = field(default_factory=list)
    """What the next requests are answered with."""
    cut_after: list[int] = field(default_factory=list)
    """The next large files end after so many bytes."""
    damage: int = 0
    """So many large files come with a wrong byte."""
    knows_ranges: bool = True
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers (names in lower case) of every request."""
    host: str = "127.0.0.1"
    tls: Path | None = None
    """A folder with `certificate.pem` and `key.pem`: the hub speaks HTTPS, and sends large files itself."""
    hold: threading.Event | None = None
    """Large files stop after their first half until it is set."""

    def __enter__(self) -> Self:
        self._hub, self._store = (_server(self, name) for name in (self.host, self.host))
        self.url, self.store_url = (f"http://{self.host}:{one.server_port}" for one in (self._hub, self._store))
        if self.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls / "certificate.pem", self.tls / "key.pem")
            self._hub.socket = context.wrap_socket(self._hub.socket, server_side=True)
            self.url = f"https://{self.host}:{self._hub.server_port}"
        for one in (self._hub, self._store):
            threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.hold is not None:
            self.hold.set()
        for one in (self._hub, self._store):
            one.shutdown()
            one.server_close()

    def paths(self, part: str = "") -> list[str]:
        """The paths that were asked for and hold `part`."""
        return [path for path, _ in self.asked if part in path]

    def siblings(self) -> list[dict[str, Any]]:
        """The repository's files, as the hub lists them."""
        found = []
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()  # git's name for it
            one: dict[str, Any] = {
                "rfilename": str(path.relative_to(self.folder)),
                "size": len(content),
                "blobId": blob,
            }
            if len(content) > self.large_from:
                sha = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
            found.append(one)
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:  # the library's name
        hub = self.hub
        hub.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/store/"):
            self._store(hub.folder / path.removeprefix("/store/"))
        elif hub.statuses:
            self._say(hub.statuses.pop(0), {})
        elif api := _API.fullmatch(path):
            if self._may(api["repository"], api["revision"]):
                commit = hub.revisions[api["revision"]]
                body = {"id": REPOSITORY, "sha": commit, "siblings": hub.siblings(), "tags": []}
                self._say(200, {}, json.dumps(body).encode())
        elif file := _FILE.fullmatch(path):
            if self._may(file["repository"], file["revision"]):
                self._file(file["name"])
        else:
            self._say(404, {})

    def _may(self, repository: str, revision: str) -> bool:
        hub = self.hub
        sent = self.headers.get("Authorization", "")
        if hub.token and sent and sent != f"Bearer {hub.token}":
            self._say(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository != REPOSITORY or (hub.token and not hub.is_gated and not sent):
            self._say(401 if not sent else 404, {"X-Error-Code": "RepoNotFound"})
        elif hub.is_gated and not (hub.token and sent):
            self._say(403 if sent else 401, {"X-Error-Code": "GatedRepo"})
        elif revision not in hub.revisions:
            self._say(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _file(self, name: str) -> None:
        hub = self.hub
        path = hub.folder / name
        if not path.is_file():
            self._say(404, {"X-Error-Code": "EntryNotFound"})
        elif path.stat().st_size > hub.large_from:
            self._say(302, {"Location": f"{hub.url if hub.tls else hub.store_url}/store/{name}"})
        else:
            self._say(200, {}, path.read_bytes())

    def _store(self, path: Path) -> None:
        hub = self.hub
        content = path.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        status = 206 if start and hub.knows_ranges else 200
        rest = content[start:] if status == 206 else content
        if hub.damage:
            hub.damage -= 1
            rest = bytes([rest[0] ^ 1]) + rest[1:]
        self.send_response(status)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if hub.cut_after:
            self.wfile.write(rest[: hub.cut_after.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return
        if hub.hold is not None:
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            hub.hold.wait()
            rest = rest[len(rest) // 2 :]
        self.wfile.write(rest)

    def _say(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _server(hub: HubServer, host: str) -> ThreadingHTTPServer:
    return ThreadingHTTPServer((host, 0), type("Handler", (_Handler,), {"hub": hub}))
