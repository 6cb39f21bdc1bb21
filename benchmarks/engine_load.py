"""Output tokens per second, TTFT and inter-token latency under a closed loop, through gate and engine, warm.

1, 4, 16 and 48 clients; prompts of 32–256 words; 64 output tokens; temperature 0; the demo model. The promise is wide
and the pool large, so that nothing is refused: this measures the engine, not the door.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from report import Bar, Report, arguments
from sluice_operator.bench import prompts
from sluice_operator.bench.answers import Answer, figures
from sluice_operator.bench.clients import Asked, Clients
from sluice_operator.local.pod import LocalPod
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse

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
TARGETS = {1: 80.0, 4: 185.0, 16: 265.0, 48: 326.0}
# Share of the engine's loop outside the model, at this many clients.
OVERHEAD_CLIENTS, MAX_OVERHEAD_PERCENT = 48, 5.0


async def one_run(clients: Clients, at_once: int, requests: int, seed: int) -> dict[str, float]:
    """One closed loop; its figures, times in ms."""
    seen: list[Answer] = []
    started = time.monotonic()
    await clients.closed_loop(itertools.islice(prompts.drawn(seed, 32, 256), requests), at_once, seen)
    found = figures(seen, time.monotonic() - started)
    row = {
        "output_tokens_per_s": found.output_tokens_per_s,
        "prompt_tokens_per_s": found.prompt_tokens_per_s,
        "requests": float(found.requests),
        "failures": float(found.requests - found.whole),
    }
    for name, spread in (("ttft", found.ttft_ms), ("itl", found.gap_ms)):
        if spread is not None:
            row |= {f"{name}_p50_ms": spread.p50, f"{name}_p99_ms": spread.p99, f"{name}_max_ms": spread.max}
    return row


async def loop_seconds(socket_path: str) -> tuple[float, float]:
    """The engine's counters of time in the model's steps, and of time of its loop beside them."""
    connector = aiohttp.UnixConnector(socket_path)
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://engine/metrics") as answer:
        page = await answer.text()
    values = {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
    return values["sluice_engine_runner_seconds_total"], values["sluice_engine_loop_overhead_seconds_total"]


async def measure(levels: dict[int, int], rounds: int) -> dict[int, list[dict[str, float]]]:
    """`rounds` runs at each level, interleaved, so that a slow minute of the machine meets every level."""
    spec = parse(manifest.check(yaml.safe_load(MANIFEST), "engine_load"))
    runs: dict[int, list[dict[str, float]]] = {clients: [] for clients in levels}
    async with LocalPod(spec) as pod:
        await pod.wait_ready(progress=lambda text: print(f"  {text}", flush=True))
        async with Clients(pod.url, Asked(model="load")) as clients:
            await one_run(clients, 4, 8, seed=1)
            for round_number in range(rounds):
                for at_once, requests in levels.items():
                    before = await loop_seconds(pod.engine_socket)
                    row = await one_run(clients, at_once, requests, seed=100 + round_number)
                    after = await loop_seconds(pod.engine_socket)
                    model, beside = (b - a for a, b in zip(before, after, strict=True))
                    row["outside_model_percent"] = 100 * beside / (model + beside)
                    print(f"  {at_once} clients: {row}", flush=True)
                    runs[at_once].append(row)
    return runs


def main() -> int:
    args = arguments(__doc__ or "")
    runs = asyncio.run(measure(QUICK_LEVELS if args.quick else LEVELS, 1 if args.quick else ROUNDS))
    report = Report("engine_load")
    for clients, rows in runs.items():
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        report.data[str(clients)] = medians
        if clients in TARGETS:
            name = f"output tok/s at {clients} client{'s' * (clients > 1)}"
            report.bars.append(Bar(name, medians["output_tokens_per_s"], "tok/s", TARGETS[clients], "higher"))
        if clients == OVERHEAD_CLIENTS:
            name = f"share of step time outside the model at {clients} clients"
            report.bars.append(Bar(name, medians["outside_model_percent"], "%", MAX_OVERHEAD_PERCENT, "lower"))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
