"""The worked examples as a page: `python tools/worked_example.py` writes docs/worked-example.md.

Owns the words. Every number comes from the classes that the engine runs (`sluice_engine.core`), so the page changes
with them, and a test compares it bit for bit. Start reading at `worked_example`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from page import ms, table
from practice_page import practice_section
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.order.policy import Policies, order_for
from sluice_engine.core.order.service import Service
from sluice_engine.core.plan import StepResult
from sluice_engine.core.price import PLANNING_LINK_BYTES_PER_S, PLANNING_TOKEN_BYTES, HostRoom, price
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.steptime import PLANNING_RECOMPUTE_US_PER_TOKEN, ChunkCeiling, PlanningProfile

PAGE = Path("docs/worked-example.md")
PROFILE = PlanningProfile()
PROMISE_US = 150_000
SECOND_US = 1_000_000


def worked_example() -> str:
    """The page."""
    parts = [_HEAD, _static(), _chunks(), _aging(), _preemption(), _retries(), practice_section()]
    return _wrapped("\n\n".join(part.strip() for part in parts)) + "\n"


_HEAD = """
# Worked examples

<!-- Written by tools/worked_example.py. Do not edit. -->

The examples of the chapter "Scheduling the Decode Loop", which Sluice implements ("the text" below), played by the classes
that the engine itself runs. The step times are the planning profile (20 ms + 0.035 ms a prefill token + 10 ms where
requests decode); a real engine measures its own.
"""


# Static against continuous batching.


def _static() -> str:
    lengths = [5 + 33 * number for number in range(16)]
    # Scattered, as requests come: every seventh of the sixteen.
    scattered = [lengths[7 * number % 16] for number in range(16)]
    steps, ideal = _continuous_steps(scattered * 4), sum(lengths) * 4 / 16
    static = 4 * max(lengths)
    rows = [
        ("static, four batches of 16", f"{static:,}", f"{100 * ideal / static:.1f} %"),
        ("continuous, 16 slots, the same 64", f"{steps:,}", f"{100 * ideal / steps:.1f} %"),
    ]
    return f"""
## Static against continuous batching

Sixteen requests, with outputs spread evenly from {lengths[0]} to {lengths[-1]} tokens ({lengths[0]}, {lengths[1]}, …,
{lengths[-1]}), {sum(lengths):,} tokens in all. A static batch runs until its longest member is done: {max(lengths)} steps of
16 slots are {16 * max(lengths):,}, of which {100 * sum(lengths) / 16 / max(lengths):.1f} % produce a token. About half is padding.

With more requests waiting (four times the same sixteen), a slot that frees is taken in the next step:

{table(("", "steps", "occupancy"), rows)}

What is missing to 100 % is the end, when nobody waits any more.
"""


def _continuous_steps(lengths: Iterable[int]) -> int:
    limits = StepLimits(
        max_sequences=16,
        token_budget=16,
        prefill_chunk_tokens=16,
        max_prefill_tokens_per_request=None,
        ceiling=ChunkCeiling(PROFILE, PROMISE_US),
        block_tokens=16,
    )
    scheduler = Scheduler(limits, BlockPool(1024, block_tokens=16), PROFILE, max_length_tokens=1024)
    for number, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=length)
        assert scheduler.add(Request(str(number), [1], 1, sampling, arrival_us=number)) is None
    steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule(steps)
        steps += 1
        scheduler.update(StepResult(plan.step, np.full(plan.num_sampling, 7, dtype=np.int64)), steps)
    return steps


# The chunk.


def _chunks() -> str:
    ceiling = ChunkCeiling(PROFILE, PROMISE_US)(1)
    rows = [
        (f"largest chunk within {ms(promise_us)}", f"{ChunkCeiling(PROFILE, promise_us)(1):,} tokens")
        for promise_us in (PROMISE_US, 100_000)
    ]
    rows += [
        (f"a step with {tokens:,} tokens beside a decode", f"{PROFILE.predict_us(1, tokens, 0) / 1000:.2f} ms")
        for tokens in (ceiling, ceiling + 1, 8192)
    ]
    prompt = 12_000
    sizes = [ceiling] * (prompt // ceiling) + [prompt % ceiling]
    whole, split = PROFILE.predict_us(0, prompt, 0), [PROFILE.predict_us(0, size, 0) for size in sizes]
    beside = [PROFILE.predict_us(1, size, 0) for size in sizes]
    return f"""
## The chunk follows from the promise

20 + 0.035 c + 10 ≤ 150 gives c ≤ 3,428. One token more and the step takes longer than is promised:

{table(("", ""), rows)}

A prompt of {prompt:,} tokens costs {ms(whole)} in one step: every other stream stands still for so long. In
{len(sizes)} chunks ({", ".join(f"{size:,}" for size in sizes)}) the longest gap of the others is {ms(max(beside))}.
Chunking is not free: the fixed part of a step is paid {len(sizes)} times, {ms(sum(split))} in all, or {ms(sum(beside))} with the
decode share of each step. The text's "total prefill time barely changes" is these {ms(sum(split) - whole)}.
"""


# Order.


def _aging() -> str:
    service = Service(lambda decodes, prefill: PROFILE.predict_us(decodes, prefill, 0), 1024)
    policies = Policies(order="Priority", aging_interval_us=20 * SECOND_US)
    rows = []
    for waited_s in (0, 19, 20, 21, 40, 60):
        waiting = order_for(policies, service)
        now_us = 1000 * SECOND_US
        for name, base, since_s in (
            ("background", 6, waited_s),
            ("fresh 5", 5, 0),
            ("fresh 4", 4, 0),
            ("fresh 3", 3, 0),
        ):
            arrival_us = now_us - since_s * SECOND_US
            request = Request(name, [1], 1, SamplingParams(max_tokens=1), arrival_us=arrival_us, priority=base)
            waiting.push(request)
        order = [request.id for request in waiting.candidates(now_us)]
        rows.append((f"{waited_s} s", f"{6 - waited_s / 20:g}", ", ".join(order)))
    return f"""
## Aging

A lower number is more urgent. With one level in 20 seconds the effective priority of a waiting request is
`priority − waited / 20 s`: a background request (6, which is the class `batch` of the resource) that has waited 60
seconds competes at 3, ahead of a fresh 5. Between two that wait the difference never changes, so the order's key is `priority + arrival / 20 s`, which is constant: nothing is
sorted again. Of equals the one that came first goes first.

{table(("a 6 has waited", "competes at", "order"), rows)}
"""


# Preemption.


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """A link of one speed in both directions."""

    bytes_per_s: int
    block_bytes: int

    def out_us(self, num_blocks: int) -> int:
        """To the host."""
        return -(-num_blocks * self.block_bytes * SECOND_US // self.bytes_per_s)

    def in_us(self, num_blocks: int) -> int:
        """And back."""
        return self.out_us(num_blocks)


def _preemption() -> str:
    tokens, block_tokens = 4_000, 16
    held_bytes = tokens * PLANNING_TOKEN_BYTES
    recompute_us = tokens * PLANNING_RECOMPUTE_US_PER_TOKEN
    host = HostRoom(free_blocks=1_000, total_blocks=1_000)

    def of(bytes_per_s: int, suspension_s: int = 0, free: int = 1_000) -> tuple[str, ...]:
        link = PlannedLink(bytes_per_s, block_tokens * PLANNING_TOKEN_BYTES)
        room = HostRoom(free_blocks=free, total_blocks=host.total_blocks)
        found = price(
            tokens,
            block_tokens,
            recompute_us,
            link=link,
            host=room,
            suspension_us=suspension_s * SECOND_US,
        )
        assert found.swap_us is not None
        return (
            f"{bytes_per_s / 1e9:.1f} GB/s",
            f"{100 * free // host.total_blocks} % free",
            f"{suspension_s} s",
            ms(found.recompute_us),
            ms(found.swap_us),
            found.choice,
        )

    planned = PLANNING_LINK_BYTES_PER_S
    rows = [
        of(planned),
        of(25_000_000_000),
        of(planned, 2),
        of(planned, 2, 300),
        of(planned, 10, 300),
        of(10_000_000_000),
    ]
    return f"""
## What a preemption costs

A victim with {tokens:,} tokens of 320 KiB holds {held_bytes / 2**30:.2f} GiB. Computing them again is planned at
{PLANNING_RECOMPUTE_US_PER_TOKEN / 1000:g} ms a token: {ms(recompute_us)}. Moving them out and back over a link of {planned / 1e9:.1f} GB/s takes
{ms(2 * held_bytes / planned * SECOND_US)}; the text's "tens of billions of bytes per second" does not say which, so this page states it. The engine
measures both, and adds what the room on the host costs while the victim is away: its share of the pool × how full the pool
is then × the time. Short suspensions favour the swap, long ones in a full pool the recompute.

{table(("link", "host pool", "away for", "recompute", "swap", "taken"), rows)}
"""


# Retries.


def _arrivals(seconds: int, *, backoff: bool, budget: float | None) -> list[float]:
    """Expected arrivals in each second: 120 fresh ones, and refused ones that come back.

    With backoff a request that was refused n times returns spread evenly over the next 2^(n−1) seconds, at most 32
    (full jitter); without, in the next second. With a budget no more retries are let in a second than it allows; the
    others are told not to come back.
    """
    fresh, capacity, longest = 120.0, 100.0, 5
    back = [[0.0] * (longest + 2) for _ in range(seconds + 2**longest + 1)]
    totals = []
    for second in range(seconds):
        retries = back[second]
        if budget is not None and sum(retries) > budget:
            retries = [number * budget / sum(back[second]) for number in retries]
        total = fresh + sum(retries)
        totals.append(total)
        refused_share = max(0.0, 1 - capacity / total)
        for attempt, number in enumerate([fresh, *retries[1:]]):
            spread = 2 ** min(attempt, longest) if backoff else 1
            for later in range(1, spread + 1):
                back[second + later][min(attempt + 1, longest + 1)] += number * refused_share / spread
    return totals


def _retries() -> str:
    shown = (0, 1, 2, 3, 5, 10, 30, 59)
    ways = (
        ("at once, for ever", {"backoff": False, "budget": None}),
        ("backoff with full jitter, for ever", {"backoff": True, "budget": None}),
        ("at once, retries at most 10 % of capacity", {"backoff": False, "budget": 10.0}),
        ("backoff, and the budget", {"backoff": True, "budget": 10.0}),
    )
    rows = [(name, *(f"{_arrivals(60, **how)[second]:,.0f}" for second in shown)) for name, how in ways]
    return f"""
## A retry storm

120 requests come each second, 100 can be served. Refused ones that come back at once make it 140 in the next second, then 160,
and 20 more each second: the refusals generate the load. Expected arrivals in each second:

{table(("refused ones come back", *(f"second {second}" for second in shown)), rows)}

Backoff alone slows the growth and does not end it: what is refused is never given up, so the excess of 20 a second piles up.
A budget bounds it: where no more than 10 % of the capacity may be retries, and the others are told not to come back, it is
120 + 10. Backoff, jitter and giving up are the clients' part of that contract; a time to come back that the server draws
(`Retry-After`) does for clients what backoff would.
"""


# The page.


def _wrapped(text: str) -> str:
    """Paragraphs in lines of a readable length; tables and headings as they are."""
    return "\n\n".join(map(_filled, text.split("\n\n")))


def _filled(block: str) -> str:
    if block.startswith(("|", "#", "<")):
        return block
    if block.startswith("- "):
        items = block.removeprefix("- ").split("\n- ")
        return "\n".join(_fill(f"- {item}", indent="  ") for item in items)
    return _fill(block)


def _fill(text: str, indent: str = "") -> str:
    flat = " ".join(text.split())
    return textwrap.fill(flat, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the page."""
    path = Path(__file__).resolve().parent.parent / PAGE
    path.write_text(worked_example(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
