"""The other ranks' processes, from rank 0: started, told each step, watched, and ended. None outlives the engine.

Each has one pipe to rank 0. Rank 0 reads the end of a pipe as the end of that rank, whatever a step waits for; a rank
reads the end of its own as the end of rank 0, and exits. What runs in them is `follower`.
"""

from __future__ import annotations

import logging
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sluice_engine.codec import to_json
from sluice_engine.config import EngineConfig
from sluice_engine.core.loop import RunnerLost
from sluice_engine.errors import InvalidConfig, ModelUnavailable

log = logging.getLogger(__name__)

# A rank whose pipe has ended is gone, or about to be.
_EXIT_S = 5.0
# What fails because a rank died fails a moment before or after that is known: here, and on other ranks, which say so.
_WORDS_S = 2.0
_CAUSE_S = 1.0

Lost = Callable[[str, str], None]
"""Told the code and the sentence of what ended a rank, in a thread of its own."""


class Ranks:
    """Ranks 1 to size − 1."""

    def __init__(self, config: EngineConfig, lost: Lost) -> None:
        """Start them; each begins to load at once.

        Raises:
            ModelUnavailable: a process cannot be started.
        """
        self._lost = lost
        self._closing = False
        self._failure: tuple[str, str] | None = None
        self._failed = threading.Event()
        # Beside the socket, whose owner we are: what a read-only container can write for certain.
        self._folder = Path(f"{config.socket_path}.ranks")
        self.store = self._folder / "store"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._answers: list[queue.SimpleQueue[Any]] = []
        self._watch = threading.Thread(target=self._watch_all, name="ranks", daemon=True)
        try:
            shutil.rmtree(self._folder, ignore_errors=True)  # of one that was killed
            self._folder.mkdir(mode=0o700)
            for rank in range(1, config.tensor_parallel):
                self._start(config, rank)
        except OSError as error:
            self.close()
            raise ModelUnavailable(f"a rank's process cannot be started: {error}", "RankFailed") from error
        self._watch.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes, by rank."""
        return tuple(process.pid for process in self._processes)

    def tell(self, message: object) -> None:
        """Send all the same.

        Raises:
            RunnerLost: one of them has ended.
        """
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError as error:
            raise self.loss(error) from error

    def answers(self) -> list[Any]:
        """The next answer of each, by rank.

        Raises:
            RunnerLost: one of them has ended.
            ModelUnavailable: one of them could not load, and why.
            InvalidConfig: likewise.
        """
        found = [answers.get() for answers in self._answers]
        if self._failure is not None:
            code, message = self._failure
            if code == "InvalidConfig":
                field, _, problem = message.partition(": ")
                raise InvalidConfig(field, problem)
            raise ModelUnavailable(message, code)
        return found

    def failure(self) -> tuple[str, str] | None:
        """Code and sentence of what ended a rank, where something failed here that may have failed by that."""
        self._failed.wait(_WORDS_S)
        return self._failure

    def loss(self, error: Exception) -> RunnerLost:
        """What to raise for a step that failed here: the words of the rank that ended, or this error's own.

        Other ranks may be anywhere in that step, so none can follow it.
        """
        if (failure := self.failure()) is not None:
            return RunnerLost(failure[1])
        return RunnerLost(f"rank 0 failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End them; none is left when this returns."""
        self._closing = True
        for pipe in self._pipes:
            # Closed alone it would stay open for as long as the other thread waits for it.
            with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            try:
                process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watch.is_alive():
            self._watch.join(_EXIT_S)
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, config: EngineConfig, rank: int) -> None:
        ours, theirs = Pipe()
        with theirs:
            # -P and the module's name: what this process runs, not what lies in its folder.
            command = [sys.executable, "-P", "-m", "sluice_engine.compute.follower", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603  # our own
        self._processes.append(process)
        self._pipes.append(ours)
        self._answers.append(queue.SimpleQueue())
        with suppress(OSError):  # it has ended already: whoever waits for its answer is told
            ours.send((rank, to_json(config), str(self.store)))

    def _watch_all(self) -> None:
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        # A rank that failed in a step may have failed by another's death: that one has the word, if it comes in time.
        reports: dict[int, tuple[str, str]] = {}
        while ranks and not self._closing:
            ready = wait(list(ranks), _CAUSE_S if reports else None)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    kind, *words = pipe.recv()
                except (OSError, EOFError):
                    rank = ranks.pop(pipe)
                    if rank not in reports:
                        self._ended(rank)
                    continue
                if kind != "failed":
                    self._answers[ranks[pipe] - 1].put(words)
                elif words[0] == "RankFailed":
                    reports[ranks[pipe]] = words[0], words[1]
                else:
                    self._fail(words[0], words[1])
        if reports and not self._closing:
            self._fail(*next(iter(reports.values())))

    def _ended(self, rank: int) -> None:
        if self._closing:
            return
        process = self._processes[rank - 1]
        try:
            status: int | None = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            status = None
        self._fail("RankFailed", f"rank {rank} of {len(self._processes) + 1} (process {process.pid}) {ending(status)}")

    def _fail(self, code: str, message: str) -> None:
        if self._failure is not None:
            return
        self._failure = code, message
        log.error("rank lost", extra={"words": message})
        self._lost(code, message)
        self._failed.set()
        for answers in self._answers:
            answers.put(None)


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "no longer answers"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
