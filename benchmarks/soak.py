"""Twenty minutes of everything that a client can ask: nothing may grow in the gate or the engine, and nothing be lost.

Eight clients of a real pod, closed loop, by a seed: chats and completions, streamed and whole, choices, logprobs,
stop strings, structures, tools, shared beginnings, prompts that the cache cannot hold together (so that requests are
preempted and kept on the host), guesses, deadlines, adapters that come and go, requests that are refused, clients
that leave, read slowly or not at all, and a live.json that changes every few seconds. First comes a warm-up: a quarter
of the time, or until what both programs keep of the past is full. After it and at the end the pod is left idle, and
what the kernel says that each program holds then is compared; between the two it is sampled every few seconds for its
slope. Next: `soak_clients.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import yaml

import soak_model
from demo_pod import ready_pod
from report import Bar, Report, arguments
from sluice_operator.local.pod import LocalPod
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse
from sluice_sidecar.telemetry.state import GateState
from soak_clients import SoakClient
from soak_judged import MIB, PROGRAMS, SAMPLE_EVERY_S, Soaked, judged
from soak_process import held_by
from soak_requests import MODEL

CLIENTS = 8
CHANGE_EVERY_S = 13.0
# Beyond the gate's stall timeout and the 75 s that a silent connection is kept: then what is open is there to stay.
IDLE_S, QUICK_IDLE_S = 80.0, 20.0
QUIET_WITHIN_S = 60.0
# What the rings hold that /decisions and /steps show: 1,024 let in and as many refused, 4,096 steps.
KEPT_DECISIONS, KEPT_STEPS = 1024, 4096
MOST_WARM_UPS = 4


def manifest_of(model: Path, adapters: Path) -> str:
    """A cache of some 1,800 tokens in bfloat16, which eight clients outgrow, and room on the host for most of that."""
    return f"""
apiVersion: sluice.dev/v1alpha1
kind: InferenceService
metadata: {{name: {MODEL}}}
spec:
  model:
    source: {{image: {{path: {model}}}}}
    adapterLoading: {{directory: {adapters}, maxLoaded: 3, maxRunning: 2}}
  slo: {{timeToFirstToken: 60s, referencePromptTokens: 512, interTokenLatency: 2s}}
  scheduling: {{maxSequences: 12, speculation: {{method: PromptLookup}}}}
  cache: {{capacity: 40Mi, hostSwapCapacity: 32Mi}}
  accelerator: {{count: 0}}
"""


class Soak:
    """One pod under load, and what was seen of it."""

    def __init__(self, pod: LocalPod, adapters: list[str], seen: Soaked) -> None:
        self._pod = pod
        self._adapters = adapters
        self.seen = seen

    async def warm_up(self) -> None:
        """A quarter of the time; on a slow machine longer, until what both programs keep of the past is full."""
        for number in range(MOST_WARM_UPS):
            await self.load(15 * self.seen.minutes, seed=10 + number, watch=False)
            state = await self.state()
            assert state.engine is not None
            decided = min(state.admission.admitted_total, sum(state.admission.refused_total.values()))
            if decided > KEPT_DECISIONS and state.engine.step > KEPT_STEPS:
                break

    async def load(self, seconds: float, seed: int, *, watch: bool) -> None:
        """All clients at once, until the last has ended; `watch`: sample meanwhile."""
        until = time.monotonic() + seconds
        clients = [
            SoakClient(self._pod.url, self._pod.admin_url, self._adapters, self.seen.tally, 100 * seed + number)
            for number in range(CLIENTS)
        ]
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._change_live_file())]
            if watch:
                beside.append(group.create_task(self._sample()))
            running = [group.create_task(client.run(until)) for client in clients]
            await asyncio.wait(running)
            for task in beside:
                task.cancel()

    async def idle(self, seconds: float) -> None:
        """Leave the pod alone; what each program holds then, and what of requests is left."""
        deadline = time.monotonic() + QUIET_WITHIN_S
        while any((await self.left()).values()) and time.monotonic() < deadline:  # noqa: ASYNC110  # of other programs
            await asyncio.sleep(0.2)
        await asyncio.sleep(seconds)
        self.seen.idle.append({program: held_by(self._pod.pid(program)) for program in PROGRAMS})
        self.seen.left = await self.left()
        print(f"  idle: {self.seen.left}", flush=True)

    async def state(self) -> GateState:
        state = await self._pod.state()
        assert state is not None
        return state

    async def left(self) -> dict[str, float]:
        """What must be 0 of a pod of which nobody wants anything."""
        gate, figures = await self.state(), await self.figures()
        engine = gate.engine
        assert engine is not None
        assert engine.pool is not None
        assert engine.host is not None
        assert engine.grammars is not None
        return {
            "KV blocks lost": engine.pool.total_blocks - engine.pool.free_blocks,
            "host blocks lost": engine.host.total_blocks - engine.host.free_blocks,
            "blocks fenced or taken on optimism": figures["engine_kv_fenced_blocks"]
            + figures["engine_kv_optimistic_blocks"],
            "running": engine.running_requests,
            "waiting": engine.waiting_requests + len(engine.grammars.waiting),
            "adapters loaded": len(engine.adapters),
            "in the gate's ledger": gate.admission.ledger_requests + gate.admission.ledger_blocks,
            "at the door": gate.admission.waiting_at_door,
            # The page of metrics is asked for on the admin port, which counts no requests.
            "in flight": figures["gate_in_flight"],
            "bytes of bodies held": figures["gate_held_bodies_bytes"],
        }

    async def figures(self) -> dict[str, float]:
        """Both programs' metrics without labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._pod.admin_url}/metrics") as response:
            found = re.findall(r"^sluice_(\w+) (\S+)$", await response.text(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def _sample(self) -> None:
        while True:
            now = {program: await asyncio.to_thread(held_by, self._pod.pid(program)) for program in PROGRAMS}
            for program, held in now.items():
                self.seen.samples[program].append(held)
            self.seen.times_s.append(time.monotonic())
            self.seen.calls.append(self.seen.tally.outcomes.total())
            if len(self.seen.times_s) % 12 == 1:
                await self._tell()
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _tell(self) -> None:
        state = (await self.state()).engine
        assert state is not None
        held = {program: self.seen.samples[program][-1] for program in PROGRAMS}
        text = ", ".join(
            f"{program} {one.rss_bytes / MIB:.1f} MiB {one.num_descriptors} open {one.threads} threads"
            for program, one in held.items()
        )
        calls = f"{self.seen.tally.outcomes.total()} calls, step {state.step}, {state.preemptions_total} preemptions"
        print(f"  {self.seen.times_s[-1] - self.seen.times_s[0]:.0f} s: {text}; {calls}", flush=True)

    async def _change_live_file(self) -> None:
        """Enforce and Observe in turn, so that there are refusals and preemptions; and now and then what is no file."""
        path = self._pod.log_path("gate").parent / "live" / "live.json"
        first = json.loads(path.read_text(encoding="utf-8"))
        turn = 0
        try:
            while True:
                await asyncio.sleep(CHANGE_EVERY_S)
                turn += 1
                first["admission"]["mode"] = ("Observe", "Enforce")[turn % 2]
                text = json.dumps(first)
                path.write_text(text[:-20] if turn % 5 == 0 else text, encoding="utf-8")
        finally:
            first["admission"]["mode"] = "Enforce"
            path.write_text(json.dumps(first), encoding="utf-8")


async def measure(minutes: float, idle_s: float) -> tuple[list[Bar], dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        model = soak_model.with_tools(folder / "model.gguf")
        adapters = [str(path) for path in soak_model.adapters(model, folder / "adapters", 4)]
        spec = parse(manifest.check(yaml.safe_load(manifest_of(model, folder / "adapters")), "soak"))
        async with ready_pod(spec) as pod:
            soak = Soak(pod, adapters, Soaked(minutes))
            await soak.warm_up()
            await soak.idle(idle_s)
            await soak.load(45 * minutes, seed=2, watch=True)
            await soak.idle(idle_s)
            soak.seen.figures = await soak.figures()
            engine = (await soak.state()).engine
            assert engine is not None
            return judged(soak.seen, engine)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="under load; a quarter of it, at least, is warm-up (20)"
    )


def main() -> int:
    args = arguments(__doc__ or "", _options)
    minutes = 1.5 if args.quick else args.minutes
    report = Report("soak")
    report.bars, report.data = asyncio.run(measure(minutes, QUICK_IDLE_S if args.quick else IDLE_S))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
