"""Output tokens per second, TTFT and inter-token latency under a closed loop, through gate and engine, warm.

1, 4, 16 and 48 clients; prompts of 32–256 words; 64 output tokens; temperature 0; the demo model. The promise is wide
and the pool large, so that nothing is refused: this measures the engine, not the door.
"""

from __future__ import annotations

import asyncio
import statistics
import sys

import yaml

from load import Load, closed_loop
from report import Bar, Report, arguments
from sluice_operator.local.pod import LocalPod
from sluice_operator.resource import manifest
from sluice_operator.resource.spec import parse

MANIFEST = """
apiVersion: sluice.dev/v1alpha1
kind: InferenceService
metadata: {name: load}
spec:
  model: {source: {demo: {name: smollm2-135m}}}
  slo: {timeToFirstToken: 60s, referencePromptTokens: 512, interTokenLatency: 500ms}
  scheduling: {maxSequences: 48}
  cache: {capacity: 1400Mi}
  accelerator: {count: 0}
"""
# Requests in all at each level: enough for several rounds of every client.
LEVELS = {1: 8, 4: 24, 16: 64, 48: 144}
QUICK_LEVELS = {1: 3, 16: 32}
ROUNDS = 3
TARGETS = {1: 27.0, 16: 130.0}


async def measure(levels: dict[int, int], rounds: int) -> dict[int, list[Load]]:
    """`rounds` runs at each level, interleaved, so that a slow minute of the machine meets every level."""
    spec = parse(manifest.check(yaml.safe_load(MANIFEST), "engine_load"))
    runs: dict[int, list[Load]] = {clients: [] for clients in levels}
    async with LocalPod(spec) as pod:
        await pod.wait_ready(progress=lambda text: print(f"  {text}", flush=True))
        await closed_loop(pod.url, "load", 4, 8, seed=1)
        for round_number in range(rounds):
            for clients, requests in levels.items():
                load = await closed_loop(pod.url, "load", clients, requests, seed=100 + round_number)
                print(f"  {load.row()}", flush=True)
                runs[clients].append(load)
    return runs


def main() -> int:
    args = arguments(__doc__ or "")
    runs = asyncio.run(measure(QUICK_LEVELS if args.quick else LEVELS, 1 if args.quick else ROUNDS))
    report = Report("engine_load")
    for clients, loads in runs.items():
        rows = [load.row() for load in loads]
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        report.data[str(clients)] = medians
        if clients in TARGETS:
            name = f"output tok/s at {clients} client{'s' * (clients > 1)}"
            report.bars.append(Bar(name, medians["output_tokens_per_s"], "tok/s", TARGETS[clients], "higher"))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
