"""An operator as a process beside the node: the very program of the image, without a pod around it.

Tests and benchmarks start it where they need several, or kill it, or count what it does. Knows nothing of why.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from sluice_operator.cluster.credentials import TOKEN_PATH

START_WITHIN_S = 60.0
POLL_S = 0.1
_MOUNTED = f'mkdir -p {TOKEN_PATH.parent} && mount --bind "$0" {TOKEN_PATH.parent} && exec "$@"'


class OperatorProcess:
    """One running operator; its log is a file."""

    def __init__(self, log: Path, environment: Mapping[str, str], credentials: Path | None = None) -> None:
        """Start it.

        Args:
            credentials: a folder that it finds where a pod has its service account's; else it is admin.
        """
        self.log = log
        settings = {
            "SLUICE_ENGINE_IMAGE": "sluice.test/sluice-engine:dev",
            "SLUICE_GATE_IMAGE": "sluice.test/sluice-sidecar:dev",
            "SLUICE_METRICS_PORT": "0",
            **environment,
        }
        # In a mount namespace of its own: nobody else signs in with these.
        enter = ["unshare", "--mount", "sh", "-c", _MOUNTED, str(credentials)] if credentials else []
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*enter, sys.executable, "-P", "-m", "sluice_operator"],
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._port = 0

    @property
    def port(self) -> int:
        """The port of /metrics; known once it listens."""
        until = time.monotonic() + START_WITHIN_S
        while not self._port:
            for line in self.log.read_text().splitlines():
                told = json.loads(line) if line.startswith("{") else {}
                if told.get("message") == "listening":
                    self._port = next(int(port) for host, port, *_ in told["addresses"] if host == "0.0.0.0")
            assert self.process.poll() is None, f"the operator ended: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < until, f"the operator does not listen: {self.log.read_text()[-2000:]}"
            time.sleep(POLL_S)
        return self._port

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of what it answers; 0 where nobody does."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            self._port = 0  # it may have started anew
            return 0, ""

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 where there is none."""
        _, page = self.get("/metrics")
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def resident_bytes(self) -> int:
        """Its memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        return int(kib) * 1024

    def cpu_s(self) -> float:
        """The processor time that it has taken so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        """Ask it to end, and wait; its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(30)

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait(30)
