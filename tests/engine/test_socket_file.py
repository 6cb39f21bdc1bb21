from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_engine.errors import SocketUnavailable
from sluice_engine.serving.socket_file import bound_with_mode, claim


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path holds 107 bytes, and pytest's own folders are longer."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        yield Path(name)


def bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with bound_with_mode():
        listener.bind(str(path))
    listener.listen()
    return listener


def test_a_free_path_is_claimed_without_touching_it(folder: Path) -> None:
    claim(folder / "s")

    assert not (folder / "s").exists()


def test_the_socket_of_a_dead_process_is_removed(folder: Path) -> None:
    bind(folder / "s").close()
    claim(folder / "s")

    assert not (folder / "s").exists()


def test_a_socket_is_for_owner_and_group_from_its_first_moment(folder: Path) -> None:
    with bind(folder / "s"):
        assert (folder / "s").stat().st_mode & 0o777 == 0o660


def test_a_living_process_keeps_its_socket(folder: Path) -> None:
    with bind(folder / "s"):
        with pytest.raises(SocketUnavailable, match="another process serves") as caught:
            claim(folder / "s")
        assert caught.value.code == "SocketInUse"
        assert (folder / "s").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("absent/s", "directory does not exist", id="no directory"),
        pytest.param("file", "not a socket", id="another kind of file"),
        pytest.param("x" * 120, "at most 107 bytes", id="a path that is too long"),
    ],
)
def test_a_path_that_cannot_be_bound_is_one_line(folder: Path, name: str, says: str) -> None:
    (folder / "file").write_text("precious")

    with pytest.raises(SocketUnavailable, match=says):
        claim(folder / name)
    assert (folder / "file").read_text() == "precious"
