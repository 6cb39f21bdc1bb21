"""What the gate costs: through it, and past it on the engine's own socket, in turn, before a paced engine.

Streams: 200 at once, 50 chunks a second each, arrivals staggered, connections warm on both sides. What is added to the
first token and to each chunk; whether chunks come in bunches, the mark of a buffer; processor time.
Refusals: at three times what the engine takes, at 2,000 and at 5,000 attempts a second, each on its own connection,
while 50 streams run. Stalled readers: a thousand that read nothing, and the memory that they hold.

All on one machine: clients, gate and engine share its cores.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from gate_process import GateProcess, gate_before_paced_engine
from report import Bar, Report, arguments
from sluice_sidecar.telemetry.measure import percentile
from stream_client import Address, Seen, StreamClient, attempt_evenly, chat, connect, run_streams

CHUNKS_PER_S = 50
INTERVAL_US = 1_000_000 // CHUNKS_PER_S
STREAMS, STREAM_S = 200, 2.0
HELD = 50
# Standard's share of the slots is nine in ten.
SLOTS = 55
STALLED = 1_000


def ms(values: Sequence[int], percent: float) -> float:
    return round(percentile(values, percent) / 1e6, 3) if values else float("nan")


def figures(seen: Seen) -> dict[str, float]:
    row = {
        f"{name}_p{percent}_ms": ms(values, percent)
        for name, values in (("ttft", seen.ttft_ns), ("chunk", seen.chunk_ns), ("gap", seen.gap_ns))
        for percent in (1, 50, 99)
    }
    return row | {
        "requests": len(seen.ttft_ns),
        "chunks": len(seen.chunk_ns),
        "together_percent": round(100 * seen.together / max(1, len(seen.chunk_ns)), 3),
        "broken": seen.broken,
    }


@dataclass(slots=True)
class Cost:
    """The gate's processor time over a stretch."""

    gate: GateProcess
    began_cpu_s: float = 0.0
    began_s: float = 0.0

    def start(self) -> Cost:
        self.began_cpu_s, self.began_s = self.gate.cpu_s(), time.monotonic()
        return self

    @property
    def seconds(self) -> float:
        return self.gate.cpu_s() - self.began_cpu_s

    @property
    def share(self) -> float:
        return self.seconds / (time.monotonic() - self.began_s)


async def measure_streams(report: Report, rounds: int, measure_s: float) -> None:
    """Direct and through the gate, in turn; of each figure the median round."""
    with gate_before_paced_engine(interval_us=INTERVAL_US, slots=2 * STREAMS) as gate:

        async def one(address: Address) -> Seen:
            tokens = round(STREAM_S * CHUNKS_PER_S)
            return await run_streams(
                address, streams=STREAMS, tokens=tokens, stream_s=STREAM_S, warm_s=STREAM_S + 1, measure_s=measure_s
            )

        rows: dict[str, list[dict[str, float]]] = {"direct": [], "gate": []}
        for _ in range(rounds):
            rows["direct"].append(figures(await one(gate.engine_socket)))
            cost = Cost(gate).start()
            row = figures(await one(gate.address))
            row["gate_cores"] = round(cost.share, 3)
            row["gate_us_per_chunk"] = round(1e6 * cost.share / (STREAMS * CHUNKS_PER_S), 1)
            rows["gate"].append(row)
            for name in rows:
                print(f"  {name}: {rows[name][-1]}", flush=True)
        direct, through = (
            {key: percentile([row[key] for row in rows[name]], 50) for key in rows[name][0]} for name in rows
        )
        report.data["streams"] = {"direct": direct, "gate": through, "gate_rss_mib": round(gate.resident_mib(), 1)}
    report.bars += [
        Bar("TTFT added p50", through["ttft_p50_ms"] - direct["ttft_p50_ms"], "ms", 2.0, "lower"),
        Bar("TTFT added p99", through["ttft_p99_ms"] - direct["ttft_p99_ms"], "ms", 10.0, "lower"),
        Bar("chunk added p99", through["chunk_p99_ms"] - direct["chunk_p99_ms"], "ms", 2.0, "lower"),
        # A buffer hands over several at once: then most gaps are nothing, and few are long.
        Bar("median gap against direct", through["gap_p50_ms"] / direct["gap_p50_ms"], "×", 0.98, "higher"),
        Bar(
            "chunks together, more than direct",
            through["together_percent"] - direct["together_percent"],
            "%",
            1.0,
            "lower",
        ),
        Bar("streams broken", through["broken"], "", 0, "lower"),
    ]


async def measure_refusals(report: Report, measure_s: float) -> None:
    """Refusals of a full gate, and what they cost those who are inside."""
    with gate_before_paced_engine(interval_us=INTERVAL_US, slots=SLOTS) as gate:
        seen, idle = Seen(), deque[StreamClient]()
        for _ in range(HELD):
            client = StreamClient(seen, idle)
            await connect(gate.address, client)
            client.ask(chat(8_000))
        await asyncio.sleep(1)
        quiet_share, quiet_p99 = 0.0, 0.0
        for name, per_second in (("none", 0.0), ("3x", 3.0 * HELD), ("2000", 2_000.0), ("5000", 5_000.0)):
            seen.chunk_ns.clear()
            seen.counting, cost = True, Cost(gate).start()
            if per_second:
                refused = await attempt_evenly(gate.address, per_second=per_second, measure_s=measure_s)
            else:
                await asyncio.sleep(measure_s)
                quiet_share, quiet_p99 = cost.share, ms(seen.chunk_ns, 99)
                continue
            elapsed_s = time.monotonic() - cost.began_s
            row = {
                "attempts_per_s": per_second,
                "refused_p50_ms": ms(refused.refused_ns, 50),
                "refused_p99_ms": ms(refused.refused_ns, 99),
                "cpu_ms_per_refusal": 1e3 * (cost.seconds - quiet_share * elapsed_s) / max(1, len(refused.refused_ns)),
                "gate_cores": cost.share,
                "chunk_p99_ms": ms(seen.chunk_ns, 99),
                "quiet_chunk_p99_ms": quiet_p99,
            }
            print(f"  refused {name}: {row} {dict(refused.statuses)}", flush=True)
            report.data[f"refusals_{name}"] = {**row, "statuses": dict(refused.statuses)}
            if name == "3x":
                report.bars += [
                    Bar("refusal p99 at 3 × overload", row["refused_p99_ms"], "ms", 5.0, "lower"),
                    Bar("refusal, processor time at 3 × overload", row["cpu_ms_per_refusal"], "ms", 1.0, "lower"),
                ]
            added = row["chunk_p99_ms"] - quiet_p99
            report.bars.append(Bar(f"chunk p99 added by {per_second:.0f} refusals/s", added, "ms", 5.0, "lower"))
        report.bars.append(Bar("streams broken by refusals", seen.broken, "", 0, "lower"))


async def measure_stalled(report: Report) -> None:
    """A thousand clients that ask for much and read nothing."""
    loop = asyncio.get_running_loop()
    # 80 KB a second to each: within seconds all that lies between engine and client is full.
    with gate_before_paced_engine(
        interval_us=100_000, slots=2 * STALLED, extra_bytes=8_000, stall_timeout_us=600_000_000
    ) as gate:
        before_mib = gate.resident_mib()
        sockets = []
        for _ in range(STALLED):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            sock.setblocking(False)
            await loop.sock_connect(sock, gate.address)
            await loop.sock_sendall(sock, chat(8_000))
            sockets.append(sock)
        rss_mib = [before_mib]
        for _ in range(60):
            await asyncio.sleep(0.25)
            rss_mib.append(gate.resident_mib())
        report.data["stalled"] = {
            "readers": STALLED,
            "rss_before_mib": round(before_mib, 1),
            "rss_mib": round(rss_mib[-1], 1),
            "rss_grown_in_last_5_s_mib": round(rss_mib[-1] - rss_mib[-20], 1),
        }
        for sock in sockets:
            sock.close()
    print(f"  stalled: {report.data['stalled']}", flush=True)
    report.bars += [
        Bar("RSS with 1,000 stalled readers", rss_mib[-1], "MiB", 350.0, "lower"),
        Bar("RSS still growing with them", rss_mib[-1] - rss_mib[-20], "MiB", 5.0, "lower"),
    ]


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("proxy")
    rounds, measure_s = (1, 6.0) if args.quick else (5, 10.0)

    async def run() -> None:
        await measure_streams(report, rounds, measure_s)
        await measure_refusals(report, measure_s / 2)
        await measure_stalled(report)

    uvloop.run(run())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
