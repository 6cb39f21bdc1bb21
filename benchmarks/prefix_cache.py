"""What a prefix hit saves: time to first token of a 1,000-token prompt, cold and with all but its last tokens cached.

One client, through gate and engine, on the demo model. Cold and warm prompts take turns, so that a slow minute of the
machine meets both. Each warm prompt shares 984 tokens with one that was served before and differs in the last 16, as
questions about one document do; each cold one has random tokens from its first on.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

import aiohttp

from demo_pod import demo_service, ready_pod
from report import Bar, Report, arguments

SERVICE = demo_service("load", slo={"interTokenLatency": "2s"}, cache={"capacity": "512Mi"})
PROMPT_TOKENS = 1000
SHARED_TOKENS = 984
ROUNDS = 9
QUICK_ROUNDS = 3
# 16 of 1,000 tokens are left to compute; a step's fixed part and the way through gate and engine stay.
LARGEST_SHARE_PERCENT = 20


async def ask(session: aiohttp.ClientSession, url: str, tokens: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the prompt tokens that were cached."""
    body = {
        "model": "load",
        "prompt": tokens,
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first_s: float | None = None
    cached = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"prefix_cache: {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices") and first_s is None:
                first_s = time.monotonic() - started
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first_s is not None, "a reply without a token"
    return first_s, cached


async def measure(rounds: int) -> dict[str, list[tuple[float, int]]]:
    rng = random.Random(1)

    def draw(count: int) -> list[int]:
        return rng.choices(range(1000, 40_000), k=count)

    seen: dict[str, list[tuple[float, int]]] = {"cold": [], "hit": []}
    async with (
        ready_pod(SERVICE) as pod,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
    ):
        await ask(session, pod.url, draw(PROMPT_TOKENS))  # the first use of a shape
        shared = draw(SHARED_TOKENS)
        await ask(session, pod.url, shared + draw(PROMPT_TOKENS - SHARED_TOKENS))
        for _ in range(rounds):
            for name, tokens in (("cold", draw(SHARED_TOKENS)), ("hit", shared)):
                result = await ask(session, pod.url, tokens + draw(PROMPT_TOKENS - SHARED_TOKENS))
                print(f"  {name}: {result[0] * 1000:.0f} ms to the first token, {result[1]} tokens cached", flush=True)
                seen[name].append(result)
    return seen


def main() -> int:
    args = arguments(__doc__ or "")
    seen = asyncio.run(measure(QUICK_ROUNDS if args.quick else ROUNDS))
    report = Report("prefix_cache")
    medians = {name: statistics.median(ttft_s for ttft_s, _ in results) for name, results in seen.items()}
    for name, results in seen.items():
        report.data[name] = {
            "ttft_ms": [round(ttft_s * 1000, 1) for ttft_s, _ in results],
            "ttft_p50_ms": round(medians[name] * 1000, 1),
            "cached_tokens": [cached for _, cached in results],
        }
    share = round(100 * medians["hit"] / medians["cold"], 1)
    report.bars.append(Bar("TTFT with a hit, of the cold one", share, "%", LARGEST_SHARE_PERCENT, "lower"))
    found = min(cached for _, cached in seen["hit"])
    report.bars.append(Bar("tokens found in each hit", found, "tokens", SHARED_TOKENS // 16 * 16, "higher"))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
