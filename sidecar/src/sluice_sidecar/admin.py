"""The gate's other door on 9090, for the cluster and for people: metrics, state, steps, and the engine's probes.

Owns the shape of the gate's `/state`. It is not on the Service. Must not take part in any request's way.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from sluice_engine import codec
from sluice_sidecar import adapters
from sluice_sidecar.errors import EngineUnreachable, Reason, Refusal, shown
from sluice_sidecar.server import Gate
from sluice_sidecar.telemetry.headroom import demanded, headroom
from sluice_sidecar.telemetry.state import SCHEMA_VERSION, Admission, GateState
from sluice_sidecar.web.listener import answer, plain

_ENGINE_TIMEOUT_S = 5.0
# Both rings, and as many that are inside.
MAX_DECISIONS_SHOWN = 4096


class Admin:
    """Everything behind port 9090."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._adapters = adapters.AdapterRoutes(gate.engine)
        self._gate_config_hash = codec.digest(gate.config)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        pages = {
            "/livez": self._livez,
            "/metrics": self._metrics,
            "/state": self._state,
            "/steps": self._of_engine,
            "/step-table": self._of_engine,
            "/decisions": self._decisions,
            "/engine/startupz": self._startupz,
            "/engine/livez": self._engine_livez,
        }
        if request.path in adapters.PATHS and self._gate.engine.keeps_steps:
            return await self._adapters.handle(request)
        page = pages.get(request.path)
        if page is None:
            return answer(
                Refusal(Reason.NOT_FOUND, f"There is no {shown(request.path)}; this port has {', '.join(pages)}.")
            )
        if request.method not in {"GET", "HEAD"}:
            message = f"The route {shown(request.path)} takes GET, HEAD, not {request.method}."
            return answer(Refusal(Reason.METHOD_NOT_ALLOWED, message), {"Allow": "GET, HEAD"})
        return await page(request)

    def state(self) -> GateState:
        """The gate's own state, with the engine's within."""
        gate, now_us = self._gate, self._gate.clock()
        admission, room, engine = gate.admission, gate.admission.room, gate.engine.state
        closed_by = admission.closed_by(now_us)
        pool = None if engine is None else engine.pool
        used_percent = 0.0 if pool is None else 100 * (pool.total_blocks - pool.free_blocks) / max(1, pool.total_blocks)
        return GateState(
            schema_version=SCHEMA_VERSION,
            ready=gate.not_ready() is None,
            draining=gate.drain.started,
            freshness=room.freshness(now_us),
            promise=gate.live.slo,
            live_config_hash=codec.digest(gate.live),
            live_config_refused=gate.files.live.problem,
            gate_config_hash=self._gate_config_hash,
            measured=gate.recorder.measured(
                preemptions_per_minute=room.ceiling.per_minute(now_us),
                kv_usage_percent=round(used_percent, 1),
                now_us=now_us,
            ),
            admission=Admission(
                open=closed_by is None,
                reason="" if closed_by is None else closed_by.value,
                kv_ceiling_percent=round(100 * room.ceiling.share, 1),
                predicted_peak_blocks=room.peak_blocks(now_us),
                ledger_requests=len(room.ledger.entries),
                ledger_blocks=room.ledger_blocks(),
                waiting_at_door=admission.waiting,
                admitted_total=admission.admitted_total,
                refused_total=dict(sorted(admission.refused_total.items())),
                mode=admission.mode,
                verdicts=admission.decisions.regret.verdicts,
                retry_share=round(admission.returning.budget.share(), 4),
            ),
            demand=demanded(admission, now_us),
            headroom=headroom(admission, now_us),
            engine=engine,
            api_keys=None if gate.callers.keys is None else len(gate.callers.keys),
            api_keys_refused="" if gate.files.keys is None else gate.files.keys.problem,
        )

    async def _livez(self, _: web.BaseRequest) -> web.StreamResponse:
        return plain(None)

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        page = self._gate.metrics.page() + await self._gate.engine.metrics_page()
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _state(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=codec.to_json(self.state()), content_type="application/json")

    async def _of_engine(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self._gate.engine.keeps_steps:
            engine = self._gate.config.engine
            return answer(
                Refusal(Reason.NOT_FOUND, f"There is no {shown(request.path)} here: {engine} keeps no such record.")
            )
        try:
            async with (
                asyncio.timeout(_ENGINE_TIMEOUT_S),
                self._gate.engine.request("GET", request.rel_url.raw_path_qs) as upstream,
            ):
                return web.Response(
                    status=upstream.status, body=await upstream.read(), content_type=upstream.content_type
                )
        except (EngineUnreachable, aiohttp.ClientError, ConnectionError, TimeoutError):
            return answer(Refusal(Reason.ENGINE_DEAD, "The engine does not answer."))

    async def _decisions(self, request: web.BaseRequest) -> web.StreamResponse:
        text = request.query.get("last", "100")
        if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= MAX_DECISIONS_SHOWN):
            message = f"Invalid 'last': must be 1 to {MAX_DECISIONS_SHOWN}."
            return answer(Refusal(Reason.BAD_REQUEST, message, param="last"))
        decisions = self._gate.admission.decisions.last(int(text))
        document = {"now_us": self._gate.clock(), "decisions": decisions}
        # In a thread: thousands of them take longer than a token may wait for its way through the gate.
        page = await asyncio.to_thread(codec.to_json, document)
        return web.Response(text=page, content_type="application/json")

    async def _startupz(self, _: web.BaseRequest) -> web.StreamResponse:
        return plain(self._gate.engine.start_problem())

    async def _engine_livez(self, _: web.BaseRequest) -> web.StreamResponse:
        return plain(self._gate.engine.life_problem())
