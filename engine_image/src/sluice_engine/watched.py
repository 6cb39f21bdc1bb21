"""A configuration that may change on disk while a program runs.

Owns what was read last and why it was refused. What cannot be understood changes nothing: what is in force stays, the
refusal is logged once and counted, and whoever reports it finds it here until a good one lies there. What a change
means is for those to whom it is handed.

It is read once a second: such files are small, a read needs none of the node's inotify instances, and it does not
matter by how many links the kubelet swaps them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from sluice_engine.errors import InvalidConfig

log = logging.getLogger(__name__)

READ_EVERY_S = 1.0
# A ConfigMap or a Secret holds no more.
MOST_BYTES = 1024 * 1024

Raw = TypeVar("Raw")
T = TypeVar("T")


def read_small(path: Path) -> bytes:
    """What a file holds that somebody else wrote; whatever lies there instead, it is read in no time and little memory.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `MOST_BYTES`; `strerror` says which.
    """
    # A pipe that nobody writes to would be waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123  # of a descriptor
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"holds more than {MOST_BYTES} bytes")
    return content


class Watched(Generic[Raw, T]):
    """One configuration, as it lies on disk (`Raw`) and as it is meant (`T`)."""

    def __init__(self, name: str, read: Callable[[], Raw], parse: Callable[[Raw], T]) -> None:
        """Both raise `InvalidConfig`. What was read before and is the same again is not parsed again."""
        self.name = name
        self.applied_total = 0
        """Changes that were handed on."""
        self.refused_total = 0
        """Contents that could not be understood."""
        self.problem = ""
        """Why what lies there now was refused; empty while it is in force."""
        self._read = read
        self._parse = parse
        self._raw: Raw | None = None
        self._value: T | None = None

    def load(self) -> T:
        """What to start with.

        Raises:
            InvalidConfig: it cannot be read or understood; there is none to fall back on.
        """
        raw = self._read()
        value = self._parse(raw)
        self._raw, self._value = raw, value
        return value

    def changed(self) -> T | None:
        """What lies there now, where it means something else than before and can be understood."""
        try:
            raw = self._read()
            if raw == self._raw and not self.problem:
                return None
            value = self._parse(raw)
        except InvalidConfig as error:
            self._refuse(str(error))
            return None
        self._raw, self.problem = raw, ""
        if value == self._value:
            return None
        self._value = value
        self.applied_total += 1
        log.info("configuration changed", extra={"file": self.name})
        return value

    async def follow(self, apply: Callable[[T], None], every_s: float = READ_EVERY_S) -> None:
        """Hand on each change; never returns."""
        while True:
            await asyncio.sleep(every_s)
            value = self.changed()
            if value is not None:
                apply(value)

    def _refuse(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self.refused_total += 1
        log.error("configuration refused, the old one stays", extra={"file": self.name, "error": problem})
