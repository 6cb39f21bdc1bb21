"""Pages that the engine has to read: its model, its API, its state, its steps and its metrics.

Must not know requests. Who may read which is the gate's.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from sluice_engine.codec import encode
from sluice_engine.errors import EngineNotReady, InvalidRequest
from sluice_engine.live_file import LiveFile
from sluice_engine.protocol.openapi import document
from sluice_engine.serving.adapters import Adapters
from sluice_engine.serving.live_state import Identity, engine_state, step_table
from sluice_engine.serving.responses import json_response
from sluice_engine.serving.service import EngineService
from sluice_engine.serving.steps_page import steps_page
from sluice_engine.text.grammars import Grammars

MAX_STEPS_SHOWN = 4096


class Pages:
    """All of them."""

    def __init__(
        self,
        service: EngineService,
        identity: Identity,
        registry: CollectorRegistry,
        live_file: LiveFile,
        grammars: Grammars,
        adapters: Adapters,
        *,
        created_s: int,
    ) -> None:
        """`created_s`: what the model's page says of when it began, in Unix time."""
        self._service = service
        self._identity = identity
        self._registry = registry
        self._live_file = live_file
        self._grammars = grammars
        self._adapters = adapters
        self._created_s = created_s

    def routes(self) -> list[web.RouteDef]:
        """Where they are."""
        return [
            web.get("/v1/models", self.models),
            web.get("/openapi.json", self.openapi),
            web.get("/v1/models/{name:.+}", self.model),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/state", self.state),
            web.get("/steps", self.steps),
            web.get("/step-table", self.step_table),
        ]

    async def models(self, _http: web.Request) -> web.StreamResponse:
        """`/v1/models`: the model, then its adapters."""
        names = [self._identity.served_name, *self._adapters.names()]
        return json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, http: web.Request) -> web.StreamResponse:
        """`/v1/models/NAME`: the model or one of its adapters, by its name."""
        name = http.match_info["name"]
        self._adapters.key_of(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        engine = self._service.loaded()
        base = self._identity.served_name
        # As vLLM has them: what an adapter stands on is its parent.
        of_adapter = {} if name == base else {"root": self._adapters.path(name), "parent": base}
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "sluice",
            "max_model_len": engine.max_length_tokens,
            **of_adapter,
        }

    async def openapi(self, _http: web.Request) -> web.StreamResponse:
        """`/openapi.json`: the API as a document."""
        return json_response(document(self._identity.served_name, version("sluice-engine")))

    async def health(self, _http: web.Request) -> web.StreamResponse:
        """`/health`: 200 when requests are taken."""
        self._service.loaded()
        if self._service.hung():
            raise EngineNotReady("a step has been running far beyond its predicted time")
        return json_response({"status": "ready"})

    async def metrics(self, _http: web.Request) -> web.StreamResponse:
        """`/metrics`: in the plain text format, so that the gate can put its own page before it."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def state(self, _http: web.Request) -> web.StreamResponse:
        """`/state`: `EngineState`, also while a step or the start runs."""
        grammars = self._grammars.state()
        adapters = self._adapters.state()
        state = engine_state(self._service, self._identity, self._live_file.problem, grammars, adapters)
        return json_response(encode(state))

    async def step_table(self, _: web.Request) -> web.StreamResponse:
        """`/step-table`: what steps cost here, as learned by now."""
        table = step_table(self._service)
        if table is None:
            raise EngineNotReady("the engine has measured no step times yet")
        return json_response(table)

    async def steps(self, http: web.Request) -> web.StreamResponse:
        """`/steps?last=N`: the last step records, and who ended meanwhile."""
        text = http.query.get("last", "100")
        if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= MAX_STEPS_SHOWN):
            raise InvalidRequest.field("last", f"must be 1 to {MAX_STEPS_SHOWN}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(http)
        for piece in steps_page(self._service, int(text)):
            await response.write(piece)
            await asyncio.sleep(0)  # the streams' turn
        await response.write_eof()
        return response
