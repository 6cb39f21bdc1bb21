"""A real llama.cpp and a real vLLM behind the gate: served by the `openai` client, shed on their own metrics.

Not part of `make bench`: `make peers` installs both first (`peer_install.py`). For each engine: a whole and a streamed
answer through the gate; then more clients than it can serve inside the promise, first without the gate, then with it.
The run without is the control: it has to break the promise, or the load was none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

import peer_install
from peer_clients import MODEL, crowd, says
from peer_process import Peer, answers, free_port, kill, peers, process
from report import Bar, Report
from sluice_engine import codec
from sluice_engine.live_config import AdmissionConfig, LiveConfig
from sluice_sidecar.config import GateConfig

SECONDS = 30.0
QUICK_SECONDS = 12.0
WARM_UP_S = 4.0
SLOTS = 16


def gate_files(peer: Peer, folder: Path, ports: tuple[int, int]) -> Path:
    """`gate.json` and `live.json`."""
    live = folder / "live.json"
    live.write_text(codec.to_json(LiveConfig(slo=peer.slo, admission=AdmissionConfig(max_wait_us=500_000))))
    config = GateConfig(
        served_name=MODEL, host="127.0.0.1", port=ports[0], admin_port=ports[1], engine=peer.kind, engine_url=peer.url,
        live_path=str(live), run_dir=str(folder), engine_max_sequences=peer.max_sequences,
        engine_kv_tokens=peer.kv_tokens, endpoint_propagation_us=0,
    )  # fmt: skip
    path = folder / "gate.json"
    path.write_text(codec.to_json(config))
    return path


async def watch(admin_url: str, seen: dict[str, int]) -> None:
    """The most that the engine's own page said of its queue, and what the gate learned, until cancelled."""
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, KeyError):
                async with session.get(f"{admin_url}/state") as response:
                    engine = (await response.json())["engine"]
                for name, value in (
                    ("running", engine["running_requests"]),
                    ("waiting", engine["waiting_requests"]),
                    ("max_sequences", engine["derived"]["max_sequences"]),
                ):
                    seen[name] = max(seen.get(name, 0), value)
                curve = engine["decode_curve_us"]
                seen["step_us"] = curve[-1][1]
                seen["prefill_us_per_token"] = engine["prefill_cost"]["per_token_ns"] // 1000
            await asyncio.sleep(0.2)


async def measure_all(found: list[Peer], seconds: float, folder: Path, *, hold: bool) -> dict[str, Any]:
    """Start all, then measure one after the other."""
    results: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as started:
        engines = {}
        for peer in found:
            log = folder / f"{peer.kind}.log"
            print(f"{peer.kind}: starting", flush=True)
            engines[peer.kind] = await started.enter_async_context(process(peer.command, log, peer.environment))
            await answers(f"{peer.url}/health", engines[peer.kind], log)
        if hold:
            await asyncio.to_thread(input, "all are up; Enter measures: ")
        for peer in found:
            results[peer.kind] = await measure(peer, engines[peer.kind], seconds, folder)
    return results


async def measure(peer: Peer, engine: asyncio.subprocess.Process, seconds: float, folder: Path) -> dict[str, Any]:
    """Everything about one peer, which does not live longer."""
    promise_s = peer.slo.time_to_first_token_us / 1e6
    await crowd(peer.url, WARM_UP_S, promise_s, 0)
    control = await crowd(peer.url, seconds, promise_s, 1)
    result: dict[str, Any] = {"promise_s": promise_s, "without_gate": control.row(promise_s)}
    print(f"{peer.kind} without the gate: {result['without_gate']}", flush=True)
    log, ports = folder / f"gate-{peer.kind}.log", (free_port(), free_port())
    url, admin_url = (f"http://127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "sluice_sidecar", "--config", str(gate_files(peer, folder, ports))]
    async with process(command, log, {}) as gate:
        await answers(f"{url}/readyz", gate, log)
        result["said"] = await says(url)
        seen: dict[str, int] = {}
        watcher = asyncio.create_task(watch(admin_url, seen))
        run = await crowd(url, seconds, promise_s, 2)
        watcher.cancel()
        result |= {"with_gate": run.row(promise_s), "engine_at_most": seen}
        print(f"{peer.kind} with the gate: {result['with_gate']}; {seen}", flush=True)
        kill(engine)
        killed = time.monotonic()
        await until_refused(url)
        result["dead_after_s"] = round(time.monotonic() - killed, 2)
    return result


async def until_refused(url: str) -> None:
    """Until the gate's readiness says that the engine is gone."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while True:
            async with session.get(f"{url}/readyz") as response:
                if response.status == 503:
                    return
            await asyncio.sleep(0.02)


def bars(kind: str, result: dict[str, Any]) -> list[Bar]:
    """What has to hold, and what has to fail without the gate."""
    within, without = result["with_gate"], result["without_gate"]
    whole, streamed = result["said"]
    return [
        Bar(f"{kind}: answers to the openai client", bool(whole) + bool(streamed), "of 2", 2, "higher"),
        Bar(f"{kind}: first tokens inside the promise", within["promise_kept_percent"], "%", 95.0, "higher"),
        Bar(f"{kind}: the same without the gate", without["promise_kept_percent"], "%", 70.0, "lower"),
        Bar(f"{kind}: good answers a minute, of those without the gate",
            within["good_per_minute"] / max(1.0, without["good_per_minute"]), "×", 1.0, "higher"),
        Bar(f"{kind}: refused for load", float(sum(within["refused"].values())), "requests", 1.0, "higher"),
        Bar(f"{kind}: failed", float(sum(within["failed"].values())), "requests", 0.0, "lower"),
        Bar(f"{kind}: a killed engine is 503", result["dead_after_s"], "s", 1.0, "lower"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON document only")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:.0f} s a run")
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument("--only", choices=("llamacpp", "vllm"), default="", help="one of them")
    parser.add_argument("--hold", action="store_true", help="wait for Enter once the engines are up")
    args = parser.parse_args()
    if args.json:
        sys.stdout = sys.stderr
    at = peer_install.folder()
    if args.install:
        peer_install.install(at)
    found = peers(at, SLOTS, only=args.only)
    if not found:
        sys.stderr.write(f"no peer is installed in {at}; `make peers` does it\n")
        return 2
    report = Report("peers")
    with tempfile.TemporaryDirectory() as folder:
        seconds = QUICK_SECONDS if args.quick else SECONDS
        report.data |= asyncio.run(measure_all(found, seconds, Path(folder), hold=args.hold))
    for kind, result in report.data.items():
        report.bars += bars(kind, result)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
