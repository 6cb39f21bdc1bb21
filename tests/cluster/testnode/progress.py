"""Progress of the long builds, as one line a task: it owns the terminal line and knows nothing of what is built."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

QUIET_S = 30  # between two signs of life where the output is a file: a six-minute build must not look hung


def elapsed(seconds: float) -> str:
    """An elapsed time as a person reads it."""
    whole = int(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Progress:
    """Prints when a task starts, that it still runs, and what it took; tasks may run side by side."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}

    def say(self, line: str) -> None:
        """One line that stays."""
        with self._lock:
            self._print(line)

    @contextmanager
    def task(self, name: str, doing: str) -> Iterator[None]:
        """Shows a task while its block runs; the last line says what it took, or that it failed."""
        start = time.monotonic()
        ended = threading.Event()
        with self._lock:
            self._running[name] = start
            if not self._tty:
                self._print(f"{name}: {doing}")
        ticker = threading.Thread(target=self._tick, args=(name, doing, start, ended), daemon=True)
        ticker.start()
        verdict = "failed after"
        try:
            yield
            verdict = "done in"
        finally:
            ended.set()
            ticker.join()
            with self._lock:
                del self._running[name]
                self._print(f"{name}: {doing}: {verdict} {elapsed(time.monotonic() - start)}")

    def _tick(self, name: str, doing: str, start: float, ended: threading.Event) -> None:
        while not ended.wait(1 if self._tty else QUIET_S):
            with self._lock:
                if not self._tty:
                    self._print(f"{name}: {doing}: {elapsed(time.monotonic() - start)} so far")
                elif name == next(iter(self._running)):  # one task draws the line for all of them
                    now = time.monotonic()
                    line = ", ".join(f"{other} {elapsed(now - since)}" for other, since in self._running.items())
                    self._out.write(f"\r\033[K… {line}")
                    self._out.flush()

    def _print(self, line: str) -> None:
        self._out.write(f"\r\033[K{line}\n" if self._tty else f"{line}\n")
        self._out.flush()
