"""The same against a real gate and a real engine, shorter: steady overload, and a spike with clients that retry.

The pod runs in processes of its own, on the processor, with the demo model; clients are open loops that stream. The
control's clients go to the engine's socket, past the gate. The capacity is what closed loops of more and more clients
get that keeps the promise, until more of them get no more.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

from demo_pod import demo_service, ready_pod
from experiments.findings import Findings
from experiments.scene import Document
from sluice_operator.bench.prompts import prompt
from sluice_sidecar.telemetry.measure import percentile

TTFT_S, GAP_S, TARGET_PERCENT = 3.0, 0.5, 99
SERVICE = demo_service(
    "overload",
    slo={"timeToFirstToken": f"{TTFT_S:g}s", "interTokenLatency": f"{GAP_S * 1000:g}ms"},
    cache={"capacity": "256Mi"},
)
WORDS = (32, 128)
MAX_TOKENS = 48
CLIENTS = (16, 32, 64, 96, 128, 192)
# More clients that gain less than this are no more than noise.
GAIN = 1.03
RETRIES = 2


@dataclass(slots=True)
class Outcome:
    """One request, over all its attempts."""

    sent_s: float
    """After the begin of the run."""
    status: int = 0
    good: bool = False
    ttft_s: float | None = None
    attempts: int = 0


@dataclass(slots=True)
class Clients:
    """Who sends, and to whom."""

    session: aiohttp.ClientSession
    url: str
    rng: random.Random
    began_s: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)

    async def one(self, *, retries: int = 0) -> Outcome:
        """One request, tried again as the `openai` library does."""
        outcome = Outcome(time.monotonic() - self.began_s)
        self.outcomes.append(outcome)
        body: Document = {
            "model": "overload",
            "messages": [{"role": "user", "content": prompt(self.rng, *WORDS)}],
            "max_tokens": self.rng.randint(MAX_TOKENS // 3, MAX_TOKENS),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        pause_s = await self._attempt(body, outcome, retries)
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self._attempt(body, outcome, retries)
        return outcome

    async def _attempt(self, body: Document, outcome: Outcome, retries: int) -> float | None:
        started = time.monotonic()
        headers = {"x-stainless-retry-count": str(outcome.attempts)}
        outcome.attempts += 1
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            outcome.status = response.status
            if response.status != 200:
                await response.read()
                again = outcome.attempts <= retries and response.headers.get("x-should-retry") != "false"
                backoff_s = 0.5 * 2 ** (outcome.attempts - 1) * (1 - 0.25 * self.rng.random())
                return float(response.headers.get("retry-after-ms", backoff_s * 1000)) / 1000 if again else None
            last, gaps, over, ended = 0.0, 0, 0, False
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: {") and _text(line):
                    now = time.monotonic()
                    if last:
                        gaps += 1
                        over += now - last > GAP_S
                    else:
                        outcome.ttft_s = now - started
                    last = now
            kept = outcome.ttft_s is not None and outcome.ttft_s <= TTFT_S
            outcome.good = ended and kept and over * 100 <= gaps * (100 - TARGET_PERCENT)
        return None

    async def open_loop(self, stages: list[tuple[float, float]], *, retries: int = 0) -> list[Outcome]:
        """Poisson arrivals, (a second, for so many seconds) one after the other; what came of each request."""
        self.outcomes, self.began_s = [], time.monotonic()
        tasks, until_s = [], 0.0
        for per_second, seconds in stages:
            at_s, until_s = until_s, until_s + seconds
            while (at_s := at_s + self.rng.expovariate(per_second)) < until_s:
                await asyncio.sleep(max(0.0, self.began_s + at_s - time.monotonic()))
                tasks.append(asyncio.create_task(self.one(retries=retries)))
        await asyncio.gather(*tasks)
        return self.outcomes

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Good requests a second."""
        self.outcomes, until_s = [], time.monotonic() + seconds

        async def client() -> int:
            good = 0
            while time.monotonic() < until_s:
                outcome = await self.one()
                good += outcome.good and time.monotonic() <= until_s
                if outcome.status != 200:
                    await asyncio.sleep(0.2)
            return good

        return sum(await asyncio.gather(*(client() for _ in range(clients)))) / seconds


def _text(line: bytes) -> bool:
    choices = json.loads(line[6:]).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


def row(outcomes: list[Outcome], seconds: float) -> Document:
    """The figures of a table's row."""
    firsts = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    return {
        "offered_per_s": round(len(outcomes) / seconds, 2),
        "attempts_per_s": round(sum(one.attempts for one in outcomes) / seconds, 2),
        "good_per_s": round(sum(one.good for one in outcomes) / seconds, 2),
        "answered": len(firsts),
        "missed": sum(not one.good for one in outcomes if one.ttft_s is not None),
        "ttft_p99_ms": round(percentile(firsts, 99) * 1000) if firsts else None,
    }


def good_percent(outcomes: list[Outcome], from_s: float, to_s: float) -> float:
    """Of those that came in between."""
    found = [one.good for one in outcomes if from_s <= one.sent_s < to_s]
    return 100 * sum(found) / max(1, len(found))


async def run(*, quick: bool) -> Findings:
    """The bars of the live run."""
    findings = Findings()
    seconds = 12 if quick else 30
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        ready_pod(SERVICE) as pod,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as through,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(pod.engine_socket, limit=0), timeout=timeout) as past,
    ):
        gate, queue = Clients(through, pod.url, random.Random(1)), Clients(past, "http://engine", random.Random(1))
        await gate.closed_loop(4, 10)
        most = await _capacity(gate, seconds / 2)
        findings.data["capacity_per_s"] = round(most, 2)
        print(f"capacity: {most:.2f} good requests a second", flush=True)
        for factor in (2.0,) if quick else (1.2, 2.0):
            await _steady(findings, gate, queue, factor, most, seconds)
        await _spike(findings, gate, queue, most, seconds)
    return findings


async def _capacity(gate: Clients, seconds: float) -> float:
    """Good requests a second of the closed loop that gets most."""
    most = 0.0
    for clients in CLIENTS:
        reached = await gate.closed_loop(clients, seconds)
        print(f"  {clients} clients: {reached:.2f} good requests a second", flush=True)
        if reached < most * GAIN:
            return max(most, reached)
        most = reached
    return most


async def _steady(
    findings: Findings, gate: Clients, queue: Clients, factor: float, most: float, seconds: float
) -> None:
    stages = [(factor * most, seconds)]
    gated = row(await gate.open_loop(stages, retries=RETRIES), seconds)
    direct = row(await queue.open_loop(stages), seconds)
    findings.data[f"{factor}x"] = {"gate": gated, "engine alone": direct}
    print(f"{factor}×: {gated} alone: {direct}", flush=True)
    findings.bar(f"live {factor}×: goodput of capacity", gated["good_per_s"] / most, "", 0.85)
    missed = 100 * gated["missed"] / max(1, gated["answered"])
    findings.most(f"live {factor}×: answers that missed the promise", missed, "%", 2.0)
    if factor >= 2:
        name = f"live {factor}×, control past the gate: goodput of capacity"
        findings.most(name, direct["good_per_s"] / most, "", 0.6)


async def _spike(findings: Findings, gate: Clients, queue: Clients, most: float, seconds: float) -> None:
    """80 % load, a spike of a quarter of the time at three times the capacity, and 80 % again."""
    spike_s = seconds / 4
    stages = [(0.8 * most, spike_s), (3 * most, spike_s), (0.8 * most, seconds)]
    from_s = 2 * spike_s + 10
    gated = await gate.open_loop(stages, retries=RETRIES)
    direct = await queue.open_loop(stages)
    found = [good_percent(outcomes, from_s, 2 * spike_s + seconds) for outcomes in (gated, direct)]
    findings.data["spike"] = {"gate_good_percent": round(found[0], 1), "engine_alone_good_percent": round(found[1], 1)}
    findings.bar("live spike: good from 10 s after it on", found[0], "%", 90)
    findings.most("live spike, control past the gate: good from 10 s after it on", found[1], "%", 60)
