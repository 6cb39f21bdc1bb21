from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import empty, running_gate, until
from sidecar.scripted_engine import ScriptedEngine
from sluice_sidecar.errors import Reason, Refusal, Refused
from sluice_sidecar.estimates import counting
from sluice_sidecar.estimates.counting import MOST_AT_ONCE, MOST_IN_LINE, ExactCounts


@dataclass
class Engine:
    """Counts once it is allowed to."""

    may_count: asyncio.Event = field(default_factory=asyncio.Event)
    counting: int = 0

    async def count(self, question: bytes) -> int | None:
        self.counting += 1
        await self.may_count.wait()
        self.counting -= 1
        return len(question)


def busy() -> Refusal:
    return Refusal(Reason.ENGINE_OVERLOADED, "Busy.")


@pytest.fixture
async def full() -> AsyncIterator[tuple[Engine, ExactCounts, list[asyncio.Task[int | None]]]]:
    """All turns are taken, and the line is full."""
    engine = Engine()
    counts = ExactCounts(engine.count, busy)
    tasks = [asyncio.create_task(counts.count(b"four")) for _ in range(MOST_AT_ONCE)]
    await until(lambda: engine.counting == MOST_AT_ONCE)
    tasks += [asyncio.create_task(counts.count(b"four")) for _ in range(MOST_IN_LINE)]
    await until(lambda: counts.in_line == MOST_IN_LINE)
    yield engine, counts, tasks
    engine.may_count.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (counts.in_line, engine.counting) == (0, 0)


async def test_one_that_finds_the_line_full_is_refused_at_once(full: tuple[Engine, ExactCounts, Any]) -> None:
    _, counts, _ = full

    with pytest.raises(Refused) as caught:
        await counts.count(b"late")

    assert caught.value.refusal.status == 429


async def test_those_in_line_are_counted_a_few_at_a_time(
    full: tuple[Engine, ExactCounts, list[asyncio.Task[int | None]]],
) -> None:
    engine, _, tasks = full
    assert engine.counting == MOST_AT_ONCE

    engine.may_count.set()

    assert await asyncio.gather(*tasks) == [4] * len(tasks)


async def test_one_whose_turn_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "TURN_S", 0.0)
    engine = Engine()
    counts = ExactCounts(engine.count, busy)
    running = [asyncio.create_task(counts.count(b"four")) for _ in range(MOST_AT_ONCE)]
    await until(lambda: engine.counting == MOST_AT_ONCE)

    with pytest.raises(Refused):
        await counts.count(b"late")

    engine.may_count.set()
    assert await asyncio.gather(*running) == [4] * MOST_AT_ONCE
    assert await counts.count(b"free again") == 10


async def test_one_that_leaves_the_line_gives_its_place_back(full: tuple[Engine, ExactCounts, Any]) -> None:
    engine, counts, tasks = full

    tasks[-1].cancel()
    await until(lambda: counts.in_line == MOST_IN_LINE - 1)
    again = asyncio.create_task(counts.count(b"now"))
    await until(lambda: counts.in_line == MOST_IN_LINE)
    engine.may_count.set()

    assert await again == 3


async def test_a_burst_of_prompts_near_the_limit_ends_in_429_and_holds_no_bodies(
    engine: ScriptedEngine, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MOST_IN_LINE", 1)
    hold = asyncio.Event()

    async def count(_: bytes) -> int | None:
        await hold.wait()
        return 900

    async def status(text: str) -> tuple[int, str | None]:
        async with gate.post(messages=[{"role": "user", "content": text}]) as response:
            await response.read()
            return response.status, response.headers.get("x-sluice-reason")

    async with running_gate(engine, socket_dir) as gate:
        gate.gate._reception._counts._count = count
        near = [asyncio.create_task(status("x" * 3_600)) for _ in range(3)]
        await until(lambda: gate.gate._reception._counts.in_line == 1)
        assert await status("x" * 3_600) == (429, "engine_overloaded")
        assert await status("short") == (200, None)
        hold.set()
        assert (await asyncio.gather(*near)).count((200, None)) >= 1
        await empty(gate.gate)
