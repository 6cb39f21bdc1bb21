"""A gate process before a paced engine, for benchmarks: both started, and asked for what they cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sluice_engine import codec
from sluice_engine.live_config import AdmissionConfig, LiveConfig, SLOConfig
from sluice_sidecar.config import GateConfig

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class GateProcess:
    """What a benchmark talks to."""

    pid: int
    address: tuple[str, int]
    engine_socket: str

    def cpu_s(self) -> float:
        """Processor time that the gate has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def resident_mib(self) -> float:
        """RSS of the gate."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024


@contextmanager
def gate_before_paced_engine(
    *, interval_us: int, slots: int, extra_bytes: int = 0, **settings: int | str
) -> Iterator[GateProcess]:
    """Run both until left; `settings` are the gate's. Nobody waits at the door."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as scratch:
        directory = Path(scratch)
        live = LiveConfig(
            slo=SLOConfig(time_to_first_token_us=5_000_000, inter_token_latency_us=1_000_000),
            admission=AdmissionConfig(max_wait_us=0),
        )
        config = GateConfig(
            served_name="paced", host="127.0.0.1", port=0, admin_port=0, engine_socket=str(directory / "engine.sock"),
            live_path=str(directory / "live.json"), run_dir=str(directory), endpoint_propagation_us=0,
            **settings,  # type: ignore[arg-type]  # named by the caller
        )  # fmt: skip
        (directory / "live.json").write_text(codec.to_json(live))
        (directory / "gate.json").write_text(codec.to_json(config))
        engine = Path(__file__).with_name("paced_engine.py")
        commands = (
            [sys.executable, str(engine), config.engine_socket, str(interval_us), str(slots), str(extra_bytes)],
            [sys.executable, "-P", "-m", "sluice_sidecar", "--config", str(directory / "gate.json")],
        )
        with (directory / "log").open("wb") as log:
            processes = [subprocess.Popen(command, stderr=log) for command in commands]
        try:
            told = directory / "gate-address.json"
            _wait(told.exists)
            address = ("127.0.0.1", json.loads(told.read_text(encoding="utf-8"))["port"])
            _wait(lambda: _is_ready(address))
            yield GateProcess(processes[1].pid, address, config.engine_socket)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _is_ready(address: tuple[str, int]) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not claim():
        if time.monotonic() > deadline:
            raise TimeoutError("the gate did not start")
        time.sleep(0.05)
