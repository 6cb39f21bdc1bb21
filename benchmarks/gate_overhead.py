"""What the gate adds to the time to first token: through it, and past it on the engine's own socket, in turn.

One client, the demo model, a short prompt, warm. Pairs are interleaved, so that drift of the machine meets both alike;
nothing is cached of a prompt, or the second of a pair would find what the first has computed.
Also reports the resident memory of gate and engine.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
from pathlib import Path

from demo_pod import demo_service, ready_pod
from report import Bar, Report, arguments
from sluice_operator.bench import prompts
from sluice_operator.bench.answers import Answer
from sluice_operator.bench.clients import Asked, Clients

SERVICE = demo_service("overhead", cache={"capacity": "256Mi", "prefixCaching": "Disabled"})


def resident_mib(pid: int) -> float:
    """RSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


async def measure(pairs: int) -> tuple[list[Answer], list[Answer], float, float]:
    through: list[Answer] = []
    past: list[Answer] = []
    warm: list[Answer] = []
    asked = Asked(model="overhead", max_tokens=4)
    async with ready_pod(SERVICE) as pod:
        async with Clients(pod.url, asked) as gate, Clients("http://engine", asked, uds=pod.engine_socket) as engine:
            for text in itertools.islice(prompts.drawn(1, 32, 256), 4):
                await gate.ask(text, warm)
            for text in itertools.islice(prompts.drawn(0, 32, 256), pairs):
                await gate.ask(text, through)
                await engine.ask(text, past)
        return through, past, resident_mib(pod.pid("gate")), resident_mib(pod.pid("engine"))


def main() -> int:
    args = arguments(__doc__ or "")
    through, past, gate_mib, engine_mib = asyncio.run(measure(20 if args.quick else 60))
    medians = [statistics.median(one.ttft_us or 0 for one in answers) / 1000 for answers in (through, past)]
    report = Report("gate_overhead")
    report.data = {
        "ttft_p50_ms_through_gate": round(medians[0], 2),
        "ttft_p50_ms_past_gate": round(medians[1], 2),
        "ratio": round(medians[0] / medians[1], 3),
        "engine_rss_mib": round(engine_mib, 1),
    }
    report.bars = [
        Bar("gate adds to TTFT p50", medians[0] - medians[1], "ms", 5.0, "lower"),
        Bar("gate RSS", gate_mib, "MiB", 120.0, "lower"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
