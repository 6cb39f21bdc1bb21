"""Another engine that does as it is told: vLLM's and llama.cpp's routes on a loopback port, without a model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from sidecar.killable import Killable

PAGES = Path(__file__).parent / "pages"


def page(name: str) -> bytes:
    """A page that a real engine gave."""
    return (PAGES / f"{name}.txt").read_bytes()


def vllm_page(**values: float | None) -> bytes:
    """A small page of vLLM's: 64 blocks of 16 tokens; a value of None leaves its series out."""
    series: dict[str, float | None] = {
        "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0, "num_preemptions_total": 0,
        "inter_token_latency_seconds_sum": 0.0, "inter_token_latency_seconds_count": 0, "prompt_tokens_total": 0,
        "generation_tokens_total": 0,
    }  # fmt: skip
    series |= values
    lines = [f'vllm:{name}{{engine="0"}} {value}' for name, value in series.items() if value is not None]
    lines.append('vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="64"} 1.0')
    return ("\n".join(lines) + "\n").encode()


@dataclass
class ForeignServer(Killable):
    """Listens on `url` while inside `running()`. Counts what runs in it, and puts that on its page."""

    health: int = 200
    status: int = 200
    """Of generations."""
    tokens: int = 8
    gap_s: float = 0.001
    values: dict[str, float | None] = field(default_factory=dict)
    """Overrides of the page."""
    text: bytes | None = None
    """The page itself, instead of one made from `values`."""
    page_status: int = 200
    hold_page: asyncio.Event | None = None
    hold_token: dict[int, asyncio.Event] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    pages: int = 0
    in_flight: int = 0
    aborted: int = 0
    gaps: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/props", self._props)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        return app

    async def listen(self, runner: web.AppRunner) -> None:
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]

    async def kill(self) -> None:
        await super().kill()
        self.in_flight = self.gaps = 0

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.pages += 1
        if self.hold_page is not None:
            await self.hold_page.wait()
        counted: dict[str, float | None] = {
            "num_requests_running": self.in_flight,
            "inter_token_latency_seconds_sum": self.gaps * 0.01,
            "inter_token_latency_seconds_count": self.gaps,
            "generation_tokens_total": self.gaps,
        }
        text = vllm_page(**(counted | self.values)) if self.text is None else self.text
        return web.Response(body=text, status=self.page_status)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 512}]})

    async def _props(self, _: web.Request) -> web.Response:
        return web.json_response({"total_slots": 3, "default_generation_settings": {"n_ctx": 512}})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": len(body.get("prompt", "")), "tokens": list(body.get("content", ""))})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "full", "code": self.status}}, status=self.status)
        text = str(body.get("prompt") or body.get("messages"))
        usage = {"prompt_tokens": len(text) // 5, "completion_tokens": self.tokens}
        if not body.get("stream"):
            try:
                for event in self.hold_token.values():
                    await event.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
            choice = {"index": 0, "text": "tok", "message": {"content": "tok"}}
            return web.json_response({"choices": [choice], "usage": usage})
        self.in_flight += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            for index in range(min(self.tokens, body.get("max_tokens", self.tokens))):
                if (hold := self.hold_token.get(index)) is not None:
                    await hold.wait()
                await asyncio.sleep(self.gap_s)  # what a step takes
                self.gaps += index > 0
                choice = {"index": 0, "text": "tok", "delta": {"content": "tok"}}
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1
        return response
