"""`/tokenize` and `/detokenize` at the gate: a few at a time, and nobody who is slow holds the others up."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine
from sluice_sidecar.tokenizing import MOST_AT_ONCE, MOST_BYTES

BODY = b'{"tokens": [1, 2]}'


async def ask(gate: RunningGate) -> tuple[int, dict[str, object]]:
    async with gate.client.post(f"{gate.url}/detokenize", data=BODY) as response:
        return response.status, await response.json()


async def test_more_at_once_than_may_be_are_refused_and_the_next_are_served(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_headers=hold)
    inside = [asyncio.create_task(ask(gate)) for _ in range(MOST_AT_ONCE)]
    await until(lambda: len(engine.detokenized) == MOST_AT_ONCE)

    assert (await ask(gate))[0] == 429

    hold.set()
    assert [(await one)[0] for one in inside] == [200] * MOST_AT_ONCE
    assert await ask(gate) == (200, {"prompt": "hi"})
    await empty(gate.gate)


async def test_clients_that_are_slow_to_send_take_nobodys_place(gate: RunningGate, engine: ScriptedEngine) -> None:
    head = b"POST /detokenize HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    writers = []
    for _ in range(MOST_AT_ONCE):
        _, writer = await asyncio.open_connection(gate.host, gate.port)
        writer.write(head + BODY[:-1])
        writers.append(writer)
    await until(lambda: gate.gate.held.held_bytes == MOST_AT_ONCE * (len(BODY) - 1))

    assert (await ask(gate))[0] == 200

    for writer in writers:
        writer.write(BODY[-1:])
    await until(lambda: len(engine.detokenized) == MOST_AT_ONCE + 1)
    await empty(gate.gate)
    for writer in writers:
        writer.close()


async def test_one_that_leaves_in_its_body_holds_nothing(gate: RunningGate, engine: ScriptedEngine) -> None:
    _, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    await until(lambda: gate.gate.held.held_bytes == 1)

    writer.close()

    await empty(gate.gate)
    assert engine.tokenized == []


@pytest.mark.parametrize(("limit_bytes", "most"), [(8 * MOST_BYTES, MOST_BYTES), (4_096, 4_096)])
async def test_a_text_that_would_take_much_of_the_engines_memory_is_refused_unread(
    engine: ScriptedEngine, socket_dir: Path, limit_bytes: int, most: int
) -> None:
    async with running_gate(engine, socket_dir, body_limit_bytes=limit_bytes) as gate:
        async with gate.client.post(f"{gate.url}/detokenize", data=BytesIO(b" " * (most + 1))) as response:
            assert response.status == 413
            assert str(most) in (await response.json())["error"]["message"]
        async with gate.client.post(f"{gate.url}/detokenize", data=BytesIO(BODY.ljust(most))) as response:
            assert response.status == 200
        await empty(gate.gate)
