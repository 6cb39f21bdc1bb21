"""What a request goes through between its headers and its verdict: who asks, what it costs, and the wait at the door.

Owns the line for exact counts. Must not know what becomes of it afterwards. Start reading at `enter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from sluice_engine.core import terms
from sluice_engine.core.terms import Terms
from sluice_engine.errors import sentence
from sluice_sidecar import bounds
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.call import Call
from sluice_sidecar.callers.identity import Callers
from sluice_sidecar.callers.trust import TrustedPeers
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.errors import Reason, Refusal, Refused
from sluice_sidecar.estimates import estimate, fitting
from sluice_sidecar.estimates.counting import ExactCounts
from sluice_sidecar.estimates.estimate import Asked
from sluice_sidecar.retries import attempts
from sluice_sidecar.retries.attempts import Attempt
from sluice_sidecar.telemetry.metrics import GateMetrics

# Hashed in less than a millisecond.
_LONG_BODY_BYTES = 1024 * 1024


class Reception:
    """Takes a request in."""

    def __init__(
        self,
        engine: EngineLink,
        admission: Admission,
        callers: Callers,
        trusted: TrustedPeers,
        metrics: GateMetrics,
        clock: Callable[[], int],
    ) -> None:
        self._admission = admission
        self._callers = callers
        self._trusted = trusted
        self._metrics = metrics
        self._clock = clock
        self._counts = ExactCounts(engine.count_tokens, self._counts_busy)

    def terms(self, request: web.BaseRequest) -> Terms:
        """Who the caller is, and what it asks for beside the answer.

        Raises:
            Refused: a header breaks a rule, or the key is nobody's.
        """
        trusted = self._trusted.includes(request.remote)
        if not trusted:
            for name in terms.IDENTITY_HEADERS:
                if name in request.headers:
                    self._metrics.stripped_headers.labels(name).inc()
        try:
            asked = terms.parse(request.headers, trusted=trusted)
        except terms.InvalidTerms as error:
            message = sentence(f"Invalid {error.header!r}: {error.problem}")
            raise Refused(Refusal(Reason.BAD_REQUEST, message, param=error.header)) from error
        identified = self._callers.identify(request.headers, asked)
        if isinstance(identified, Refusal):
            raise Refused(identified)
        bounded = bounds.added(identified, request.headers)
        self._count_unreadable(bounded.unreadable)
        return bounded.terms

    async def _attempt(self, call: Call) -> Attempt:
        told = attempts.told(call.request.headers)
        self._count_unreadable(told.unreadable)
        tenant, content = call.terms.tenant, call.body.content
        if len(content) < _LONG_BODY_BYTES:
            return Attempt(told.number, attempts.body_key(tenant, content))
        # Hashing lets go of the interpreter: meanwhile tokens pass.
        return Attempt(told.number, await asyncio.to_thread(attempts.body_key, tenant, content))

    def _count_unreadable(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._metrics.unreadable_headers.labels(name).inc()

    async def price(self, call: Call) -> Cost | Refusal:
        """The cost of a call, its prompt counted by the engine where an estimate is not enough."""
        asked = await _parsed(call)
        self._heard(call, asked)
        if (refusal := self._admission.refuse_unavailable()) is not None:
            return refusal
        limits, pricing = self._admission.room.limits, self._admission.room.pricing
        assert limits is not None, "an available engine has told its limits"
        if (refusal := fitting.refuse(asked, limits)) is not None:
            return refusal
        tokens = None
        if fitting.worth_counting(asked, limits, pricing.ratio):
            tokens = await self._counts.count(estimate.tokenize_body(call.body.content, asked))
            self._metrics.tokenize.inc()
            if tokens is not None and (refusal := fitting.refuse_counted(asked, limits, tokens)) is not None:
                return refusal
        cost = pricing.price(asked, limits, call.terms.tenant, tokens)
        call.terms = replace(call.terms, expected_output_tokens=cost.expected_output_tokens, behind=asked.behind)
        return cost

    def _heard(self, call: Call, asked: Asked) -> None:
        """What the body says of the caller, and of how the answer goes out."""
        terms = self._callers.named_by(asked.user, call.terms)
        if asked.flexible:
            terms = terms.flexible()
        call.streamed = asked.streamed
        call.terms = bounds.for_answer(terms, streamed=asked.streamed)

    async def enter(self, call: Call, cost: Cost) -> Permit | Refusal:
        """A permit or a refusal, after a short wait in line where that may help."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[Permit | Refusal] = loop.create_future()

        def settle(verdict: Permit | Refusal) -> None:
            if not settled.done():
                settled.set_result(verdict)

        call.attempt = await self._attempt(call)
        now_us = self._clock()
        verdict = self._admission.enter(
            call.request_id,
            cost,
            now_us,
            settle,
            waited_us=now_us - call.arrived_us,
            terms=call.terms,
            attempt=call.attempt,
        )
        if not isinstance(verdict, Ticket):
            return verdict
        ticket = verdict
        timer = loop.call_later(
            max(0, ticket.deadline_us - self._clock()) / 1e6, lambda: self._admission.expire(ticket, self._clock())
        )
        try:
            return await settled
        except asyncio.CancelledError:
            self._admission.leave(ticket, self._clock())
            raise
        finally:
            timer.cancel()
            self._metrics.door_wait.observe((self._clock() - call.arrived_us) / 1e6)

    def _counts_busy(self) -> Refusal:
        problem = "many prompts near the context length wait to be counted"
        return self._admission.refuse_busy(Reason.ENGINE_OVERLOADED, problem, self._clock())


async def _parsed(call: Call) -> Asked:
    """What its body asks for; in a body of very many parts tokens of others pass between two strides."""
    steps = estimate.parsing(call.body.content, call.route)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            asked: Asked = end.value
            return asked
        await asyncio.sleep(0)
