"""An HTTP proxy that makes tunnels (CONNECT), and remembers who asked for one."""

from __future__ import annotations

import selectors
import socket
import socketserver
import threading
from types import TracebackType
from typing import Self


class Tunnel:
    """The proxy; `with Tunnel() as proxy:`, then `proxy.url`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """The first line of each request."""
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"tunnel": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.StreamRequestHandler):
    tunnel: Tunnel

    def handle(self) -> None:
        line = self.rfile.readline().decode().strip()
        self.tunnel.asked.append(line)
        while self.rfile.readline().strip():
            pass
        host, _, port = line.split()[1].rpartition(":")
        with socket.create_connection((host, int(port))) as beyond:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self.wfile.flush()
            _carry(self.connection, beyond)


def _carry(one: socket.socket, other: socket.socket) -> None:
    """Bytes both ways until either side ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in selector.select():
                source: socket.socket = key.fileobj  # type: ignore[assignment]  # as registered
                content = source.recv(65536)
                if not content:
                    return
                key.data.sendall(content)
