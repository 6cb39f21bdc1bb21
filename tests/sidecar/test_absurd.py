"""Absurd values in headers and bodies: each gets a status in our words or the engine's, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.foreign_server import ForeignServer
from sidecar.running import RunningGate, empty, running_gate
from sidecar.scripted_engine import ScriptedEngine
from sluice_sidecar.engines import calibrate

HEADERS = [
    ("x-stainless-retry-count", "99999999999999999999"),
    ("x-stainless-retry-count", "-1"),
    ("x-stainless-retry-count", "1e9"),
    ("x-envoy-attempt-count", "0"),
    ("grpc-previous-rpc-attempts", "4294967296"),
    ("x-envoy-expected-rq-timeout-ms", "-5"),
    ("x-envoy-expected-rq-timeout-ms", "9" * 40),
    ("grpc-timeout", "99999999H"),
    ("x-llm-d-inference-ttl", "1e99h"),
    ("x-stainless-read-timeout", "NaN"),
    ("x-slo-ttft-ms", "999999999999"),
    ("priority", "u=99, i"),
]
REFUSED = [
    ("x-sluice-timeout-ms", "-1"),
    ("x-sluice-timeout-ms", "9" * 30),
    ("x-sluice-ttft-ms", "soon"),
]


@pytest.mark.parametrize(("name", "value"), HEADERS, ids=str)
async def test_what_gateways_and_clients_may_have_written_is_never_a_reason_to_refuse(
    gate: RunningGate, name: str, value: str
) -> None:
    async with gate.post(headers={name: value}) as response:
        assert response.status == 200
        await response.read()
    await empty(gate.gate)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
async def test_our_own_headers_are_refused_by_name(
    gate: RunningGate, engine: ScriptedEngine, name: str, value: str
) -> None:
    async with gate.post(headers={name: value}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, name)
    assert engine.bodies == []
    await empty(gate.gate)


PRIORITIES = [
    "-1",
    "0",
    "7",
    "1" + "0" * 300,
    "-1" + "0" * 300,
    "1e400",
    "-0.0",
    '"urgent"',
    "true",
    "null",
    "[]",
    "{}",
]


@pytest.mark.parametrize("priority", PRIORITIES)
async def test_a_priority_changes_no_bytes_before_our_own_engine(
    gate: RunningGate, engine: ScriptedEngine, priority: str
) -> None:
    body = b'{"messages": [], "max_tokens": 4, "priority": %s}' % priority.encode()
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body) as response:
        assert response.status == 200, await response.text()
    await empty(gate.gate)
    assert engine.bodies == [body]


@pytest.mark.parametrize("has_priorities", [True, False])
async def test_before_another_engine_a_priority_lies_within_its_class_or_is_the_engines_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_priorities: bool
) -> None:
    monkeypatch.setattr(calibrate, "LONG_WORDS", 40)
    async with (
        ForeignServer().running() as server,
        running_gate(None, tmp_path, engine="vllm", engine_url=server.url, engine_priorities=has_priorities) as gate,
    ):
        for priority in PRIORITIES:
            body = b'{"prompt": "x", "max_tokens": 4, "priority": %s}' % priority.encode()
            async with gate.client.post(f"{gate.url}/v1/completions", data=body) as response:
                assert response.status == 200, await response.text()
            sent = server.bodies[-1].get("priority")
            asked: Any = json.loads(priority)
            if not has_priorities:
                assert sent is None
            elif isinstance(asked, int) or asked is None:
                assert sent == 4 + (isinstance(asked, int) and asked > 0), "class standard, or the last of it"
            else:
                assert sent == asked
        await empty(gate.gate)


async def test_a_number_that_python_refuses_to_read_is_a_sentence(gate: RunningGate, engine: ScriptedEngine) -> None:
    body = b'{"messages": [], "max_tokens": 4, "priority": 1%s}' % (b"0" * 5_000)
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "invalid_json")
    assert engine.bodies == []


async def test_a_body_that_is_too_deep_for_what_is_done_with_it_is_a_sentence_and_leaves_nothing(
    gate: RunningGate, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beyond(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded while encoding a JSON object")

    monkeypatch.setattr(gate.gate.engine, "body_for_engine", beyond)
    async with gate.post() as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "invalid_json")
    assert error["message"] == "The body is nested too deep."
    assert engine.bodies == []
    await empty(gate.gate)


async def test_all_of_it_at_once_leaves_nothing(gate: RunningGate) -> None:
    async def ask(headers: dict[str, str], priority: str) -> int:
        body = b'{"messages": [], "max_tokens": 4, "stream": true, "priority": %s}' % priority.encode()
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body, headers=headers) as response:
            await response.read()
            return response.status

    asked = [
        ask(dict((HEADERS + REFUSED)[number % 15 : number % 15 + 3]), PRIORITIES[number % len(PRIORITIES)])
        for number in range(60)
    ]

    assert set(await asyncio.gather(*asked)) <= {200, 400, 429}
    await empty(gate.gate)
