"""The gate's door on 8080: routes, and one request's way from its headers to its answer.

Owns the requests in flight. Start reading at `Gate.handle`; what leads to a verdict is `reception`, the decision is
`admission`, what happens after it is `proxy`, the other port is `admin`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from sluice_engine.live_config import LiveConfig
from sluice_sidecar import overdue, tokenizing
from sluice_sidecar.admission import Admission
from sluice_sidecar.call import PATHS, Call
from sluice_sidecar.callers.api_keys import ApiKeys
from sluice_sidecar.callers.identity import Callers
from sluice_sidecar.callers.trust import TrustedPeers
from sluice_sidecar.config import GateConfig
from sluice_sidecar.drain import Drain
from sluice_sidecar.elsewhere import unknown_route
from sluice_sidecar.engines.select import engine_link
from sluice_sidecar.errors import Reason, Refusal, Refused, shown
from sluice_sidecar.estimates.estimate import TOO_DEEP, Route
from sluice_sidecar.hot_files import HotFiles
from sluice_sidecar.models import MODELS, OPENAPI, is_page, models
from sluice_sidecar.proxy import Proxy
from sluice_sidecar.reception import Reception
from sluice_sidecar.telemetry.measure import StreamTimes
from sluice_sidecar.telemetry.metrics import AdmissionCollector, FilesCollector, GateMetrics
from sluice_sidecar.telemetry.promised import PromiseCollector
from sluice_sidecar.telemetry.recorder import Recorder
from sluice_sidecar.telemetry.signals import Signals
from sluice_sidecar.telemetry.tracing import tracing
from sluice_sidecar.tokenizing import Tokenizing
from sluice_sidecar.web.body import Body, HeldBodies
from sluice_sidecar.web.headers import client_id
from sluice_sidecar.web.listener import answer, plain
from sluice_sidecar.web.shedding import Effort, Shedding

_ROUTES: dict[str, Route] = {path: route for route, path in PATHS.items()}
_READ = ("GET", "HEAD")
# What `/readyz` says, under the name by which load generators and gateways ask other engines.
_HEALTH = "/health"

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Gate:
    """Everything behind port 8080."""

    def __init__(
        self,
        config: GateConfig,
        live: LiveConfig,
        *,
        clock: Callable[[], int],
        draw: Callable[[int, int], int],
        files: HotFiles | None = None,
        keys: ApiKeys | None = None,
    ) -> None:
        """`files` are followed by whoever runs this; `keys` are the first in force, None where none is asked for."""
        self.config = config
        self.live = live
        self.clock = clock
        self.admission = Admission(
            live, stale_after_us=config.stale_after_us, blind_after_us=config.blind_after_us, draw=draw
        )
        self.engine = engine_link(config, live.slo, self.admission, clock)
        self.metrics = GateMetrics()
        self.recorder = Recorder(live.slo, self.admission.room, self.admission.decisions, self.metrics)
        self.tracing = tracing(config.otlp_endpoint, config.served_name)
        self.held = HeldBodies(config.held_bodies_bytes)
        self.drain = Drain(config, in_flight=lambda: len(self._calls), refuse=self._refuse_all, cut=self._cut_all)
        self._proxy = Proxy(self.engine, self.admission, self.recorder, config, clock, closing=self._closing)
        self.shedding = Shedding(self.admission, enforced=live.admission.mode == "Enforce")
        self._calls: set[Call] = set()
        self.callers = Callers(keys)
        self.files = files if files is not None else HotFiles(config, b"")
        self._trusted = TrustedPeers(config.trusted_peers)
        self._reception = Reception(self.engine, self.admission, self.callers, self._trusted, self.metrics, clock)
        self._tokenizing = Tokenizing(self.engine, self._tokenizers_busy)
        self.signals = Signals(self.admission, clock)
        self.metrics.registry.register(self.signals)
        self.metrics.registry.register(
            AdmissionCollector(
                self.admission,
                clock,
                in_flight=lambda: len(self._calls),
                held_bytes=lambda: self.held.held_bytes,
                loop_lag_us=lambda: self.engine.loop_lag_us,
                ready=lambda: self.not_ready() is None,
                draining=lambda: self.drain.started,
                shedding=self.shedding,
            )
        )
        self.metrics.registry.register(FilesCollector(self.files))
        self.metrics.registry.register(PromiseCollector(lambda: self.live))

    def configure(self, live: LiveConfig) -> None:
        """Obey another `live.json`. Who is inside stays; who waits is judged by it."""
        self.live = live
        self.shedding.enforced = live.admission.mode == "Enforce"
        self.recorder.configure(live.slo)
        self.engine.configure(live.slo)
        self.admission.configure(live, self.clock())

    def use_keys(self, keys: ApiKeys) -> None:
        """Know callers by other keys; whoever was let in by one that is gone stays to the end of its answer."""
        self.callers.keys = keys

    @property
    def in_flight(self) -> int:
        """Requests between their headers and the end of their answer."""
        return len(self._calls)

    def not_ready(self) -> str | None:
        """Why this pod should get no traffic; None when it should. Load is no reason."""
        if self.drain.started:
            return "draining"
        unavailable = self.engine.unavailable()
        return None if unavailable is None else unavailable.value

    @property
    def storm(self) -> bool:
        """Whether new connections are answered from their first bytes where that is possible."""
        return self.shedding.effort(self.clock()) is Effort.CANNED

    def refuse_unheard(self, peer: str | None) -> Refusal | None:
        """What a peer is told whose request was not read; None when it has to be."""
        return None if self._trusted.includes(peer) else self.shedding.canned(self.clock())

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of any kind; once the drain has begun, each answer ends its connection."""
        response = await self._handle(request)
        if not response.prepared and self._closing(request):
            response.force_close()
        return response

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        serve, methods = self._route_of(request.path)
        if serve is None:
            return answer(unknown_route(request.path, (*_ROUTES, MODELS, *tokenizing.PATHS, OPENAPI, _HEALTH)))
        if request.method not in methods:
            return _not_allowed(request, ", ".join(methods))
        return await serve(request)

    def _route_of(self, path: str) -> tuple[Serve | None, tuple[str, ...]]:
        """What serves a path, and by which methods."""
        route = _ROUTES.get(path)
        if route is not None:
            return lambda request: self._generate(request, route), ("POST",)
        if path in tokenizing.PATHS:
            return lambda request: self._page(request, self._tokenize), ("POST",)
        if is_page(path):
            return lambda request: self._page(request, self._models), _READ
        return (self._probe, _READ) if path in {"/livez", "/readyz", _HEALTH} else (None, ())

    async def _probe(self, request: web.BaseRequest) -> web.StreamResponse:
        return plain(None if request.path == "/livez" else self.not_ready())

    async def _generate(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        request_id = f"req-{secrets.token_hex(12)}"
        span = self.tracing.asked(request.headers, request.path, request_id)
        call = Call(
            request, route, request_id, Body(self.held), self.signals.headers, span, task=asyncio.current_task()
        )
        self._calls.add(call)
        decisions = self.admission.decisions
        decisions.asked(call.request_id, client_id(request.headers), route, self.clock())
        try:
            result = await self._serve(call)
            if isinstance(result, Refusal):
                return self._refuse(call, result)
        except Refused as error:
            return self._refuse(call, error.refusal)
        except RecursionError:
            # It could just be read, and what is done with it goes a few calls deeper.
            return self._refuse(call, TOO_DEEP)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.cut or task is None or request.transport is None:
                raise
            task.uncancel()
            call.outcome = call.cut
            return self._refuse(call, call.cut_refusal())
        else:
            return result
        finally:
            call.body.drop()
            self._calls.discard(call)
            outcome = call.outcome or "client_left"
            if outcome == "client_left" and call.times is not None and call.times.first_us is None:
                # Who gave up before the first token may ask again.
                self.admission.returning.may_return(call.attempt, self.clock())
            if outcome in {"failed", "drained"}:
                self.recorder.failed(self.clock())
            self.metrics.requests.labels(route, outcome).inc()
            decision = decisions.ended(call.request_id, outcome, self.clock(), call.refusal, call.times)
            if decision is not None:
                span.ended(decision, call.status, self.clock())
            self.drain.left()

    def _refuse(self, call: Call, refusal: Refusal) -> web.Response:
        call.outcome, call.refusal = call.outcome or "refused", refusal
        self.admission.count(refusal)
        self.shedding.refused(refusal, self.clock())
        return answer(refusal, call.answer_headers())

    async def _serve(self, call: Call) -> web.StreamResponse | Refusal:
        if (refusal := self._unavailable()) is not None:
            return refusal
        call.terms = self._reception.terms(call.request)
        # Of a trusted peer's callers some may be of a class that is still let in.
        if (
            not self._trusted.includes(call.request.remote)
            and (refusal := self.shedding.early(self.clock())) is not None
        ):
            return refusal
        await self._read(call.body, call.request, self.config.body_limit_bytes)
        call.arrived_us = self.clock()
        cost = await self._reception.price(call)
        if isinstance(cost, Refusal):
            return cost
        verdict = await self._reception.enter(call, cost)
        if isinstance(verdict, Refusal):
            return verdict
        times = call.times = StreamTimes(call.arrived_us, cost.longest_prompt_tokens)
        with verdict.held(self.clock), overdue.watched(call, times, self.clock):
            return await self._proxy.forward(call, verdict, times)

    async def _page(self, request: web.BaseRequest, serve: Serve) -> web.StreamResponse:
        """What the engine answers by itself, for whoever may ask it."""
        if (refusal := self._unavailable()) is not None:
            return answer(refusal)
        try:
            self._reception.terms(request)
            return await serve(request)
        except Refused as error:
            self.admission.count(error.refusal)
            return answer(error.refusal)

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        return await models(self.engine, request.path)

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        limit_bytes = min(self.config.body_limit_bytes, tokenizing.MOST_BYTES)
        return await self._tokenizing.handle(
            request, Body(self.held), lambda body: self._read(body, request, limit_bytes)
        )

    async def _read(self, body: Body, request: web.BaseRequest, limit_bytes: int) -> None:
        await body.read(request, limit_bytes, self._bodies_held)
        self.metrics.request_bytes.inc(body.num_bytes)

    def _closing(self, request: web.BaseRequest) -> bool:
        """Whether the connection ends with its answer: in a drain, and where a client means to speak otherwise next."""
        return self.drain.started or "Upgrade" in request.headers

    def _unavailable(self) -> Refusal | None:
        return self.admission.refuse_unavailable()

    def _bodies_held(self) -> Refusal:
        held_mib = self.held.held_bytes // (1024 * 1024)
        return self.admission.refuse_busy(
            Reason.BODIES_HELD, f"the gate holds {held_mib} MiB of request bodies", self.clock()
        )

    def _tokenizers_busy(self) -> Refusal:
        problem = "as many texts as may be are being tokenized"
        return self.admission.refuse_busy(Reason.ENGINE_OVERLOADED, problem, self.clock())

    def _refuse_all(self) -> None:
        self.engine.life.draining = True
        self.admission.set_unavailable(Reason.DRAINING, self.clock())

    def _cut_all(self) -> None:
        for call in list(self._calls):
            call.end_early()


def _not_allowed(request: web.BaseRequest, allowed: str) -> web.Response:
    refusal = Refusal(
        Reason.METHOD_NOT_ALLOWED, f"The route {shown(request.path)} takes {allowed}, not {request.method}."
    )
    return answer(refusal, {"Allow": allowed})
