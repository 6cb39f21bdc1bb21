"""Processes inside the box by what they are: the node's programs, and those in pods. One is ended by its id only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

SUPERVISOR = 1  # the box's first process, which starts the node's programs


def of_node(program: str) -> int:
    """The process id of a program of the node, such as the kubelet.

    Raises:
        LookupError: none runs now.
    """
    for process, words in _all():
        if words[0] == program.encode() and _parent(process) == SUPERVISOR:
            return process
    raise LookupError(f"no {program} runs")


def of_pod(uid: str, program: str) -> int:
    """The process id of a program in that pod, by a word of its command line such as a module's name.

    Raises:
        LookupError: none runs now.
    """
    for process, words in _all():
        if program.encode() in words and uid in _cgroups(process).replace("_", "-"):
            return process
    raise LookupError(f"no {program} runs in pod {uid}")


def kill(process: int) -> None:
    """End it at once and without a word, as the kernel does when memory runs out."""
    os.kill(process, signal.SIGKILL)


def _all() -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue


def _parent(process: int) -> int:
    # The name, in brackets, may hold blanks and brackets of its own.
    return int(_read(process, "stat").rpartition(")")[2].split()[1])


def _cgroups(process: int) -> str:
    return _read(process, "cgroup")


def _read(process: int, file: str) -> str:
    try:
        return Path(f"/proc/{process}/{file}").read_text()
    except OSError:  # it ended meanwhile
        return "() ? 0" if file == "stat" else ""
