"""Sluice, vLLM and llama.cpp under the same load of the same client, in one run: output tokens a second and gaps.

Each engine serves the demo model on two threads: Sluice and llama.cpp from the GGUF file (Q4_1), vLLM from the same
weights in bfloat16. Sluice is asked through its gate, with a promise of 150 ms from which it derives its chunk; the
others have no gate. All three are up throughout and asked in turn, level by level, so that a slow minute of the machine
meets all alike. What counts is the ratios. `peer_install.py` installs the peers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

import peer_install
from closed_loop import Row, medians, one_run
from demo_pod import demo_service, ready_pod
from peer_clients import MODEL
from peer_process import answers, peers, process
from report import Bar, Report, arguments
from sluice_operator.bench.answers import Promise
from sluice_operator.bench.clients import Asked, Clients

SLOTS = 48
PROMISE = Promise(ttft_us=60_000_000, itl_us=150_000)
SERVICE = demo_service(
    MODEL, slo={"interTokenLatency": "150ms"}, cache={"capacity": "1400Mi", "prefixCaching": "Disabled"}
)
# Requests in all at each level.
LEVELS = {1: 8, 4: 24, 16: 64, 48: 144}
QUICK_LEVELS = {1: 3, 16: 32}
ROUNDS = 3
# Of vLLM's own output tokens a second on a machine of this kind, where int8 products are no default.
TARGETS = {1: 35.0, 4: 92.0, 16: 221.0, 48: 272.0}
LONGEST_P99_MS = 150.0
# Between two engines' turns: until less than this share of the cores is busy, but no longer than all looks.
SETTLED_SHARE, SETTLE_LOOK_S, SETTLE_LOOKS = 0.1, 0.5, 40


async def long_steps(admin_url: str, longer_than_us: int) -> list[dict[str, Any]]:
    """Sluice's own record of steps that took longer."""
    async with aiohttp.ClientSession() as session, session.get(f"{admin_url}/steps?last=4096") as response:
        steps = (await response.json())["steps"]
    fields = ("step", "predicted_us", "real_us", "decode_requests", "prefill_tokens", "prior_pairs")
    return [{name: step.get(name) for name in fields} for step in steps if (step.get("real_us") or 0) > longer_than_us]


async def settled() -> None:
    """Wait until the machine has nothing to do: vLLM's processes look out for work a while after their last answer."""
    for _ in range(SETTLE_LOOKS):
        before = cpu_times()
        await asyncio.sleep(SETTLE_LOOK_S)
        busy, idle = (b - a for a, b in zip(before, cpu_times(), strict=True))
        if busy < SETTLED_SHARE * (busy + idle):
            return
    print("  the machine has not come to rest", flush=True)


def cpu_times() -> tuple[int, int]:
    """Busy and idle time of all cores since the machine's start, in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, idle


async def measure(levels: Mapping[int, int], rounds: int, folder: Path) -> dict[str, Any]:
    """Figures by engine and level, and Sluice's long steps."""
    found = peers(peer_install.folder(), SLOTS, threads=2)
    runs: dict[str, dict[int, list[Row]]] = {}
    async with contextlib.AsyncExitStack() as up:
        pod = await up.enter_async_context(ready_pod(SERVICE))
        urls = {"sluice": pod.url}
        for peer in found:
            print(f"  {peer.kind}: starting", flush=True)
            log = folder / f"{peer.kind}.log"
            child = await up.enter_async_context(process(peer.command, log, peer.environment))
            await answers(f"{peer.url}/health", child, log)
            urls[peer.kind] = peer.url
        asked = Asked(model=MODEL)
        servers = {name: await up.enter_async_context(Clients(url, asked)) for name, url in urls.items()}
        for clients in servers.values():
            await one_run(clients, 4, 8, seed=1)
        for number, (at_once, requests) in itertools.product(range(rounds), levels.items()):
            for name, clients in servers.items():
                await settled()
                await one_run(clients, 1, 1, seed=1)  # whose turn it is has idled since its last one
                row = await one_run(clients, at_once, requests, seed=100 + number, promise=PROMISE)
                print(f"  {name}, {at_once} clients: {row}", flush=True)
                runs.setdefault(name, {}).setdefault(at_once, []).append(row)
        steps = await long_steps(pod.admin_url, 2 * PROMISE.itl_us)
    figures = {
        name: {str(at_once): medians(rows) for at_once, rows in by_level.items()} for name, by_level in runs.items()
    }
    return {"figures": figures, "long_steps": steps}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--if-installed", action="store_true", help="without a peer, say how to install them and end")


def main() -> int:
    args = arguments(__doc__ or "", options)
    if not peers(peer_install.folder(), SLOTS):
        sys.stderr.write(f"peer_load: no peer is installed in {peer_install.folder()}; `make peers` does it\n")
        return 0 if args.if_installed else 2
    levels = QUICK_LEVELS if args.quick else LEVELS
    report = Report("peer_load")
    with tempfile.TemporaryDirectory() as folder:
        report.data = asyncio.run(measure(levels, 1 if args.quick else ROUNDS, Path(folder)))
    ours = report.data["figures"]["sluice"]
    for at_once in levels:
        own = ours[str(at_once)]
        name = f"{at_once} client{'s' * (at_once > 1)}"
        report.bars += [
            Bar(f"output tok/s at {name}", own["output_tokens_per_s"], "tok/s", TARGETS[at_once], "higher"),
            Bar(f"gaps at {name}, p99", own["itl_p99_ms"], "ms", LONGEST_P99_MS, "lower"),
            Bar(f"failures at {name}", own["failures"], "", 0, "lower"),
        ]
        for peer, by_level in report.data["figures"].items():
            if peer != "sluice" and (theirs := by_level[str(at_once)]["output_tokens_per_s"]):
                ratio = own["output_tokens_per_s"] / theirs
                report.bars.append(Bar(f"output at {name}, of {peer}'s", ratio, "×", 1.0, "higher"))
    print(f"steps of twice the promise: {json.dumps(report.data['long_steps'])}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
