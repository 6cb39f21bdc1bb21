"""Spans: off by default, with the client's trace context passed through; on, sent to a collector over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidecar.running import RunningGate, empty, running_gate
from sidecar.scripted_engine import Script, ScriptedEngine
from sidecar.test_process import write_config
from sluice_sidecar.__main__ import main
from sluice_sidecar.telemetry import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


@dataclass
class Collector:
    """What was sent to it."""

    url: str = ""
    spans: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, str] = field(default_factory=dict)

    async def take(self, request: web.Request) -> web.Response:
        told = ExportTraceServiceRequest.FromString(await request.read())
        for batch in told.resource_spans:
            self.resource = {item.key: item.value.string_value for item in batch.resource.attributes}
            self.spans |= {span.name: span for scope in batch.scope_spans for span in scope.spans}
        return web.Response(body=b"", content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def attributes(span: Any) -> dict[str, object]:
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


async def ended(gate: RunningGate, **request: Any) -> int:
    async with gate.post(**request) as response:
        await response.read()
    await empty(gate.gate)
    await gate.gate.tracing.close()
    return int(response.status)


async def test_a_request_has_a_span_below_its_clients_and_the_engine_one_below_that(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async with (
        collecting() as collector,
        running_gate(engine, socket_dir, otlp_endpoint=collector.url) as gate,
    ):
        assert await ended(gate, headers=CONTEXT) == 200

        ours, engines = collector.spans["POST /v1/chat/completions"], collector.spans["engine"]
        (told,) = engine.headers
        assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (TRACE, PARENT)
        assert (engines.trace_id, engines.parent_span_id) == (ours.trace_id, ours.span_id)
        assert told["traceparent"] == f"00-{TRACE}-{engines.span_id.hex()}-01"
        assert told["tracestate"] == "vendor=1"
        assert [event.name for event in ours.events] == ["decided", "first token"]
        times = [ours.start_time_unix_nano, *(e.time_unix_nano for e in ours.events), ours.end_time_unix_nano]
        assert times == sorted(times)
        assert attributes(ours) | {"sluice.request_id": ""} == {
            "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
            "sluice.outcome": "completed", "sluice.promise": "kept", "sluice.attempt": 0, "sluice.request_id": "",
            "gen_ai.usage.input_tokens": attributes(ours)["gen_ai.usage.input_tokens"],
        } | ({"gen_ai.usage.output_tokens": 3} if "gen_ai.usage.output_tokens" in attributes(ours) else {})  # fmt: skip
        assert collector.resource["service.name"] == "sluice-gate"
        assert collector.resource["sluice.served_name"] == "tiny"


@pytest.mark.parametrize(
    ("script", "body", "status", "reason", "is_error"),
    [
        pytest.param(Script(), {"max_tokens": 5_000}, 400, "context_length_exceeded", False, id="refused"),
        pytest.param(Script(die_before_token=0), {"stream": False}, 502, "engine_failed", True, id="failed"),
    ],
)
async def test_what_went_wrong_stands_in_its_span(
    engine: ScriptedEngine, socket_dir: Path, *, script: Script, body: dict[str, Any], status: int, reason: str,
    is_error: bool,
) -> None:  # fmt: skip
    engine.script = script
    async with (
        collecting() as collector,
        running_gate(engine, socket_dir, otlp_endpoint=f"{collector.url}/v1/traces") as gate,
    ):
        assert await ended(gate, **body) == status

        span = collector.spans["POST /v1/chat/completions"]
        said = attributes(span)
        assert (said["http.response.status_code"], said["sluice.reason"]) == (status, reason)
        assert (span.status.code == span.status.STATUS_CODE_ERROR) is is_error


BROKEN = [
    pytest.param({"traceparent": "garbage"}, id="no-context"),
    pytest.param({"traceparent": f"ff-{TRACE}-{PARENT}-01"}, id="a-version-that-is-forbidden"),
    pytest.param({"traceparent": f"00-{'0' * 32}-{PARENT}-01"}, id="a-trace-of-zeros"),
    pytest.param({"traceparent": f"00-{TRACE}-{PARENT}-01-more"}, id="more-than-the-version-has"),
    pytest.param({"traceparent": f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01"}, id="two"),
]


@pytest.mark.parametrize("sent", BROKEN)
async def test_a_context_that_is_none_begins_a_trace_of_its_own(
    engine: ScriptedEngine, socket_dir: Path, sent: dict[str, str]
) -> None:
    async with (
        collecting() as collector,
        running_gate(engine, socket_dir, otlp_endpoint=collector.url) as gate,
    ):
        assert await ended(gate, headers=sent | {"tracestate": "vendor=1"}) == 200

        ours, engines = collector.spans["POST /v1/chat/completions"], collector.spans["engine"]
        assert ours.parent_span_id == b""
        assert ours.trace_id.hex() != TRACE
        (told,) = engine.headers
        assert told["traceparent"].startswith(f"00-{ours.trace_id.hex()}-{engines.span_id.hex()}-0")


async def test_who_left_stands_in_its_span(engine: ScriptedEngine, socket_dir: Path) -> None:
    engine.script = Script(hold_token={1: asyncio.Event()})
    async with (
        collecting() as collector,
        running_gate(engine, socket_dir, otlp_endpoint=collector.url) as gate,
    ):
        async with gate.post() as response:
            await response.content.readany()
        await empty(gate.gate)
        await gate.gate.tracing.close()

        ours = collector.spans["POST /v1/chat/completions"]
        assert attributes(ours)["sluice.outcome"] == "client_left"
        assert collector.spans["engine"].parent_span_id == ours.span_id


async def test_a_client_that_says_not_to_record_is_obeyed(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with (
        collecting() as collector,
        running_gate(engine, socket_dir, otlp_endpoint=collector.url) as gate,
    ):
        assert await ended(gate, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}) == 200

        assert collector.spans == {}
        assert engine.headers[0]["traceparent"].startswith(f"00-{TRACE}-")


async def test_without_an_endpoint_the_context_passes_and_nothing_is_made(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    sent = CONTEXT | {"baggage": "user=1;ttl=5,team=a"}
    assert await ended(gate, headers=sent) == 200

    (told,) = engine.headers
    assert {name: told[name] for name in sent} == sent
    assert isinstance(gate.gate.tracing, tracing.NoTracing)


async def test_a_collector_that_is_down_costs_no_answer(
    engine: ScriptedEngine, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_LAST_SPANS_S", 0.05)
    async with running_gate(engine, socket_dir, otlp_endpoint="http://127.0.0.1:9") as gate:
        assert await ended(gate) == 200


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://a.example/otlp/v1/traces", "https://a.example/otlp/v1/traces"),
    ],
)
def test_an_endpoint_that_names_a_host_only_gets_the_usual_path(endpoint: str, url: str) -> None:
    assert tracing.traces_url(endpoint) == url


def test_an_endpoint_without_the_library_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setattr(tracing, "find_spec", lambda _: None)

    status = main(["--config", str(write_config(tmp_path, otlp_endpoint="http://collector:4318"))])

    assert status == 2
    assert capsys.readouterr().err == (
        "sluice_sidecar: otlp_endpoint: needs the gate's extra: pip install 'sluice-sidecar[tracing]'\n"
    )
