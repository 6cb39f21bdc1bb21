"""The Unix socket's file: taken only when no living process answers on it."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice_engine.errors import SocketUnavailable

# Linux holds a path of 107 bytes and a zero in a socket address.
MAX_PATH_BYTES = 107
# Owner and group: gate and engine run as different users of one group.
MODE = 0o660


def claim(path: Path) -> None:
    """Make `path` free to bind; a socket that a dead process left there is removed.

    Raises:
        SocketUnavailable: `SocketInUse` when a process answers on it, otherwise why it cannot be.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketUnavailable(f"{path}: a socket's path holds at most {MAX_PATH_BYTES} bytes")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.parent.is_dir():
            return
        raise SocketUnavailable(f"{path}: its directory does not exist") from None
    except OSError as error:
        raise SocketUnavailable(f"{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise SocketUnavailable(f"{path}: there is a file that is not a socket", "SocketInUse")
    if _answers(path):
        raise SocketUnavailable(f"{path}: another process serves on it", "SocketInUse")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise SocketUnavailable(f"{path}: {error.strerror}") from error


@contextmanager
def bound_with_mode() -> Iterator[None]:
    """What is bound inside gets `MODE` from its first moment on."""
    before = os.umask(0o777 & ~MODE)
    try:
        yield
    finally:
        os.umask(before)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # whatever it is, it is not dead
    return True
