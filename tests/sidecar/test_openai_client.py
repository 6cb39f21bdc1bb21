"""The real `openai` client against the gate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config


def client_of(gate: RunningGate, *, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=max_retries)


async def chat(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=16, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return "".join(parts)


async def test_a_chat_streams(gate: RunningGate) -> None:
    async with client_of(gate) as client:
        assert await chat(client) == "toktoktok"


async def test_its_own_retry_comes_back_when_we_said_and_gets_in(engine: ScriptedEngine, socket_dir: Path) -> None:
    hold = asyncio.Event()
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate, client_of(gate) as client:
        for _ in range(3):
            await chat(client)  # measures the drain: without it no time is named
        engine.script = Script(hold_token={1: hold})
        admission = gate.gate.admission
        running = [asyncio.create_task(chat(client)) for _ in range(4)]
        await until(lambda: len(admission.room.ledger.entries) == 4)
        announced_us: list[int] = []
        delay_us = admission.returning.retry_after.delay_us

        def note(*asked: Any) -> int | None:
            announced_us.append(delay_us(*asked) or 0)
            return announced_us[-1]

        admission.returning.retry_after.delay_us = note  # type: ignore[method-assign, assignment]
        async with client_of(gate, max_retries=1) as retrying:
            refused = asyncio.create_task(chat(retrying))
            await until(lambda: admission.refused_total["slots"] == 1)
            refused_us = gate.gate.clock()
            hold.set()
            await asyncio.gather(*running)

            assert await refused == "toktoktok"

        returned_us = gate.gate.clock()
        # The client's own pause would be half a second; ours is a second at least.
        assert announced_us[0] >= 1_000_000
        assert returned_us - refused_us >= announced_us[0] - 10_000
        await empty(gate.gate)


async def test_refusals_become_its_own_errors_with_our_sentences(gate: RunningGate, engine: ScriptedEngine) -> None:
    async with client_of(gate) as client:
        with pytest.raises(openai.BadRequestError, match="context length") as bad:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5_000
            )
        assert bad.value.code == "context_length_exceeded"

        engine.script = Script(hold_token={1: asyncio.Event()})
        running = [asyncio.create_task(chat(client)) for _ in range(4)]
        await until(lambda: len(engine.bodies) == 4)
        with pytest.raises(openai.RateLimitError, match="4 of 4 slots are taken") as busy:
            await chat(client)
        assert busy.value.response.headers["x-sluice-reason"] == "slots"

        await engine.kill()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert [type(result) for result in results] == [openai.APIError] * 4
        await until(lambda: gate.gate.not_ready() is not None)
        with pytest.raises(openai.InternalServerError, match="engine is down"):
            await chat(client)
