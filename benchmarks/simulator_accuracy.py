"""How far the simulator is off from a real engine: the demo model under an open load, recorded, and replayed.

The plans are made again step by step, and must come out the same. Then the requests run in virtual time with the step
times that the engine had learned by the end. One Poisson stream of chats, straight to the pod's gate.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from demo_pod import ready_pod
from report import Bar, Report, arguments
from sluice_operator.bench.clients import Asked, Clients
from sluice_operator.bench.prompts import prompt
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse
from sluice_simulator import replay, scenario
from sluice_simulator import report as told
from sluice_simulator.record import read_record
from sluice_simulator.recorder import Watch
from sluice_simulator.retrace import retrace
from sluice_simulator.run import assembled_of, run

SERVICE = """
apiVersion: sluice.dev/v1alpha1
kind: InferenceService
metadata: {name: accuracy}
spec:
  model: {source: {demo: {name: smollm2-135m}}}
  slo: {timeToFirstToken: 10s, referencePromptTokens: 2048, interTokenLatency: 500ms}
  cache: {capacity: 384Mi}
  accelerator: {count: 0}
"""
MODEL = "accuracy"
REQUESTS_PER_SECOND = 3.0
LOOK_EVERY_S = 1.0


async def drive(url: str, seconds: float) -> None:
    """A Poisson stream of chats of many lengths."""
    rng = random.Random(11)
    loop = asyncio.get_running_loop()
    async with Clients(url, Asked(model=MODEL)) as clients, asyncio.TaskGroup() as group:
        ends = loop.time() + seconds
        while loop.time() < ends:
            group.create_task(clients.ask(prompt(rng, 16, 300), [], rng.choice((8, 16, 32, 64))))
            await asyncio.sleep(rng.expovariate(REQUESTS_PER_SECOND))


async def recorded(seconds: float) -> dict[str, Any]:
    service = yaml.safe_load(SERVICE)
    watch = Watch()
    async with ready_pod(parse(manifest.check(service, "simulator_accuracy"))) as pod:
        watch.look(pod.admin_url)
        driving = asyncio.create_task(drive(pod.url, seconds))
        while not driving.done():
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(watch.look, pod.admin_url)
        await driving
        await asyncio.to_thread(watch.look, pod.admin_url)
    return watch.document(service)


def main() -> int:
    args = arguments(__doc__ or "")
    document = asyncio.run(recorded(20.0 if args.quick else 90.0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        record = read_record(path)
        own = scenario.parse(replay.with_record(replay.document_of(record), record), str(path))
    plans = retrace(record, assembled_of(own))
    real, simulated = replay.measured(record), replay.predicted(told.document(run(own)))
    off = replay.error_percent(real, simulated)
    compared = {"plans": asdict(plans), "recorded": real, "simulated": simulated, "error_percent": off}
    print("\n".join(replay.text(compared)))
    report = Report("simulator_accuracy", data=compared)
    report.bars = [
        Bar("steps planned the same", 100 * plans.same / max(1, plans.compared), "%", 100.0, "higher"),
        Bar("first token p50: off by", abs(off["ttft_p50_ms"]), "%", 15.0, "lower"),
        Bar("first token p99: off by", abs(off["ttft_p99_ms"]), "%", 15.0, "lower"),
        Bar("throughput: off by", abs(off["output_tokens_per_second"]), "%", 10.0, "lower"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
