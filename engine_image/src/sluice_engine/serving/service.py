"""The thread that owns the engine's loop, and the way in and out of it for everybody else.

In: commands in a deque. Out: one call into the event loop per step, however many tokens it made. The event loop never
waits for a step, and a step never waits for a reader: what a slow reader leaves is bounded by its own `max_tokens`.
It knows requests and emissions; text and HTTP are the server's. Start reading at `EngineService.start` and `_run`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVarTuple

from sluice_engine.core.emissions import Emissions
from sluice_engine.core.loop import RunnerFailed
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.state import LoadingProgress, Phase
from sluice_engine.errors import (
    EngineNotReady,
    EngineOverloaded,
    InvalidConfig,
    InvalidRequest,
    ModelUnavailable,
    RequestError,
)
from sluice_engine.live_config import LiveConfig
from sluice_engine.serving.call_stream import CallStream
from sluice_engine.serving.counters import Counters
from sluice_engine.serving.publication import LoadedEngine, Publication, publication_of

log = logging.getLogger(__name__)

# The gate refuses long before; this bounds what a caller without a gate can pile up.
MAX_WAITING_CHOICES = 4096
# A gate polls every 200 ms; four copies for each poll are fresh enough, and cost little beside steps of 20 ms.
PUBLISH_EVERY_US = 50_000
# However many requests wait, copying them takes at most a twentieth of the thread's time.
PUBLISH_COST_FACTOR = 20

ENGINE_THREAD = "engine"

Load = Callable[[Callable[[LoadingProgress], None]], LoadedEngine]
Command = Callable[[LoadedEngine], Emissions]
Arguments = TypeVarTuple("Arguments")


class _StartCancelledError(BaseException):
    """Nobody waits for the model any more. No fault: whoever handles those on the way lets it pass."""


class EngineService:
    """One engine's thread. Its methods belong to the event loop, those that say so to the thread."""

    def __init__(self, load: Load, clock: Callable[[], int]) -> None:
        self.clock = clock
        """Monotonic µs."""
        self.phase: Phase = "loading"
        self.failure: tuple[str, str] | None = None
        """Code and sentence, once the phase is failed."""
        self.progress = LoadingProgress(stage="weights")
        self.engine: LoadedEngine | None = None
        self.publication: Publication | None = None
        self._load = load
        self._counters = Counters()
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._streams: dict[str, CallStream] = {}
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._seq = 0
        self._next_publication_us = 0
        self._retiring: dict[str, Callable[[], None]] = {}
        """The thread's own: adapters to be freed, and who is told."""

    def start(self) -> None:
        """Start the thread: it loads the model, then serves until `close`, or until the engine fails."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def ready(self) -> None:
        """Return once the engine is ready, or has failed."""
        await self._ready.wait()

    async def ended(self) -> None:
        """Return once the thread is done."""
        await self._ended.wait()

    def loaded(self) -> LoadedEngine:
        """The engine that takes requests.

        Raises:
            EngineNotReady: there is none now, and why.
        """
        if self.phase == "ready" and self.engine is not None:
            return self.engine
        if self.phase == "failed":
            raise EngineNotReady(f"the engine has failed: {self.failure[1] if self.failure else 'unknown'}")
        raise EngineNotReady(
            "the engine is shutting down" if self.phase == "draining" else "the model is still being loaded"
        )

    def submit(self, requests: Sequence[Request]) -> CallStream:
        """Queue the requests of one call. Use the stream in a `with`: leaving it frees what they hold.

        Raises:
            EngineNotReady: the engine takes no requests.
            EngineOverloaded: too many wait already.
            InvalidRequest: a request of the same id has not ended.
        """
        engine = self.loaded()
        held = self.held_choices()
        if held + len(requests) > MAX_WAITING_CHOICES + engine.loop.scheduler.limits.max_sequences:
            raise EngineOverloaded(f"{held} requests are in the engine; it holds no more")
        for request in requests:
            if request.id in self._streams:
                raise InvalidRequest(f"a request with the id {request.id} is running", code="duplicate_request_id")
        stream = CallStream([request.id for request in requests], self.abort)
        self._streams.update({request.id: stream for request in requests})
        self._command(lambda engine: self._add(engine, requests))
        return stream

    def abort(self, request_id: str, outcome: Outcome) -> None:
        """End a request; nothing when it has ended already. Its blocks are free after the step in flight."""
        self._streams.pop(request_id, None)
        self._command(lambda engine: engine.loop.abort(request_id, outcome))

    def retire_adapter(self, key: str, freed: Callable[[], None]) -> None:
        """Free an adapter once no request runs or waits with it; nobody submits one any more. Then call `freed`."""
        self._command(lambda _engine: self._retire(key, freed))

    def configure(self, live: LiveConfig) -> None:
        """Have another `live.json` obeyed after the step in flight; after its start, by an engine that is loading."""
        self._command(lambda engine: self._configure(engine, live))

    def held_choices(self) -> int:
        """Requests whose callers are still being served."""
        return len(self._streams)

    def step_running_us(self) -> int:
        """How long the step in flight has run; 0 between steps."""
        started = self.engine.loop.step_started_us if self.engine is not None else 0
        return max(0, self.clock() - started) if started else 0

    def hung(self) -> bool:
        """Whether the step in flight has outlived every excuse."""
        return self.engine is not None and self.engine.loop.hung(self.clock())

    def close(self) -> None:
        """Take no more, end what runs with an error, and let the thread finish after the step in flight."""
        if self.phase != "failed":
            self.phase = "draining"
        self._closing = True
        self._fail_streams(EngineNotReady("the engine is shutting down"))
        self._wake.set()

    def lose(self, code: str, message: str) -> None:
        """Fail, though the thread may never return from its step; any thread may say so."""
        if not self._closing:
            self._tell(self._failed, code, message)
            self._tell(self._ended.set)

    def thread_alive(self) -> bool:
        """Whether the thread still runs: after `close`, a step in flight may take its time."""
        return self._thread.is_alive()

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _deliver(self, emissions: Emissions) -> None:
        for emission in emissions:
            request_id = emission.request.id
            ends = emission.outcome is not None
            stream = self._streams.pop(request_id, None) if ends else self._streams.get(request_id)
            if stream is not None:
                stream.deliver(emission)

    def _refused(self, requests: Sequence[Request], problem: str) -> None:
        for request in requests:
            stream = self._streams.pop(request.id, None)
            if stream is not None:
                stream.fail(InvalidRequest(problem, code="context_length_exceeded"))

    def _fail_streams(self, error: RequestError) -> None:
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(error)

    def _became_ready(self, engine: LoadedEngine) -> None:
        self.engine = engine
        self.progress = LoadingProgress(stage="done")
        if self.phase == "loading":
            self.phase = "ready"
        self._ready.set()

    def _failed(self, code: str, message: str) -> None:
        self.phase = "failed"
        self.failure = self.failure or (code, message)  # the first is the cause
        self._fail_streams(EngineNotReady(f"the engine has failed: {message}"))
        self._ready.set()

    def _run(self) -> None:
        """The thread's whole life."""
        try:
            engine = self._load(self._progressed)
        except _StartCancelledError:
            log.info("start cancelled", extra={"stage": self.progress.stage})
        except ModelUnavailable as error:
            self._tell(self._failed, error.code, str(error))
        except InvalidConfig as error:
            self._tell(self._failed, "InvalidConfig", str(error))
        except MemoryError:
            self._tell(self._failed, "OutOfMemory", "the model does not fit this machine's memory")
        except Exception as error:
            log.exception("start failed")
            self._tell(self._failed, "EngineFailed", f"start failed: {type(error).__name__}: {_line(error)}")
        else:
            self._publish(engine)
            self._tell(self._became_ready, engine)
            self._serve(engine)
        finally:
            self._tell(self._ended.set)

    def _progressed(self, progress: LoadingProgress) -> None:
        self.progress = progress  # one reference: readers see the old one or the new one
        if self._closing:
            raise _StartCancelledError

    def _serve(self, engine: LoadedEngine) -> None:
        try:
            while not self._closing:
                self._turn(engine)
        except RunnerFailed as error:
            self._hand_over(error.emissions)
            log.exception("engine failed")
            self._tell(self._failed, "EngineFailed", _line(error))
        except Exception as error:
            log.exception("engine failed")
            self._tell(self._failed, "EngineFailed", f"{type(error).__name__}: {_line(error)}")
        finally:
            for request_id in list(engine.loop.scheduler.requests):
                engine.loop.abort(request_id)
            self._publish(engine)
            engine.close()

    def _turn(self, engine: LoadedEngine) -> None:
        """Take the commands, then run a step, or wait when there is nothing to run."""
        self._wake.clear()  # before the commands are taken: one that comes after this wakes the wait below
        while self._commands:
            self._hand_over(self._commands.popleft()(engine))
        if self._retiring:
            self._free_retired(engine)
        if not engine.loop.has_work:
            self._publish(engine)
            self._wake.wait()
            return
        runner_us_before = engine.loop.runner_us_total
        emissions = engine.loop.step()
        ended = self.clock()
        if engine.loop.runner_us_total != runner_us_before:
            self._counters.step_ran(engine.loop.last_real_us)
        self._hand_over(emissions)
        while engine.loop.scheduler.faults:
            log.error("impossible state contained", extra={"fault": engine.loop.scheduler.faults.popleft()})
        if self.clock() >= self._next_publication_us:
            self._publish(engine)
        self._counters.delivery_us += self.clock() - ended

    def _add(self, engine: LoadedEngine, requests: Sequence[Request]) -> Emissions:
        for index, request in enumerate(requests):
            problem = engine.loop.add(request)
            if problem is not None:
                for queued in requests[:index]:
                    engine.loop.abort(queued.id)
                self._tell(self._refused, requests, problem)
                break
        return Emissions()

    def _retire(self, key: str, freed: Callable[[], None]) -> Emissions:
        self._retiring[key] = freed
        return Emissions()

    def _free_retired(self, engine: LoadedEngine) -> None:
        in_use = {request.adapter for request in engine.loop.scheduler.requests.values()}
        for key in self._retiring.keys() - in_use:
            if engine.adapters is not None:
                engine.adapters.drop(key)
            self._tell(self._retiring.pop(key))

    def _configure(self, engine: LoadedEngine, live: LiveConfig) -> Emissions:
        engine.tuning.configure(live)
        derived = engine.tuning.current.derived
        if not derived.feasible:
            log.warning("promise infeasible", extra={"reason": derived.reason})
        return Emissions()

    def _hand_over(self, emissions: Emissions) -> None:
        if len(emissions):
            self._counters.emitted(emissions, self.clock())
            self._tell(self._deliver, emissions)

    def _publish(self, engine: LoadedEngine) -> None:
        started = self.clock()
        self._seq += 1
        self.publication = publication_of(engine.loop, self._counters, self._seq)
        ended = self.clock()
        self._next_publication_us = ended + max(PUBLISH_EVERY_US, PUBLISH_COST_FACTOR * (ended - started))

    def _tell(self, function: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Call a function of the event loop's side."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop has ended; nobody is left to be told
            log.info("event loop has ended")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
