from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sluice_engine import codec
from sluice_engine.core.state import LoadingProgress
from sluice_sidecar.engines import sluice
from sluice_sidecar.errors import Reason
from sluice_sidecar.telemetry.state import GateState
from sluice_sidecar.web import body as body_module
from sluice_sidecar.web import listener


async def error_of(response: Any) -> dict[str, Any]:
    """The error object, after the checks that hold for every one of them."""
    error: dict[str, Any] = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["x-sluice-reason"] == error["code"]
    assert response.headers["Cache-Control"] == "no-store"
    assert error["message"].endswith(".")
    if response.status in {429, 503}:
        assert response.headers["Connection"] == "close"
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        pytest.param("GET", "/nope", 404, "not_found", id="no-such-route"),
        pytest.param("GET", "/", 404, "not_found", id="the-root"),
        pytest.param("GET", "/v1/chat/completions", 405, "method_not_allowed", id="get-where-post-is-meant"),
        pytest.param("DELETE", "/v1/models", 405, "method_not_allowed", id="delete-of-the-models"),
        pytest.param("POST", "/v1/chat/completions/", 404, "not_found", id="a-slash-too-many"),
        pytest.param("POST", "/v1/embeddings", 404, "not_found", id="what-is-not-done-here"),
        pytest.param("GET", "/detokenize", 405, "method_not_allowed", id="get-of-a-text"),
    ],
)
async def test_what_is_not_there(gate: RunningGate, method: str, path: str, status: int, code: str) -> None:
    async with gate.client.request(method, gate.url + path) as response:
        assert response.status == status
        assert (await error_of(response))["code"] == code
        assert ("Allow" in response.headers) is (status == 405)


@pytest.mark.parametrize("path", ["/v1/models/" + "a" * 15_000, "/" + "a" * 15_000])
async def test_an_answer_repeats_no_more_of_a_request_than_is_needed(gate: RunningGate, path: str) -> None:
    async with gate.client.delete(gate.url + path) as response:
        assert response.status in {404, 405}
        assert len((await error_of(response))["message"]) < 400


@pytest.mark.parametrize(
    ("data", "headers", "status", "code"),
    [
        pytest.param(b"{nope", {}, 400, "invalid_json", id="malformed-json"),
        pytest.param(b"[1]", {}, 400, "invalid_json", id="not-an-object"),
        pytest.param(b'{"a":"\xff"}', {}, 400, "invalid_json", id="invalid-utf-8"),
        pytest.param(b"x", {"Content-Encoding": "gzip"}, 415, "unsupported_encoding", id="a-compressed-body"),
        pytest.param(b"x" * 5_000, {}, 413, "body_too_large", id="a-body-over-the-limit"),
    ],
)
async def test_bodies_that_the_gate_itself_refuses(
    engine: ScriptedEngine, socket_dir: Path, data: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with (
        running_gate(engine, socket_dir, body_limit_bytes=4_096) as gate,
        gate.client.post(f"{gate.url}/v1/chat/completions", data=data, headers=headers) as response,
    ):
        assert response.status == status
        assert (await error_of(response))["code"] == code
        assert response.headers["x-should-retry"] == "false"
        assert engine.bodies == []
        await empty(gate.gate)
        assert gate.gate.admission.refused_total == {code: 1}


async def test_a_body_that_grows_over_the_limit_is_refused_while_it_is_read(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1_024

    async with running_gate(engine, socket_dir, body_limit_bytes=4_096) as gate:
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=pieces()) as response:
            assert response.status == 413
        await empty(gate.gate)


async def test_all_bodies_held_together_are_bounded(engine: ScriptedEngine, socket_dir: Path) -> None:
    engine.count_tokens = lambda _prompt: 800
    engine.script = Script(hold_headers=asyncio.Event())
    async with running_gate(engine, socket_dir, body_limit_bytes=4_096, held_bodies_bytes=4_096) as gate:
        first = asyncio.create_task(_status(gate, messages=[{"role": "user", "content": "x" * 2_500}]))
        await until(lambda: bool(engine.bodies))

        async with gate.post(messages=[{"role": "user", "content": "x" * 2_500}]) as response:
            assert response.status == 429
            assert (await error_of(response))["code"] == "bodies_held"

        assert engine.script.hold_headers is not None
        engine.script.hold_headers.set()
        assert await first == 200
        await empty(gate.gate)


async def _status(gate: RunningGate, **request: Any) -> int:
    async with gate.post(**request) as response:
        await response.read()
        return int(response.status)


async def test_before_the_engine_has_ever_answered_it_is_loading(socket_dir: Path) -> None:
    engine = ScriptedEngine(socket_dir / "engine.sock")
    async with running_gate(engine, socket_dir, ready=False) as gate:
        async with gate.post() as response:
            assert response.status == 503
            assert (await error_of(response))["code"] == "engine_loading"
        assert await _probe(gate, "/readyz", admin=False) == (503, "engine_loading\n")
        assert await _probe(gate, "/health", admin=False) == (503, "engine_loading\n")
        assert (await _probe(gate, "/engine/startupz"))[0] == 503
        # Nothing is known yet, so nothing speaks for killing it.
        assert (await _probe(gate, "/engine/livez"))[0] == 200


async def _probe(gate: RunningGate, path: str, *, admin: bool = True) -> tuple[int, str]:
    async with gate.client.get((gate.admin_url if admin else gate.url) + path) as response:
        return response.status, await response.text()


async def test_a_loading_engine_tells_how_far_it_is(engine: ScriptedEngine, socket_dir: Path) -> None:
    engine.state = ready_state(phase="loading", loading=LoadingProgress(stage="weights", bytes_done=2, bytes_total=5))
    async with running_gate(engine, socket_dir, ready=False) as gate:
        await until(lambda: gate.gate.engine.state is not None)

        assert await _probe(gate, "/engine/startupz") == (503, "loading: weights 40 %\n")
        async with gate.post() as response:
            assert (await error_of(response))["code"] == "engine_loading"
        engine.state = ready_state()
        await until(lambda: gate.gate.not_ready() is None)
        assert await _probe(gate, "/engine/startupz") == (200, "ok\n")


async def test_a_dead_engine_is_503_until_it_is_back(gate: RunningGate, engine: ScriptedEngine) -> None:
    await engine.kill()
    await until(lambda: gate.gate.not_ready() == "engine_dead")

    async with gate.post() as response:
        assert response.status == 503
        assert (await error_of(response))["code"] == "engine_dead"
        assert response.headers["x-should-retry"] == "true"
    assert (await _probe(gate, "/readyz", admin=False))[0] == 503

    engine.state = ready_state(boot_id="boot-2")
    await engine.start()
    await until(lambda: gate.gate.not_ready() is None)
    assert await _status(gate) == 200


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"phase": "failed", "failure": "no memory"}, "failed: no memory\n", id="failed"),
        pytest.param({"hung": True, "step_running_us": 12_000_000}, "a step has run for 12 s\n", id="hung"),
    ],
)
async def test_an_engine_that_fails_or_hangs_is_dead(
    gate: RunningGate, engine: ScriptedEngine, changes: dict[str, Any], says: str
) -> None:
    engine.state = replace(engine.state, **changes)
    await until(lambda: gate.gate.not_ready() == "engine_dead")

    async with gate.post() as response:
        assert response.status == 503
    assert await _probe(gate, "/engine/livez") == (503, says)


def _link(gate: RunningGate) -> sluice.SluiceEngine:
    link = gate.gate.engine
    assert isinstance(link, sluice.SluiceEngine)
    return link


async def test_an_engine_between_two_starts_is_given_ten_seconds(gate: RunningGate, engine: ScriptedEngine) -> None:
    await engine.kill()
    await until(lambda: gate.gate.not_ready() == "engine_dead")
    assert (await _probe(gate, "/engine/livez"))[0] == 200

    _link(gate)._clock = lambda: gate.gate.clock() + 11_000_000
    status, text = await _probe(gate, "/engine/livez")

    assert status == 503
    assert text.startswith("its socket has refused connections for 1")


async def test_a_state_that_never_comes_makes_the_gate_stale_and_then_blind_but_not_unready(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    async with running_gate(engine, socket_dir, stale_after_us=20_000, blind_after_us=100_000) as gate:
        engine.freeze = True
        await until(lambda: gate.gate.admission.room.freshness(gate.gate.clock()) == "blind")

        assert gate.gate.not_ready() is None
        assert await _status(gate) == 200


async def _silent_for(gate: RunningGate, engine: ScriptedEngine, silent_us: int) -> None:
    """The engine answers nothing any more, and so much time has gone by."""
    link = _link(gate)
    engine.freeze = True
    await until(lambda: link.life._silent_since_us is not None)
    assert link.life._silent_since_us is not None
    at_us = link.life._silent_since_us + silent_us
    link._clock = lambda: at_us
    await link.poll()


@pytest.mark.parametrize(
    ("silent_us", "ready", "live"),
    [
        pytest.param(9_900_000, 200, 200, id="ten-seconds-may-be-load"),
        pytest.param(10_100_000, 503, 200, id="more-than-ten-take-it-out-of-the-service"),
        pytest.param(59_900_000, 503, 200, id="a-minute-is-waited-for-it-to-come-back"),
        pytest.param(60_100_000, 503, 503, id="more-than-a-minute-ends-it"),
    ],
)
async def test_an_engine_that_was_ready_and_answers_nothing_any_more_is_dead(
    gate: RunningGate,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    silent_us: int,
    ready: int,
    live: int,
) -> None:
    monkeypatch.setattr(sluice, "_POLL_TIMEOUT_S", 0.01)
    await _silent_for(gate, engine, silent_us)

    assert (await _probe(gate, "/readyz", admin=False))[0] == ready
    status, says = await _probe(gate, "/engine/livez")
    assert (status, "answered nothing for 60 s" in says) == (live, live == 503)
    if ready == 503:
        async with gate.post() as response:
            assert (await error_of(response))["code"] == "engine_dead"

    _link(gate)._clock = gate.gate.clock
    engine.freeze = False
    await until(lambda: gate.gate.engine.life.silent_us(0) == 0)
    assert gate.gate.not_ready() is None
    assert await _status(gate) == 200


async def test_an_engine_that_loads_in_silence_is_left_alone(
    engine: ScriptedEngine, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sluice, "_POLL_TIMEOUT_S", 0.01)
    engine.state = ready_state(phase="loading", loading=LoadingProgress(stage="weights"))
    async with running_gate(engine, socket_dir, ready=False) as gate:
        await until(lambda: gate.gate.engine.state is not None)
        await _silent_for(gate, engine, 600_000_000)

        assert (await _probe(gate, "/engine/livez"))[0] == 200
        assert gate.gate.not_ready() == "engine_loading"


async def test_a_frozen_engine_thread_makes_the_state_old_though_it_answers(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    _link(gate)._take(replace(ready_state(seq=10**6), running_requests=1), gate.gate.clock() - 9_000_000)
    _link(gate)._take(replace(ready_state(seq=10**6), running_requests=1), gate.gate.clock())
    assert gate.gate.admission.room.freshness(gate.gate.clock()) == "blind"

    in_a_long_step = replace(ready_state(seq=10**6), running_requests=1, step_running_us=400_000)
    _link(gate)._take(in_a_long_step, gate.gate.clock())
    assert gate.gate.admission.room.freshness(gate.gate.clock()) == "fresh"


async def _fill(gate: RunningGate, engine: ScriptedEngine, number: int, **request: Any) -> list[asyncio.Task[int]]:
    """So many streams that stay open until the script's event is set."""
    before = len(engine.bodies)
    tasks = [asyncio.create_task(_status(gate, **request)) for _ in range(number)]
    await until(lambda: len(engine.bodies) == before + number)
    return tasks


@pytest.mark.parametrize(
    ("live", "state", "first", "second", "code"),
    [
        pytest.param({}, {}, [{}] * 4, {}, "slots", id="all-slots-taken"),
        pytest.param(
            {}, {}, [{"max_tokens": 900}], {"max_tokens": 900}, "kv_peak", id="the-cache-would-overflow-later"
        ),
        pytest.param(
            {"ttft_us": 9_000},
            {},
            [{"max_tokens": 5}],
            {"messages": [{"role": "user", "content": "x" * 900}]},
            "ttft_promise",
            id="the-first-token-would-come-too-late",
        ),
    ],
)
async def test_busy_is_429_with_a_reason_and_never_unready(
    engine: ScriptedEngine,
    socket_dir: Path,
    live: dict[str, Any],
    state: dict[str, Any],
    first: list[dict[str, Any]],
    second: dict[str, Any],
    code: str,
) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0, **live)) as gate:
        tasks = [task for request in first for task in await _fill(gate, engine, 1, **request)]

        async with gate.post(**second) as response:
            assert response.status == 429
            error = await error_of(response)
            assert (error["code"], error["type"]) == (code, "rate_limit_error")
            assert response.headers["x-should-retry"] == "true"
            assert response.headers["x-envoy-ratelimited"] == "true"
        assert await _probe(gate, "/readyz", admin=False) == (200, "ok\n")
        assert await _probe(gate, "/health", admin=False) == (200, "ok\n")

        hold.set()
        assert await asyncio.gather(*tasks) == [200] * len(tasks)
        await empty(gate.gate)


async def test_one_that_waits_at_the_door_gets_the_first_slot_that_frees(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=60_000_000, ttft_us=600_000_000)) as gate:
        tasks = await _fill(gate, engine, 4)
        waiting = asyncio.create_task(_status(gate))
        await until(lambda: gate.gate.admission.waiting == 1)

        hold.set()

        assert await waiting == 200
        assert await asyncio.gather(*tasks) == [200] * 4
        await empty(gate.gate)


async def test_a_wait_at_the_door_that_is_over_is_429(engine: ScriptedEngine, socket_dir: Path) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=20_000)) as gate:
        tasks = await _fill(gate, engine, 4)

        async with gate.post() as response:
            assert (await error_of(response))["code"] == "slots"

        hold.set()
        await asyncio.gather(*tasks)
        await empty(gate.gate)


@pytest.mark.parametrize(
    ("text", "counts", "status"),
    [
        pytest.param("x" * 3_600, 1, 200, id="near-the-limit-and-fits-when-counted"),
        pytest.param("y" * 3_600, 1, 400, id="near-the-limit-and-does-not"),
        pytest.param("x" * 40_000, 0, 400, id="far-beyond-is-refused-uncounted"),
    ],
)
async def test_a_prompt_near_the_context_length_is_counted_exactly(
    gate: RunningGate, engine: ScriptedEngine, text: str, counts: int, status: int
) -> None:
    engine.count_tokens = lambda prompt: 900 if prompt.startswith("x") else 1_020

    async with gate.post(messages=[{"role": "user", "content": text}]) as response:
        assert response.status == status
        if status == 400:
            error = await error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            assert "1024" in error["message"]
    assert len(engine.tokenized) == counts


async def test_the_body_reaches_the_engine_byte_for_byte(gate: RunningGate, engine: ScriptedEngine) -> None:
    body = b'{ "messages":[{"role":"user","content":"h\\u00e9"}],\n "unknown":1e2, "max_tokens":4 }'

    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body) as response:
        assert response.status == 200

    assert engine.bodies == [body]


async def test_a_long_body_reaches_the_engine_in_parts_and_byte_for_byte(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":4' + b" " * (3 * 2**20) + b"}"

    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=io.BytesIO(body)) as response:
        assert response.status == 200

    assert engine.bodies == [body]


async def test_ids_are_minted_kept_and_echoed_and_identity_of_clients_is_dropped(
    gate: RunningGate, engine: ScriptedEngine
) -> None:
    headers = {
        "x-request-id": "mine", "x-sluice-request-id": "forged", "x-sluice-tenant": "forged",
        "Connection": "keep-alive, x-private", "x-private": "1", "TE": "trailers", "traceparent": "00-1",
    }  # fmt: skip
    async with gate.post(headers=headers) as response:
        body = await response.read()

    (seen,) = engine.headers
    assert body.endswith(b"[DONE]\n\n")
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-sluice-request-id"] == seen["x-sluice-request-id"]
    assert seen["x-sluice-request-id"].startswith("req-")
    assert seen["x-request-id"] == "mine"
    assert seen["traceparent"] == "00-1"
    assert not seen.keys() & {"x-sluice-tenant", "x-private", "te"}
    assert not response.headers.keys() & {"x-secret", "Keep-Alive", "x-sluice-tenant"}
    assert response.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize(("tier", "served"), [("flex", "batch"), ("priority", "standard"), (7, "standard")])
async def test_who_asks_for_a_tier_steps_back_or_stays(
    gate: RunningGate, engine: ScriptedEngine, tier: object, served: str
) -> None:
    async with gate.post(service_tier=tier) as response:
        await response.read()

    assert engine.headers[0]["x-sluice-class"] == served


async def test_a_refusal_carries_the_ids_too(gate: RunningGate) -> None:
    async with gate.client.post(
        f"{gate.url}/v1/chat/completions", data=b"{", headers={"x-request-id": "mine"}
    ) as response:
        await error_of(response)

    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-sluice-request-id"].startswith("req-")


async def test_the_engines_own_refusal_of_a_field_passes_through(gate: RunningGate, engine: ScriptedEngine) -> None:
    engine.script = Script(status=400)

    async with gate.post() as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "n"
    await empty(gate.gate)


@pytest.mark.parametrize(("theirs", "ours", "code"), [(429, 429, "engine_overloaded"), (503, 503, "engine_loading")])
async def test_the_engines_own_overload_is_answered_in_our_words(
    gate: RunningGate, engine: ScriptedEngine, theirs: int, ours: int, code: str
) -> None:
    engine.script = Script(status=theirs)

    async with gate.post() as response:
        assert response.status == ours
        assert (await error_of(response))["code"] == code
    await empty(gate.gate)


async def test_models_come_from_the_engine(gate: RunningGate) -> None:
    async with gate.client.get(f"{gate.url}/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "tiny"
    async with gate.client.get(f"{gate.url}/v1/models/some%2Fname") as response:
        assert (await response.json())["id"] == "some/name", "the name reaches the engine as it was written"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/v1/models/../../state", id="dots"),
        pytest.param("/v1/models/%2e%2e/%2E%2E/state", id="encoded-dots"),
        pytest.param("/v1/models/..%2f..%2fstate", id="encoded-slashes"),
        pytest.param("/v1/models/a/../../../metrics", id="through-a-name"),
    ],
)
async def test_no_name_of_a_model_leads_to_another_route_of_the_engine(gate: RunningGate, path: str) -> None:
    answer = await _raw(gate, f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())

    assert b'"object": "model"' in answer, "what stands behind the slash is a name"


async def test_an_absolute_address_is_taken_as_its_path(gate: RunningGate) -> None:
    answer = await _raw(gate, b"GET http://a/v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert b'"object": "list"' in answer


async def _raw(gate: RunningGate, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GARBAGE\r\n\r\n", id="no-http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4, id="tls"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="a-version-of-the-future"),
        pytest.param(b"GET /livez HTTP/1.1\r\nA B: c\r\n\r\n", id="a-space-in-a-header's-name"),
        pytest.param(b"GET /livez HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", id="a-header-too-long"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
            id="two-lengths",
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            id="a-length-and-chunks",
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nhello\r\n",
            id="bad-chunks",
        ),
    ],
)
async def test_malformed_http_is_a_400_in_our_words_without_a_traceback(
    gate: RunningGate, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    answer = await _raw(gate, data)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "bad_request"
    assert caplog.records == []


async def test_headers_that_do_not_come_are_not_waited_for(gate: RunningGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 0.02)

    answer = await _raw(gate, b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-")

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


async def test_the_clock_on_headers_runs_also_when_they_come_before_anybody_waits_for_them(
    gate: RunningGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 0.02)
    said = asyncio.Event()

    class Hasty(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            assert bytes(data).startswith(b"HTTP/1.1 408 ")
            said.set()

        def is_closing(self) -> bool:
            return False

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

        def close(self) -> None:
            pass

    protocol = listener.GateServer(gate.gate.handle, user_timeout_ms=1000)()
    protocol.connection_made(Hasty())
    protocol.data_received(b"POST /v1")  # as uvloop does it: the connection's task has not run yet

    async with asyncio.timeout(10):
        await said.wait()
    protocol.connection_lost(None)


async def test_a_body_that_does_not_come_is_not_waited_for(gate: RunningGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.02)
    monkeypatch.setattr(listener, "LINGER_S", 0.02)

    answer = await _raw(gate, b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")

    assert answer.startswith(b"HTTP/1.1 408 ")
    await empty(gate.gate)


async def test_a_client_that_asks_first_is_told_to_go_on(gate: RunningGate) -> None:
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    body = b'{"messages": [], "max_tokens": 2}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    writer.write(body)

    rest = await reader.read()

    assert b"HTTP/1.1 200 OK" in rest
    writer.close()


async def test_the_gates_state_is_its_contract(gate: RunningGate) -> None:
    assert await _status(gate) == 200
    await empty(gate.gate)

    async with gate.client.get(f"{gate.admin_url}/state") as response:
        state = codec.from_json(GateState, await response.read(), "state")

    assert state.ready
    assert state.freshness == "fresh"
    assert (state.admission.open, state.admission.reason, state.admission.admitted_total) == (True, "", 1)
    assert (state.measured.requests, state.measured.good_requests) == (1, 1)
    assert state.measured.time_to_first_token_us is not None
    assert state.engine is not None
    assert state.engine.model == "tiny"


@pytest.mark.parametrize(("status", "outcome"), [(400, "refused"), (404, "refused"), (500, "failed")])
async def test_what_the_engine_answers_with_an_error_is_not_completed(
    gate: RunningGate, engine: ScriptedEngine, status: int, outcome: str
) -> None:
    engine.script = Script(status=status)
    assert await _status(gate) == status
    await empty(gate.gate)

    async with gate.client.get(f"{gate.admin_url}/metrics") as response:
        page = await response.text()
    assert f'sluice_gate_requests_total{{outcome="{outcome}",route="chat"}} 1.0' in page
    assert 'sluice_gate_requests_total{outcome="completed",route="chat"}' not in page


async def test_one_page_has_the_gates_metrics_and_the_engines_without_those_of_its_process(gate: RunningGate) -> None:
    assert await _status(gate) == 200
    await empty(gate.gate)

    async with gate.client.get(f"{gate.admin_url}/metrics") as response:
        page = await response.text()

    families = {family.name: family for family in text_string_to_metric_families(page)}
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}
    assert samples["sluice_engine_steps_total",] == 7
    assert samples["sluice_gate_admitted_total",] == 1
    assert samples["sluice_gate_requests_total", ("outcome", "completed"), ("route", "chat")] == 1
    assert samples["sluice_gate_promise_total", ("verdict", "kept")] == 1
    assert all(samples["sluice_gate_refused_total", ("reason", reason.value)] == 0 for reason in Reason)
    assert "python_info" not in families
    assert page.count("process_open_fds ") == 3  # the gate's own: HELP, TYPE and one sample
    assert all(family.documentation for family in families.values())


async def test_a_dead_engine_leaves_no_old_numbers_on_the_page(gate: RunningGate, engine: ScriptedEngine) -> None:
    await engine.kill()

    async with gate.client.get(f"{gate.admin_url}/metrics") as response:
        assert "sluice_engine_" not in await response.text()


async def test_steps_pass_through_with_their_query(gate: RunningGate) -> None:
    async with gate.client.get(f"{gate.admin_url}/steps?last=7") as response:
        assert await response.json() == {"steps": [], "last": "7"}


async def test_the_admin_port_knows_its_pages_only(gate: RunningGate) -> None:
    async with gate.client.get(f"{gate.admin_url}/v1/models") as response:
        assert response.status == 404
        await error_of(response)
    async with gate.client.post(f"{gate.admin_url}/state") as response:
        assert response.status == 405
    assert await _probe(gate, "/livez") == (200, "ok\n")
    assert await _probe(gate, "/livez", admin=False) == (200, "ok\n")
