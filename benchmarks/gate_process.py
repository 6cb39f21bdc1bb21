"""A gate process before a paced engine, for benchmarks: both started, warm, and asked for what they cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from sluice_engine import codec
from sluice_engine.config import AdmissionConfig, LiveConfig, SLOConfig
from sluice_sidecar.config import GateConfig

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class GateUnderTest:
    """`with GateUnderTest(...) as gate:` runs both processes."""

    def __init__(self, *, interval_us: int, slots: int, max_wait_us: int = 0, stall_timeout_us: int = 30_000_000) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="sluice-")
        directory = Path(self._scratch.name)
        self.engine_socket = str(directory / "engine.sock")
        live = LiveConfig(
            slo=SLOConfig(time_to_first_token_us=5_000_000, inter_token_latency_us=1_000_000),
            admission=AdmissionConfig(max_wait_us=max_wait_us),
        )
        config = GateConfig(
            served_name="paced",
            host="127.0.0.1",
            port=0,
            admin_port=0,
            engine_socket=self.engine_socket,
            live_path=str(directory / "live.json"),
            run_dir=str(directory),
            endpoint_propagation_us=0,
            stall_timeout_us=stall_timeout_us,
        )
        (directory / "live.json").write_text(codec.to_json(live))
        (directory / "gate.json").write_text(codec.to_json(replace(config)))
        self._directory = directory
        self._commands = (
            [sys.executable, str(Path(__file__).with_name("paced_engine.py")), self.engine_socket, str(interval_us), str(slots)],
            [sys.executable, "-P", "-m", "sluice_sidecar", "--config", str(directory / "gate.json")],
        )  # fmt: skip
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address = ("127.0.0.1", 0)
        self.admin = ""

    def __enter__(self) -> GateUnderTest:
        self._processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in self._commands]
        path = self._directory / "gate-address.json"
        self._wait(path.exists)
        address = json.loads(path.read_text(encoding="utf-8"))
        self.address = ("127.0.0.1", address["port"])
        self.admin = f"http://127.0.0.1:{address['admin_port']}"
        self._wait(self._ready)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._scratch.cleanup()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.address[1]}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @staticmethod
    def _wait(claim: object) -> None:
        assert callable(claim)
        deadline = time.monotonic() + 60
        while not claim():
            if time.monotonic() > deadline:
                raise TimeoutError("the gate did not start")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self._processes[1].pid

    def cpu_s(self) -> float:
        """Processor time that the gate has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def resident_mib(self) -> float:
        """RSS of the gate."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024
