"""The link to another engine: its health and its metrics page stand for the state that it does not tell.

Owns the poll and the order of a start: healthy, facts, first page, calibration. What differs
between engines is in their dialects. Must not decide about requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from sluice_engine.core.state import LoadingProgress
from sluice_engine.core.terms import Terms
from sluice_engine.live_config import SLOConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.life import EngineLife, Patience
from sluice_sidecar.engines.assumed import assume_prefilled
from sluice_sidecar.engines.bodies import with_priority, without_priority
from sluice_sidecar.engines.calibrate import calibrate
from sluice_sidecar.engines.connection import CONNECT_TIMEOUT_S, OK, EngineConnection
from sluice_sidecar.engines.dialect import Dialect
from sluice_sidecar.engines.exposition import without_process_metrics
from sluice_sidecar.engines.learned import LearnedSteps
from sluice_sidecar.engines.link import EngineLink
from sluice_sidecar.engines.page import Page, UnreadablePage
from sluice_sidecar.engines.reading import Facts, Reading
from sluice_sidecar.engines.scrape import Scrape
from sluice_sidecar.engines.told import Started, Told
from sluice_sidecar.errors import EngineUnreachable, Reason

log = logging.getLogger(__name__)

# Their servers share a thread with tokenizing and detokenizing, and answered after 30 to 40 s under load
# (vllm#38157): silence says less of them than of our own.
SILENT_AFTER_US = 45_000_000
WEDGED_AFTER_US = 180_000_000
HEALTH_TIMEOUT_S = 1.0
FACTS_TIMEOUT_S = 5.0
# A few requests of a few tokens; the first ones may compile kernels.
MEASURE_TIMEOUT_S = 300.0
MEASURE_AGAIN_US = 5_000_000
# A request that was passed on this long ago and has given a token is among those that a page counts.
_COUNTED_AFTER_US = 2_000_000
# Measured beside others its times are too long; for ever so long nobody waits to know them better.
IDLE_WITHIN_US = 30_000_000
_BUSY = frozenset((429, 503))


class ForeignEngine(EngineLink):
    """vLLM, SGLang or llama.cpp as the gate sees it."""

    keeps_steps = False

    def __init__(
        self,
        dialect: Dialect,
        connection: EngineConnection,
        admission: Admission,
        clock: Callable[[], int],
        *,
        slo: SLOConfig,
        started: Started,
        interval_us: int,
        has_priorities: bool = False,
    ) -> None:
        """`has_priorities`: it was started with its priority scheduling; else it refuses the field."""
        self._dialect = dialect
        self._traits = dialect.traits
        patience = Patience(
            silent_after_us=SILENT_AFTER_US,
            wedged_after_us=WEDGED_AFTER_US,
            frozen_after_us=self._traits.frozen_after_us,
        )
        super().__init__(connection, admission, clock, interval_us, EngineLife(patience))
        admission.room.ledger.lists_requests = False
        self._slo = slo
        self._has_priorities = has_priorities
        self._told = Told(self._traits.name, started, self._traits.default_chunk_tokens)
        self._facts: Facts | None = None
        self._steps: LearnedSteps | None = None
        self._health_due_us = 0
        self._scrape = Scrape(connection, clock)
        self._busy_since_us: int | None = None
        self._measure_due_us = 0
        self._problem = ""
        """What was last logged of its pages, so that it is logged once."""

    async def close(self) -> None:
        """Close every connection."""
        await self._scrape.close()
        await super().close()

    def poke(self) -> None:
        """Something happened to a connection: look now, at its health too."""
        self._health_due_us = 0
        super().poke()

    def configure(self, slo: SLOConfig) -> None:
        """Another promise: what may run at once follows from it."""
        self._slo = slo
        if self._steps is not None:
            self._steps.configure(slo.inter_token_latency_us)

    async def poll(self) -> None:
        """Look at it once and act on it."""
        asked_us = self._clock()
        try:
            if await self._is_healthy(asked_us):
                await self._look(asked_us)
        except EngineUnreachable as error:
            self._unreachable(error, asked_us)
        except TimeoutError:
            self.life.unanswered(asked_us)
        self._admission.set_unavailable(self.unavailable(), self._clock())

    # What the gate asks.

    def meaning_of(self, status: int) -> Reason | None:
        """A queue that is full is 503 for some and 429 for others: to us it is load, and an estimate that was wrong."""
        return Reason.ENGINE_OVERLOADED if status in _BUSY else None

    def body_for_engine(self, content: bytes, terms: Terms) -> bytes:
        """The body with the priority of its class in the engine's own sign; without any where it has no such thing."""
        if self._has_priorities and self._traits.priority_sign:
            return with_priority(content, terms, self._traits.priority_sign)
        return without_priority(content)

    async def count_tokens(self, body: bytes) -> int | None:
        """The exact length of a prompt; None when the engine cannot tell."""

        async def post_json(path: str, question: dict[str, Any]) -> Any:  # noqa: ANN401  # likewise
            return await self._connection.post_json(path, json.dumps(question).encode(), within_s=CONNECT_TIMEOUT_S)

        return await self._dialect.count_tokens(json.loads(body), post_json)

    async def metrics_page(self) -> bytes:
        """The page that was last read, without what is its process's: nobody else scrapes the engine."""
        return b"" if self.life.refuses else without_process_metrics(self._scrape.page)

    # How a poll goes.

    async def _is_healthy(self, asked_us: int) -> bool:
        if asked_us < self._health_due_us:
            return True
        async with asyncio.timeout(HEALTH_TIMEOUT_S), self._connection.request("GET", "/health") as answer:
            status = answer.status
        if status == OK:
            self.life.unreadable()
            ready = self.state is not None and self.state.phase == "ready"
            self._health_due_us = asked_us + (self._traits.health_every_us if ready else 0)
            return True
        was_ready = self._facts is not None
        if self._traits.unhealthy == "failed" and was_ready:
            self.life.answered(self._told.failed(f"its /health says {status}"), asked_us)
        elif self._traits.unhealthy == "silent" and was_ready:
            self.life.unanswered(asked_us)
        else:
            self.life.answered(self._told.loading(f"its /health says {status}"), asked_us)
        return False

    async def _look(self, asked_us: int) -> None:
        if self._facts is None:
            async with asyncio.timeout(FACTS_TIMEOUT_S):
                self._facts = await self._dialect.facts(self._connection.get_json)
        page_us = await self._scrape.next(asked_us)
        if page_us is None:
            if self._scrape.problem:
                self._complain(self._scrape.problem)
            return
        reading = self._read(self._scrape.page)
        if reading is None:
            return
        if reading.asleep:
            self.life.answered(self._told.loading("it sleeps"), page_us)
            return
        if self._steps is None:
            if not self._is_idle(reading, page_us):
                return
            if page_us >= self._measure_due_us:
                await self._measure(self._facts, reading)
            return
        self._steps.observe(reading, page_us)
        self._take(self._facts, reading, self._steps, page_us)

    def _is_idle(self, reading: Reading, page_us: int) -> bool:
        """Whether it can be measured: what an earlier gate let in leaves when that gate's connections have broken."""
        if not reading.running and not reading.waiting:
            return True
        if self._busy_since_us is None:
            self._busy_since_us = page_us
        self.life.answered(self._told.loading("what is in it has to end first"), page_us)
        return page_us - self._busy_since_us > IDLE_WITHIN_US

    def _read(self, text: bytes) -> Reading | None:
        """The page, or None where it cannot be relied on: the state in use grows old, as if none had come."""
        try:
            page = Page(text, self._traits.families)
        except UnreadablePage as error:
            self._complain(f"its metrics cannot be read: {error}")
            return None
        reading = self._dialect.read(page)
        lacking = [
            family
            for name, family in self._traits.required.items()
            if getattr(reading, name) is None and not (name == "kv_tokens" and self._told.kv_tokens_are_set)
        ]
        if lacking:
            problem = f"its metrics lack {', '.join(lacking)}"
            if page.no_numbers:
                problem += f"; no number: {', '.join(sorted(page.no_numbers))}"
            self._complain(problem)
            return None
        if not reading.running and not reading.waiting and self._inside_for(_COUNTED_AFTER_US):
            self._complain("its metrics count no request, and some are in it")
            return None
        self._complain("")
        return reading

    def _complain(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("engine's metrics are of no use", extra={"engine": self._traits.name, "problem": problem})
        elif self._problem and not problem:
            log.info("engine's metrics are read again", extra={"engine": self._traits.name})
        self._problem = problem
        if problem:
            self.life.unreadable()
            if self.state is None or self.state.phase == "loading":
                self.life.answered(self._told.loading(problem), self._clock())

    async def _measure(self, facts: Facts, reading: Reading) -> None:
        """Once; where it gives no text, again after a while, and the startup probe says why."""
        progress = LoadingProgress(stage="step_table", steps_total=1)
        self.life.answered(self._told.loading("", progress), self._clock())
        context_tokens = reading.context_tokens or facts.context_tokens or self._told.kv_tokens(facts, reading) or 1024
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                times = await calibrate(self._connection, facts.model, self._clock, context_tokens)
        except (EngineUnreachable, TimeoutError) as error:
            if isinstance(error, EngineUnreachable) and error.refused:
                raise
            self._measure_due_us = self._clock() + MEASURE_AGAIN_US
            self._complain(str(error) or f"it gave no few tokens in {MEASURE_TIMEOUT_S:.0f} s")
            return
        log.info(
            "engine measured",
            extra={
                "engine": self._traits.name,
                "prefill_ns_per_token": times.per_token_ns,
                "gap_us": times.gap_us,
                "short_us": times.short_us,
            },
        )
        self._steps = LearnedSteps(times, self._slo.inter_token_latency_us, self._told.max_sequences(facts))
        self.poke()

    def _take(self, facts: Facts, reading: Reading, steps: LearnedSteps, page_us: int) -> None:
        entries = self._admission.room.ledger.entries.values()
        limits = self._admission.room.limits
        if limits is not None and not reading.waiting:
            assume_prefilled(entries, limits, page_us)
        inside = [choice.known_tokens for entry in entries for choice in entry.choices if not choice.gone]
        state = self._told.state(facts, reading, steps, inside=inside)
        if state is None:
            self.life.answered(self._told.loading("nobody tells the size of its KV cache"), page_us)
            return
        before = self.state
        if before is not None and before.phase == "ready" and before.boot_id != state.boot_id:
            log.warning("engine was started anew", extra={"engine": self._traits.name, "boot_id": state.boot_id})
            self._facts = None
        as_of_us = self.life.answered(state, page_us)
        if as_of_us is not None:
            self._admission.observe(state, as_of_us, self._clock())

    def _unreachable(self, error: EngineUnreachable, asked_us: int) -> None:
        if not error.refused:
            self.life.unanswered(asked_us)
        elif self.life.refused(asked_us, self._clock()):
            log.warning("engine refuses connections")
            # Another process will listen there next.
            self._facts = None

    def _inside_for(self, long_us: int) -> bool:
        """Whether some request has been in the engine for long, and gave a token there."""
        before_us = self._clock() - max(long_us, self._traits.frozen_after_us)
        return any(
            entry.forwarded_us is not None and entry.forwarded_us < before_us
            for entry in self._admission.room.ledger.entries.values()
            if any(choice.output_tokens and not choice.gone for choice in entry.choices)
        )
