"""Class, tenant, order and bounds of a call, from headers and body to the request in the engine; and a missed bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.serving import Served, served, until
from sluice_engine.core.request import Request


@pytest.fixture
async def engine() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 50} | fields


async def arrived(engine: Served, body: dict[str, Any], headers: dict[str, str]) -> Request:
    """The request as the engine has it, of a call that is then left."""
    engine.runner.may_step.clear()
    task = asyncio.create_task(engine.post("/v1/chat/completions", body, **headers))
    await until(lambda: bool(engine.scheduler.requests))
    request = next(iter(engine.scheduler.requests.values()))
    task.cancel()
    engine.runner.may_step.set()
    await engine.idle()
    return request


@pytest.mark.parametrize(
    ("fields", "headers", "priority"),
    [
        pytest.param({}, {}, 4, id="standard-when-nothing-is-said"),
        pytest.param({}, {"x-sluice-class": "critical"}, 0, id="the-class-of-the-header"),
        pytest.param({"priority": 0}, {"x-sluice-class": "batch"}, 6, id="priority-zero-is-the-usual-place"),
        pytest.param({"priority": 7}, {"x-sluice-class": "batch"}, 7, id="a-higher-number-goes-behind-in-its-class"),
        pytest.param({"service_tier": "flex"}, {}, 6, id="flex-steps-back"),
        pytest.param(
            {"service_tier": "flex"}, {"x-sluice-class": "background"}, 8, id="flex-steps-back-and-no-further"
        ),
        pytest.param({"service_tier": "priority"}, {}, 4, id="no-tier-steps-forward"),
        pytest.param({"priority": -1_000_000}, {}, 4, id="no-number-leads-out-of-the-class"),
    ],
)
async def test_priority(engine: Served, fields: dict[str, Any], headers: dict[str, str], priority: int) -> None:
    assert (await arrived(engine, chat("endless", **fields), headers)).priority == priority


@pytest.mark.parametrize("value", [1_000_001, -1_000_001, 1.5, "high", True])
async def test_an_absurd_priority_is_400(engine: Served, value: object) -> None:
    status, body = await engine.post("/v1/chat/completions", chat("hi", priority=value))

    assert status == 400
    assert body["error"]["param"] == "priority"


async def test_tenant_and_deadlines_reach_the_request(engine: Served) -> None:
    headers = {"x-sluice-tenant": "team-a", "x-sluice-ttft-ms": "60000", "x-sluice-timeout-ms": "90000"}

    request = await arrived(engine, chat("endless", stream=True), headers)

    assert request.tenant == "team-a"
    assert request.first_token_deadline_us == request.arrival_us + 60_000_000
    assert request.finish_deadline_us == request.arrival_us + 90_000_000


async def test_a_header_that_breaks_a_rule_is_400_and_named(engine: Served) -> None:
    status, body = await engine.post("/v1/chat/completions", chat("hi"), **{"x-sluice-ttft-ms": "soon"})

    assert status == 400
    assert body["error"]["param"] == "x-sluice-ttft-ms"
    assert "whole number of milliseconds" in body["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_missed_before_the_first_token_is_504_streamed_or_not(engine: Served, *, stream: bool) -> None:
    call = engine.http.post(
        "/v1/chat/completions", json=chat("endless", stream=stream), headers={"x-sluice-ttft-ms": "0"}
    )

    async with call as response:
        body = await response.json()

    assert response.status == 504
    assert body["error"]["code"] == "deadline_missed"
    assert response.headers["x-should-retry"] == "false"
    await engine.idle()


async def test_a_deadline_missed_while_running_is_an_error_event_and_frees_the_blocks() -> None:
    headers = {"x-sluice-timeout-ms": "1500"}
    body = chat("endless", stream=True, max_tokens=60_000)
    async with served(num_blocks=16_000, max_length=64_000) as engine:
        async with engine.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
        await engine.idle()

    assert response.status == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_missed"
    assert "[DONE]" not in events[-1]


async def test_a_deadline_missed_by_a_whole_answer_is_504() -> None:
    body = chat("endless", max_tokens=60_000)
    async with served(num_blocks=16_000, max_length=64_000) as engine:
        status, error = await engine.post("/v1/chat/completions", body, **{"x-sluice-timeout-ms": "1500"})
        await engine.idle()

    assert (status, error["error"]["code"]) == (504, "deadline_missed")


async def test_a_stream_with_a_bound_has_its_whole_answer(engine: Served) -> None:
    headers = {"x-sluice-ttft-ms": "60000"}
    async with engine.http.post("/v1/chat/completions", json=chat("say:ok", stream=True), headers=headers) as response:
        text = (await response.read()).decode()

    assert '"content":"o"' in text.replace(" ", "") or '"content":"ok"' in text.replace(" ", "")
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param({}, None, id="nothing-is-expected-unless-the-gate-says-so"),
        pytest.param({"x-sluice-expected-output-tokens": "12"}, 12, id="what-the-gate-expects"),
        pytest.param({"x-sluice-expected-output-tokens": "90"}, 50, id="no-more-than-is-asked-for"),
        pytest.param(
            {"x-sluice-expected-output-tokens": "12", "x-sluice-timeout-ms": "60000"},
            None,
            id="no-deadline-is-given-up-for-an-expectation",
        ),
    ],
)
async def test_the_gates_expectation_reaches_the_order(
    engine: Served, headers: dict[str, str], expected: int | None
) -> None:
    request = await arrived(engine, chat("hello"), headers)

    assert request.expected_output_tokens == expected
