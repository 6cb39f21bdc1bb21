"""A crowd of `openai` clients: each with its next request when the last has ended, or when it was told to come back."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai

from sluice_operator.bench.prompts import prompt
from sluice_sidecar.telemetry.measure import percentile

MODEL = "smol"
CLIENTS = 40
OUTPUT_TOKENS = 48
# A client that was refused comes back when it was told to, at the latest after this long.
MOST_PAUSE_S = 3.0


@dataclass(slots=True)
class Run:
    """What clients saw."""

    seconds: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    good: int = 0
    """Answers whose first token came inside the promise."""
    output_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def row(self, promise_s: float) -> dict[str, Any]:
        """The figures."""
        kept = sum(1 for ttft in self.ttft_s if ttft <= promise_s)
        return {
            "answers": len(self.ttft_s),
            "ttft_p50_ms": round(percentile(self.ttft_s, 50) * 1000) if self.ttft_s else None,
            "ttft_p99_ms": round(percentile(self.ttft_s, 99) * 1000) if self.ttft_s else None,
            "promise_kept_percent": round(100 * kept / max(1, len(self.ttft_s)), 1),
            "good_per_minute": round(60 * self.good / self.seconds, 1),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 1),
            "refused": dict(self.refused),
            "failed": dict(self.failed),
        }


async def one(client: openai.AsyncOpenAI, text: str, run: Run, promise_s: float) -> float:
    """One streamed answer; returns how long to pause after it."""
    started = time.monotonic()
    try:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=OUTPUT_TOKENS, temperature=0,
            stream=True,
        )  # fmt: skip
        first = None
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic()
                run.output_tokens += 1
    except openai.APIStatusError as error:
        headers = error.response.headers
        kind = f"{error.status_code} {headers.get('x-sluice-reason', '')}".strip()
        (run.refused if error.status_code == 429 else run.failed)[kind] += 1
        return min(MOST_PAUSE_S, int(headers.get("retry-after-ms", "1000")) / 1000)
    except openai.APIError as error:
        run.failed[type(error).__name__] += 1
        return 1.0
    if first is not None:
        run.ttft_s.append(first - started)
        run.good += first - started <= promise_s
    return 0.0


async def crowd(url: str, seconds: float, promise_s: float, seed: int) -> Run:
    """`CLIENTS` clients, each with its next request when the last has ended, or when it was told to come back."""
    run, rng = Run(), random.Random(seed)
    until = time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def member() -> None:
            while time.monotonic() < until:
                pause_s = await one(client, prompt(rng), run, promise_s)
                await asyncio.sleep(pause_s)  # as the gate asked for

        started = time.monotonic()
        await asyncio.gather(*(member() for _ in range(CLIENTS)))
        run.seconds = time.monotonic() - started
    return run


async def says(url: str) -> tuple[str, str]:
    """A whole and a streamed answer."""
    question: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 24}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        whole = await client.chat.completions.create(**question, temperature=0)
        stream = await client.chat.completions.create(**question, temperature=0, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return whole.choices[0].message.content or "", "".join(parts)
