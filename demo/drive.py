"""Drives a running service past its limits with the real `openai` client, and tells what came of it.

A dozen conversations stream; a long prompt arrives in the middle of them; then more work comes than fits. Knows URLs
only, so the same file serves the local demo and the one on a Kubernetes node.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from rich.console import Console
from rich.table import Table

from sluice_sidecar.telemetry.measure import percentile

CONVERSATIONS = 12
LONG_PROMPT_WORDS = 2_950
# Some are over before the crowd comes: from them the gate learns when to send it away until.
CONVERSATION_TOKENS = (32, 192)
LATECOMER_TOKENS = 400
# What all latecomers want at once, in pools of KV; a request is its answer and a short prompt.
LATECOMER_POOLS = 1.5
LATECOMER_PROMPT_TOKENS = 50
SEED = 7
SLOW_RATIO = 1.5  # a step this many times its prediction was not alone on the processor

TOPICS = (
    "why the sky is blue", "how bread rises", "what a river delta is", "how to tie a bowline", "why cats purr",
    "what makes a good bridge", "how tides work", "why leaves turn red", "how a lock gate holds water",
    "what a sluice is for", "how to boil an egg", "why ice floats",
)  # fmt: skip
SENTENCE = "the water comes down from the hills and through the gate it runs to the mill and then on to the sea"


@dataclass(slots=True)
class Call:
    """One call to the service, as its client saw it."""

    name: str
    group: str
    started_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    refused: str = ""
    """Reason code of the refusal."""
    message: str = ""
    come_back_s: float | None = None
    request_id: str = ""
    retries: int = 0
    """How often the client library came back by itself."""
    text: str = ""
    """Its answer, as far as it came."""


async def chat(client: AsyncOpenAI, model: str, call: Call, prompt: str, max_tokens: int) -> Call:
    """Stream one chat and time what the client sees."""
    call.started_s = time.monotonic()
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0.7,
            seed=SEED,
            stream=True,
            stream_options={"include_usage": True},
        )
        call.request_id = stream.response.headers.get("x-sluice-request-id", "")
        call.retries = int(stream.response.request.headers.get("x-stainless-retry-count", "0"))
        last = 0.0
        async for chunk in stream:
            now = time.monotonic()
            if chunk.usage is not None:
                call.prompt_tokens, call.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.finish_reason:
                    call.finish = choice.finish_reason
                if not choice.delta.content:
                    continue
                call.text += choice.delta.content
                if call.ttft_s is None:
                    call.ttft_s = now - call.started_s
                else:
                    call.gaps_s.append(now - last)
                last = now
    except APIStatusError as error:
        headers = error.response.headers
        call.refused = headers.get("x-sluice-reason", str(error.status_code))
        call.message = str(error.body.get("message")) if isinstance(error.body, dict) else error.message
        if "retry-after-ms" in headers:
            call.come_back_s = float(headers["retry-after-ms"]) / 1000
    except APIConnectionError as error:
        call.refused, call.message = "connection", str(error)
    return call


async def drive(base_url: str, model: str, pool_tokens: int, console: Console) -> list[Call]:
    """The three waves against a pool of so many tokens; every call with what its client saw."""
    rng = random.Random(SEED)  # a repeatable demo, not a secret
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)
    patient = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=8, timeout=120)
    long_prompt = " ".join(itertools.islice(itertools.cycle(SENTENCE.split()), LONG_PROMPT_WORDS)) + ". Summarise this."

    def start(name: str, group: str, prompt: str, max_tokens: int, who: AsyncOpenAI = client) -> asyncio.Task[Call]:
        return asyncio.create_task(chat(who, model, Call(name, group), prompt, max_tokens))

    console.print(f"[bold]1[/] {CONVERSATIONS} conversations start to stream")
    tasks = []
    for topic in TOPICS[:CONVERSATIONS]:
        tasks.append(start(topic, "conversation", f"Explain {topic}.", rng.randint(*CONVERSATION_TOKENS)))
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.5)
    console.print(f"[bold]2[/] a prompt of about {LONG_PROMPT_WORDS:,} tokens arrives among them")
    tasks.append(start("the long prompt", "long prompt", long_prompt, 48))
    await asyncio.sleep(1.5)
    latecomers = math.ceil(LATECOMER_POOLS * pool_tokens / (LATECOMER_TOKENS + LATECOMER_PROMPT_TOKENS))
    console.print(
        f"[bold]3[/] {latecomers} more come at once, {LATECOMER_TOKENS} tokens each: more than fits; "
        "and a patient one, which retries when it is told"
    )
    for i in range(latecomers):
        prompt = f"Tell a story about {TOPICS[i % len(TOPICS)]}, part {i}."
        tasks.append(start(f"latecomer {i}", "latecomer", prompt, LATECOMER_TOKENS))
    # The client library's own retry: it reads our header and comes back when told.
    tasks.append(start("patient latecomer", "patient", "Tell a story about a mill.", LATECOMER_TOKENS, patient))
    calls = await asyncio.gather(*tasks)
    await client.close()
    await patient.close()
    return calls


async def fetch(admin_url: str, path: str) -> Any:  # noqa: ANN401  # parsed JSON
    """A document of the gate's admin port."""
    async with aiohttp.ClientSession() as session, session.get(f"{admin_url}{path}") as response:
        response.raise_for_status()
        return await response.json()


def show_promise(console: Console, calls: list[Call], ttft_s: float, itl_s: float) -> bool:
    """TTFT and inter-token latency of what was admitted against the promise; whether the p99 kept it."""
    table = Table(title=f"What clients saw. Promise: first token in {ttft_s:g} s, gaps of at most {itl_s * 1000:g} ms")
    for column in ("", "calls", "admitted", "refused", "TTFT p50", "p99", "ITL p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "" else "right")
    kept = True
    groups = list(dict.fromkeys(call.group for call in calls))
    for group in [*groups, "all"]:
        some = [call for call in calls if group in {"all", call.group}]
        ttfts = [call.ttft_s for call in some if call.ttft_s is not None]
        gaps = [gap for call in some for gap in call.gaps_s]
        refused = sum(bool(call.refused) for call in some)
        row = [group, str(len(some)), str(len(some) - refused), str(refused)]
        row += [f"{percentile(ttfts, p):.2f} s" for p in (50, 99)] if ttfts else ["", ""]
        row += [f"{percentile(gaps, p) * 1000:.0f} ms" for p in (50, 99, 100)] if gaps else ["", "", ""]
        table.add_row(*row, style="bold" if group == "all" else None)
        if group == "all" and ttfts and gaps:
            # A client that was told to come back waited as it was told: its TTFT is not the service's.
            prompt = [call.ttft_s for call in some if call.ttft_s is not None and call.group != "patient"]
            kept = (not prompt or percentile(prompt, 99) <= ttft_s) and percentile(gaps, 99) <= itl_s
    console.print(table)
    verdict = "[bold green]kept[/]" if kept else "[bold red]broken[/]"
    apart = ", the patient one's own waiting apart" if any(call.group == "patient" for call in calls) else ""
    console.print(f"The promise was {verdict}. What counts is the p99 of who was let in{apart}.")
    return kept


def show_refusals(console: Console, calls: list[Call]) -> None:
    """How many were refused for which reason, who, and when to come back."""
    refused = [call for call in calls if call.refused]
    if not refused:
        console.print("Nobody was refused.")
        return
    table = Table(title="Refused at the door")
    for column in ("reason", "calls", "come back in", "who", "in words, one of them"):
        table.add_column(column, justify="right" if column == "calls" else "left")
    reasons = collections.Counter(call.refused for call in refused)
    for reason, count in reasons.most_common():
        some = [call for call in refused if call.refused == reason]
        backs = sorted(call.come_back_s for call in some if call.come_back_s is not None)
        back = (
            f"{backs[0]:.1f} to {backs[-1]:.1f} s" if len(backs) > 1 else f"{backs[0]:.1f} s" if backs else "not said"
        )
        who = ", ".join(f"{number} × {group}" for group, number in collections.Counter(c.group for c in some).items())
        table.add_row(reason, str(count), back, who, some[0].message)
    console.print(table)


def show_steps(console: Console, steps: list[dict[str, Any]], names: dict[str, str]) -> None:
    """The batch of a few steps: the fullest mixed ones, and each that preempted."""
    prefills = [step for step in steps if step["prefill_tokens"]]
    mixed = [step for step in prefills if step["decode_requests"]] or prefills or steps
    preempting = [step for step in steps if step["preempted"]]
    chosen = sorted(mixed, key=lambda s: (s["prefill_tokens"] > 200, s["decode_requests"]))[-5:] + preempting[:3]
    if not chosen:
        return
    table = Table(title="A few steps of the engine: decode first, then as much prefill as the promise allows")
    for column in ("step", "decodes", "prefill tokens", "of whom", "took", "predicted", "free blocks"):
        table.add_column(column, justify="left" if column == "of whom" else "right")
    for step in sorted({step["step"]: step for step in chosen}.values(), key=lambda s: int(s["step"])):
        prefills = [s for s in step["scheduled"] if s["num_tokens"] > 1]
        who = ", ".join(f"{_name(s['request_id'], names)} +{s['num_tokens']} at {s['start']}" for s in prefills[:3])
        if step["preempted"]:
            who += "; preempted " + ", ".join(_name(p["request_id"], names) for p in step["preempted"])
        table.add_row(
            str(step["step"]),
            str(step["decode_requests"]),
            str(step["prefill_tokens"]),
            who,
            f"{step['real_us'] / 1000:.0f} ms",
            f"{step['predicted_us'] / 1000:.0f} ms",
            str(step["free_blocks_after"]),
        )
    console.print(table)


def _name(request_id: str, names: dict[str, str]) -> str:
    return next((name for known, name in names.items() if known and request_id.startswith(known)), request_id)


async def run(base_url: str, admin_url: str, model: str, ttft_s: float, itl_s: float) -> bool:
    """Drive, wait until all is quiet, tell; whether the promise was kept and nothing is still held."""
    console = Console(width=100)
    before = await fetch(admin_url, "/state")
    calls = await drive(base_url, model, before["engine"]["derived"]["kv_capacity_tokens"], console)
    state = await _quiet(admin_url)
    steps = (await fetch(admin_url, "/steps?last=4096"))["steps"]
    console.print()
    kept = show_promise(console, calls, ttft_s, itl_s)
    answered = next((call for call in calls if call.text), None)
    if answered is not None:
        console.print(f'One answer, to "{answered.name}": "{" ".join(answered.text.split())[:240]}…"')
    show_refusals(console, calls)
    patient = next(call for call in calls if call.group == "patient")
    if patient.ttft_s is not None:
        came = f"came back {patient.retries} times" if patient.retries else "was let in at once"
        console.print(
            f"The patient latecomer used the client library's own retry: it {came}; its first token came after "
            f"{patient.ttft_s:.1f} s."
        )
    engine = state["engine"]
    preempted = [p for step in steps for p in step["preempted"]]
    console.print(f"Preempted: {len(preempted)} in {engine['step']:,} steps.")
    show_steps(console, steps, {call.request_id: call.name for call in calls if call.request_id})
    if not kept:
        slow = sum(step["real_us"] > SLOW_RATIO * step["predicted_us"] for step in steps)
        console.print(
            f"{slow:,} of the last {len(steps):,} steps took more than {SLOW_RATIO} times what was "
            "predicted: many mean that other programs took the processor."
        )
    pool, door = engine["pool"], state["admission"]
    held = pool["total_blocks"] - pool["free_blocks"]
    console.print(f"Afterwards {held} KV blocks are held and the gate's ledger has {door['ledger_requests']} requests.")
    return kept and held == 0 and door["ledger_requests"] == 0


async def _quiet(admin_url: str) -> Any:  # noqa: ANN401  # parsed JSON
    """The gate's state once nothing runs; after 30 s, whatever it is then."""
    deadline = time.monotonic() + 30
    while True:
        state = await fetch(admin_url, "/state")
        engine = state["engine"]
        idle = engine is not None and not engine["running_requests"] and not engine["waiting_requests"]
        if (idle and not state["admission"]["ledger_requests"]) or time.monotonic() > deadline:
            return state
        await asyncio.sleep(0.2)
