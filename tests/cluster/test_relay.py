"""The relay that falls silent: what it promises on any machine, without a node."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from cluster.testnode.relay import Relay


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers what it hears."""

    def serve(one: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            while heard := one.recv(100):
                one.sendall(heard)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(10)


def test_what_was_open_hears_nothing_more_and_stays_open_and_what_is_new_is_served(echo: int) -> None:
    with Relay("127.0.0.1", echo).running() as relay, connected(relay) as old:
        old.sendall(b"once")
        assert old.recv(100) == b"once"
        relay.fall_silent()
        with connected(relay) as new:
            new.sendall(b"new")
            assert new.recv(100) == b"new"
        old.sendall(b"again")
        old.settimeout(0.2)
        with pytest.raises(TimeoutError):
            old.recv(100)


def connected(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port), timeout=5)
