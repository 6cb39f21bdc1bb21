"""An engine that does as it is told: the HTTP contract of the real one on a Unix socket, without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from sidecar.killable import Killable
from sluice_engine import codec
from sluice_engine.core.state import DerivedLimits, EngineState, PoolState, RequestState, StepCost
from sluice_engine.live_config import AdmissionConfig, LiveConfig, SLOConfig

BLOCK_TOKENS = 16


def ready_state(**changes: Any) -> EngineState:
    """A ready, idle engine: 4 slots, 100 blocks, a context of 1,024 tokens, 10 ms a step and 50 µs a prefill token."""
    state = EngineState(
        schema_version="1.0",
        boot_id="boot-1",
        seq=1,
        phase="ready",
        model="tiny",
        max_length_tokens=1024,
        pool=PoolState(block_tokens=BLOCK_TOKENS, total_blocks=100, free_blocks=100),
        derived=DerivedLimits(
            feasible=True, chunk_ceiling_tokens=256, token_budget=512, max_sequences=4, kv_capacity_tokens=1600
        ),
        step_cost=StepCost(fixed_us=5_000, decode_us=5_000, per_prefill_token_ns=50_000),
        decode_curve_us=((1, 8_000), (4, 10_000)),
    )
    return replace(state, **changes)


def live_config(
    *, ttft_us: int = 2_000_000, itl_us: int = 100_000, max_wait_us: int = 300_000, **slo: Any
) -> LiveConfig:
    """The promise that the tests' gates keep."""
    return LiveConfig(
        slo=SLOConfig(time_to_first_token_us=ttft_us, inter_token_latency_us=itl_us, **slo),
        admission=AdmissionConfig(max_wait_us=max_wait_us),
    )


@dataclass
class Script:
    """What happens to a request."""

    tokens: int = 3
    status: int = 200
    hold_headers: asyncio.Event | None = None
    hold_token: dict[int, asyncio.Event] = field(default_factory=dict)
    """Waits for the event before the token of this index."""
    error_before_token: int | None = None
    """Ends there with the event of a missed deadline."""
    die_before_token: int | None = None
    """Kills the connection there."""
    text: str = "tok"
    partial_event: bool = False
    """Dies in the middle of an event."""


@dataclass
class ScriptedEngine(Killable):
    """Serves on `socket_path` while inside `running()`."""

    socket_path: Path
    state: EngineState = field(default_factory=ready_state)
    script: Script = field(default_factory=Script)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    detokenized: list[dict[str, Any]] = field(default_factory=list)
    text: str = "hi"
    """What tokens are read as."""
    aborted: int = 0
    sent_tokens: int = 0
    active: dict[str, RequestState] = field(default_factory=dict)
    count_tokens: Callable[[str], int] = len
    freeze: bool = False
    """Answers `/state` never."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/state", self._state)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/steps", self._steps)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        return app

    async def listen(self, runner: web.AppRunner) -> None:
        await web.UnixSite(runner, str(self.socket_path)).start()

    async def kill(self) -> None:
        """Gone, connections and socket file included."""
        await super().kill()
        self.active.clear()

    async def _state(self, request: web.Request) -> web.Response:
        if self.freeze:
            await asyncio.Event().wait()
        self.state = replace(self.state, seq=self.state.seq + 1)
        running = tuple(self.active.values())
        state = replace(self.state, requests=(*self.state.requests, *running), running_requests=len(running))
        return web.Response(text=codec.to_json(state), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        page = (
            "# HELP sluice_engine_steps_total Steps.\n# TYPE sluice_engine_steps_total counter\n"
            "sluice_engine_steps_total 7.0\n"
            "# HELP process_open_fds Open.\n# TYPE process_open_fds gauge\nprocess_open_fds 12.0\n"
            '# HELP python_info Python.\n# TYPE python_info gauge\npython_info{version="3.11"} 1.0\n'
        )
        return web.Response(text=page)

    async def _steps(self, request: web.Request) -> web.Response:
        return web.json_response({"steps": [], "last": request.query.get("last")})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response({"id": request.match_info["name"], "object": "model"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized.append(body)
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        return web.json_response({"count": self.count_tokens(text), "max_model_len": 1024, "tokens": []})

    async def _detokenize(self, request: web.Request) -> web.Response:
        self.detokenized.append(await request.json())
        if self.script.hold_headers is not None:
            await self.script.hold_headers.wait()
        return web.json_response({"prompt": self.text})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        content = await request.read()
        self.bodies.append(content)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        body = json.loads(content)
        gate_id = request.headers.get("x-sluice-request-id", "none")
        self.active[gate_id] = RequestState(
            id=gate_id, choice=0, status="running", prompt_tokens=20, computed_tokens=20, output_tokens=1,
            max_tokens=body.get("max_tokens") or 100, blocks=2, incarnation=0, preemptions=0,
        )  # fmt: skip
        try:
            if script.hold_headers is not None:
                await script.hold_headers.wait()
            if script.status != 200:
                error = {"error": {"message": "scripted", "type": "invalid_request_error", "param": "n", "code": "no"}}
                return web.json_response(error, status=script.status)
            if body.get("stream"):
                return await self._stream(request, script)
            return await self._whole(request, script)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.active.pop(gate_id, None)

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Connection": "x-secret",
                                               "x-secret": "1", "Keep-Alive": "timeout=5"})  # fmt: skip
        await response.prepare(request)
        await response.write(_event({"role": "assistant", "content": ""}))
        for index in range(script.tokens):
            if (hold := script.hold_token.get(index)) is not None:
                await hold.wait()
            if script.error_before_token == index:
                error = {"message": "too late", "type": "server_error", "param": None, "code": "deadline_missed"}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                await response.write_eof()
                return response
            if script.die_before_token == index:
                if script.partial_event:
                    await response.write(b'data: {"choices": [{"delta": {"cont')
                assert request.transport is not None
                request.transport.abort()
                await asyncio.Event().wait()
            await response.write(_event({"content": script.text}))
            self.sent_tokens += 1
        await response.write(_event({}, finish_reason="stop"))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _whole(self, request: web.Request, script: Script) -> web.StreamResponse:
        for hold in script.hold_token.values():
            await hold.wait()
        text = script.text * script.tokens
        content = json.dumps({
            "id": "c", "object": "chat.completion", "created": 1, "model": "tiny",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 20, "completion_tokens": script.tokens, "total_tokens": 20 + script.tokens},
        }).encode()  # fmt: skip
        if script.die_before_token is None:
            return web.Response(body=content, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(content)
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
