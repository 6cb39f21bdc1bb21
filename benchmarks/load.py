"""A light closed-loop client: N clients, each sends its next request when the last reply has ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

from sluice_sidecar.telemetry.measure import percentile

VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
WORDS = VOCABULARY.split()


@dataclass(slots=True)
class Load:
    """What a run of the clients gave."""

    clients: int
    seconds: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    failures: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """The figures of this run; times in ms."""
        figures: dict[str, float] = {
            "clients": self.clients,
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 1),
            "prompt_tokens_per_s": round(self.prompt_tokens / self.seconds, 1),
            "requests": self.requests,
            "failures": self.failures,
        }
        for name, values in (("ttft", self.ttft_s), ("itl", self.gaps_s)):
            for label, percent in (("p50", 50), ("p99", 99), ("max", 100)):
                figures[f"{name}_{label}_ms"] = round(percentile(values, percent) * 1000, 1) if values else 0.0
        return figures


def prompt(rng: random.Random, low: int = 32, high: int = 256) -> str:
    """Between `low` and `high` words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


async def closed_loop(
    url: str, model: str, clients: int, requests: int, *, max_tokens: int = 64, seed: int = 0, uds: str | None = None
) -> Load:
    """Run `requests` chats in all over `clients` clients; `uds` reaches an engine's socket directly."""
    load = Load(clients)
    rng = random.Random(seed)
    prompts = iter([prompt(rng) for _ in range(requests)])
    connector = aiohttp.UnixConnector(path=uds) if uds else aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for text in prompts:
                await one_chat(session, url, model, text, max_tokens, load)

        started = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        load.seconds = time.monotonic() - started
    return load


async def one_chat(
    session: aiohttp.ClientSession, url: str, model: str, text: str, max_tokens: int, load: Load
) -> None:
    """Stream one chat and add what was seen to `load`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            load.failures += 1
            await response.read()
            await asyncio.sleep(0.2)
            return
        last, usage = 0.0, None
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if b'"content":"' in line.replace(b'"content": "', b'"content":"') and b'"content":""' not in line:
                if last:
                    load.gaps_s.append(now - last)
                else:
                    load.ttft_s.append(now - started)
                last = now
            if b'"usage"' in line:
                usage = json.loads(line[6:]).get("usage") or usage
    load.requests += 1
    if usage is None:
        load.failures += 1
        return
    load.output_tokens += usage["completion_tokens"]
    load.prompt_tokens += usage["prompt_tokens"]
