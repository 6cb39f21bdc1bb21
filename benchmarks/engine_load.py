"""Output tokens per second, TTFT and inter-token latency under a closed loop, through gate and engine, warm.

1, 4, 16 and 48 clients; prompts of 32–256 words; 64 output tokens; temperature 0; the demo model. The promise is wide
and the pool large, so that nothing is refused: this measures the engine, not the door.
"""

from __future__ import annotations

import asyncio
import sys

from closed_loop import Row, counters, medians, one_run, outside_model_percent
from demo_pod import demo_service, ready_pod
from report import Bar, Report, arguments
from sluice_operator.bench.clients import Asked, Clients

SERVICE = demo_service("load", scheduling={"maxSequences": 48}, cache={"capacity": "1400Mi"})
# Requests in all at each level: enough for several rounds of every client.
LEVELS = {1: 8, 4: 24, 16: 64, 48: 144}
QUICK_LEVELS = {1: 3, 16: 32}
ROUNDS = 3
TARGETS = {1: 80.0, 4: 185.0, 16: 265.0, 48: 326.0}
# Share of the engine's loop outside the model, at this many clients.
OVERHEAD_CLIENTS, MAX_OVERHEAD_PERCENT = 48, 5.0


async def measure(levels: dict[int, int], rounds: int) -> dict[int, list[Row]]:
    """`rounds` runs at each level, interleaved, so that a slow minute of the machine meets every level."""
    runs: dict[int, list[Row]] = {clients: [] for clients in levels}
    async with ready_pod(SERVICE) as pod, Clients(pod.url, Asked(model="load")) as clients:
        await one_run(clients, 4, 8, seed=1)
        for round_number in range(rounds):
            for at_once, requests in levels.items():
                before = await counters(pod.engine_socket)
                row = await one_run(clients, at_once, requests, seed=100 + round_number)
                row["outside_model_percent"] = outside_model_percent(before, await counters(pod.engine_socket))
                print(f"  {at_once} clients: {row}", flush=True)
                runs[at_once].append(row)
    return runs


def main() -> int:
    args = arguments(__doc__ or "")
    runs = asyncio.run(measure(QUICK_LEVELS if args.quick else LEVELS, 1 if args.quick else ROUNDS))
    report = Report("engine_load")
    for clients, rows in runs.items():
        found = medians(rows)
        report.data[str(clients)] = found
        if clients in TARGETS:
            name = f"output tok/s at {clients} client{'s' * (clients > 1)}"
            report.bars.append(Bar(name, found["output_tokens_per_s"], "tok/s", TARGETS[clients], "higher"))
        if clients == OVERHEAD_CLIENTS:
            name = f"share of step time outside the model at {clients} clients"
            report.bars.append(Bar(name, found["outside_model_percent"], "%", MAX_OVERHEAD_PERCENT, "lower"))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
