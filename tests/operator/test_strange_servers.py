"""Whatever answers at an address, HTML or half an answer: a command that asks there ends with one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice_operator.cli import main

Serve = Callable[[bytes], str]


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that gives everybody the same bytes; returns its address."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def answer(listener: socket.socket, content: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(content)

    def start(content: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threads.append(threading.Thread(target=answer, args=(listener, content)))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(http(b"<html>hello</html>"), id="HTML"),
        pytest.param(http(b'{"error": "nope"}', "500 Broken"), id="an error that is a text"),
        pytest.param(http(b'{"error": ["nope"]}', "503 Broken"), id="an error that is a list"),
        pytest.param(http(b'{"error": null}', "404 Gone"), id="an error that is null"),
        pytest.param(http(b'{"error": {"message": {"a": 1}}}', "429 Busy"), id="a message that is an object"),
        pytest.param(http(b"[" * 100_000), id="100,000 levels"),
        pytest.param(http(b"{}"), id="an empty object"),
        pytest.param(http(b"[1]"), id="a list"),
        pytest.param(http(b'{"data": [{"id": 5}]}'), id="a model whose name is a number"),
        pytest.param(http(b""), id="nothing"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", id="another protocol"),
        pytest.param(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"data":', id="half an answer"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd", id="no gzip"),
        pytest.param(b"", id="the end of the connection"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["explain", "URL", "req-a"], id="explain"),
        pytest.param(["trace", "URL"], id="trace"),
        pytest.param(["top", "--once", "URL"], id="top"),
        pytest.param(["record", "URL", "--for", "0s", "-o", "OUT"], id="record"),
        pytest.param(["bench", "URL", "--requests", "1"], id="bench"),
    ],
)
def test_what_is_no_server_of_ours_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serve: Serve, command: list[str], content: bytes
) -> None:
    url = serve(content)
    known = {"URL": url, "OUT": str(tmp_path / "record.json")}

    assert main.run([known.get(word, word) for word in command]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluice: {url}")
    assert len(line) < 600


def test_an_answer_that_is_no_json_is_called_so(capsys: pytest.CaptureFixture[str], serve: Serve) -> None:
    url = serve(http(b"<html>hello</html>"))

    assert main.run(["explain", url, "req-a"]) == 2
    assert capsys.readouterr().err == f"sluice: {url}/state answers 200: something that is no JSON\n"


@pytest.mark.parametrize("host", ["a b", "\0", "a" * 300])
def test_an_address_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str) -> None:
    assert main.run(["record", f"http://{host}", "--for", "0s", "-o", str(tmp_path / "record.json")]) == 2

    assert capsys.readouterr().err.count("\n") == 1
