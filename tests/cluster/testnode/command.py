"""Runs the programs that build things: output into a log, failure as one line, all of them stopped on the way out."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.testnode import cache
from cluster.testnode.errors import Broken, Missing

# What a package client prints when it cannot reach its registry.
UNREACHABLE = (
    "dial tcp",
    "no such host",
    "proxyconnect",
    "Temporary failure",
    "Could not resolve",
    "Could not connect",
    "Failed to establish a new connection",
    "dns error",
    "Network is unreachable",
    "Couldn't download",
    "InRelease",
)

_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()


def run(
    name: str,
    argv: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    gently: bool = False,
) -> None:
    """Runs one program to its end, with its output in a log of that name.

    Args:
        gently: at low priority, for a build of minutes beside which the machine should stay usable.

    Raises:
        Missing: it failed since a registry could not be reached.
        Broken: it failed otherwise.
    """
    log = cache.folder() / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        out.write(f"$ {' '.join(map(str, argv))}\n".encode())
        out.flush()
        with _lock:
            process = subprocess.Popen(
                [*(["nice", "-n", "10"] if gently else []), *map(str, argv)],
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            _running.add(process)
        code = process.wait()
        with _lock:
            _running.discard(process)
    if code:
        text = log.read_text(errors="replace")
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        if any(sign in text for sign in UNREACHABLE):
            raise Missing(f"{name}: a package registry that can be reached ({last.strip()[:200]}; all of it: {log})")
        raise Broken(f"{name}: {Path(str(argv[0])).name} ended with {code}: {last.strip()[:200]} (all of it: {log})")


def stop_all() -> None:
    """Ends whatever still runs: for a way out that was not planned."""
    with _lock:
        for process in _running:
            process.terminate()
