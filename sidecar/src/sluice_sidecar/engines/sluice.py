"""The link to Sluice's own engine: polls `/state` over the Unix socket and tells the admission what it means.

Owns the connection to the engine and the judgement of its life: loading, ready, dead, hung. Must not decide about
requests. Liveness fails on positive evidence only; a long silence of an engine that was ready is such evidence
(docs/decisions/0006).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from yarl import URL

from sluice_engine import codec
from sluice_engine.core.state import EngineState, is_readable
from sluice_engine.errors import InvalidConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.errors import EngineUnreachable, Reason

log = logging.getLogger(__name__)

# A socket that refuses for this long, after it had been up, is a dead process and not a restart in progress.
DEAD_AFTER_US = 10_000_000
# No answer at all for this long is not load: the engine's server has its own thread, which no step holds up.
SILENT_AFTER_US = 10_000_000
# So long that no swapping disk and no debugger's glance ends a process that would have come back.
WEDGED_AFTER_US = 60_000_000
_POLL_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 2.0
_METRICS_TIMEOUT_S = 1.0
# One scrape a second at most reaches the engine; after a failure it is left alone for a while.
_METRICS_KEPT_US = 1_000_000
_METRICS_BACKOFF_US = 5_000_000
_READ_BUFFER_BYTES: Final = 256 * 1024
# The connection's host is a name without meaning: the socket is the address.
_ORIGIN = "http://engine"


class SluiceEngine:
    """The engine as the gate sees it."""

    def __init__(self, socket_path: str, admission: Admission, clock: Callable[[], int], interval_us: int) -> None:
        self._admission = admission
        self._clock = clock
        self._interval_us = interval_us
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=socket_path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BUFFER_BYTES,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        self.state: EngineState | None = None
        self.draining = False
        self.loop_lag_us = 0
        """How late the last poll began: the gate's own event loop, measured."""
        self._seq: tuple[str, int] | None = None
        self._seq_us = 0
        self._refused_since_us: int | None = None
        self._silent_since_us: int | None = None
        """When the first of the polls began that have had no answer since."""
        self._metrics = (0, b"")
        self._metrics_not_before_us = 0
        self._metrics_lock = asyncio.Lock()
        self._poke = asyncio.Event()

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def run(self) -> None:
        """Poll until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self.poll()
            due = loop.time() + self._interval_us / 1e6
            try:
                async with asyncio.timeout_at(due):
                    await self._poke.wait()
            except TimeoutError:
                self.loop_lag_us = max(0, int((loop.time() - due) * 1e6))
            self._poke.clear()

    def poke(self) -> None:
        """Something happened to a connection: look now."""
        self._poke.set()

    async def poll(self) -> None:
        """Read the state once and act on it."""
        asked_us = self._clock()
        try:
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                document = await self.get_json("/state")
            state = codec.decode(EngineState, document, "state", ignore_unknown=True)
        except EngineUnreachable as error:
            self._unanswered(asked_us)
            if error.refused and self._refused_since_us is None:
                self._refused_since_us = self._clock()
                if self.state is not None:
                    log.warning("engine refuses connections")
        except TimeoutError:
            self._unanswered(asked_us)  # slow, not dead: the state in use grows old
        except InvalidConfig as error:
            self._silent_since_us = None
            log.error("engine state unreadable", extra={"problem": str(error)})  # noqa: TRY400  # our own one line
        else:
            self._silent_since_us = None
            self._take(state, asked_us)
        self._admission.set_unavailable(self.unavailable(), self._clock())

    def unavailable(self) -> Reason | None:
        """Why no capacity exists; None when the engine can serve."""
        if self.draining:
            return Reason.DRAINING
        if self.state is None:
            return Reason.ENGINE_LOADING
        if self._refused_since_us is not None or self.state.hung or self.state.phase == "failed":
            return Reason.ENGINE_DEAD
        if self.state.phase != "ready" or self._admission.room.limits is None:
            return Reason.ENGINE_LOADING
        return Reason.ENGINE_DEAD if self._silent_us() > SILENT_AFTER_US else None

    def start_problem(self) -> str | None:
        """What the start still waits for; None once the engine is ready. For the engine's startup probe."""
        if self.state is None or self._refused_since_us is not None:
            return "the engine has not opened its socket yet"
        if self.state.phase == "failed":
            return f"failed: {self.state.failure}"
        if self.state.phase == "loading":
            loading = self.state.loading
            if loading is None:
                return "loading"
            percent = "" if loading.percent is None else f" {loading.percent} %"
            return f"loading: {loading.stage}{percent}"
        return None

    def life_problem(self) -> str | None:
        """Positive evidence that the engine must be restarted; None without any. For its liveness probe."""
        if self.state is None:
            return None
        if self.state.phase == "failed":
            return f"failed: {self.state.failure}"
        if self.state.hung:
            return f"a step has run for {self.state.step_running_us // 1_000_000} s"
        since = self._refused_since_us
        if since is not None and self._clock() - since > DEAD_AFTER_US:
            return f"its socket has refused connections for {(self._clock() - since) // 1_000_000} s"
        # One that loads may be busy in a library that lets no other thread run.
        if self.state.phase == "ready" and self._silent_us() > WEDGED_AFTER_US:
            return f"it has answered nothing for {self._silent_us() // 1_000_000} s"
        return None

    @asynccontextmanager
    async def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One exchange with the engine; on leaving, an unfinished one closes its connection, which aborts it there.

        Raises:
            EngineUnreachable: no connection, or it broke before the status line.
        """
        try:
            response = await self._session.request(
                method,
                # Encoded already: what a name has of "..", even as %2e%2e, is not to be resolved into another route.
                URL(_ORIGIN + path, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(str(error), refused=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnreachable(str(error), refused=False) from error
        try:
            yield response
        finally:
            if response.content.at_eof() and response.content.exception() is None:
                response.release()
            else:
                response.close()

    async def get_json(self, path: str) -> Any:  # noqa: ANN401  # JSON has no narrower type
        """A JSON document of the engine's.

        Raises:
            EngineUnreachable: no answer, or one that is not JSON.
        """
        try:
            async with self.request("GET", path) as response:
                return await response.json()
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise EngineUnreachable(str(error), refused=False) from error

    async def count_tokens(self, body: bytes) -> int | None:
        """The exact length of a prompt; None when the engine cannot tell, and will say why itself."""
        try:
            async with (
                asyncio.timeout(_CONNECT_TIMEOUT_S),
                self.request("POST", "/tokenize", headers={"Content-Type": "application/json"}, body=body) as response,
            ):
                if response.status != 200:
                    return None
                count = (await response.json()).get("count")
        except (EngineUnreachable, TimeoutError, aiohttp.ClientError, ConnectionError, ValueError, AttributeError):
            return None
        return count if isinstance(count, int) else None

    async def metrics_page(self) -> bytes:
        """The engine's metrics, without those of its process; at most one scrape a second, old ones when it is slow."""
        async with self._metrics_lock:
            now_us = self._clock()
            if now_us - self._metrics[0] < _METRICS_KEPT_US or now_us < self._metrics_not_before_us:
                return self._metrics[1]
            try:
                async with asyncio.timeout(_METRICS_TIMEOUT_S), self.request("GET", "/metrics") as response:
                    page = await response.read() if response.status == 200 else b""
                self._metrics = (now_us, without_process_metrics(page))
            except EngineUnreachable as error:
                if error.refused:
                    self._metrics = (now_us, b"")  # a dead engine has no numbers
            except (TimeoutError, aiohttp.ClientError, ConnectionError):
                self._metrics_not_before_us = now_us + _METRICS_BACKOFF_US
            return self._metrics[1]

    def _unanswered(self, asked_us: int) -> None:
        if self._silent_since_us is None:
            self._silent_since_us = asked_us

    def _silent_us(self) -> int:
        """How long polls have gone unanswered; 0 while the last one was answered."""
        return 0 if self._silent_since_us is None else self._clock() - self._silent_since_us

    def _take(self, state: EngineState, asked_us: int) -> None:
        if not is_readable(state.schema_version):
            log.error("engine state of another version", extra={"schema_version": state.schema_version})
            return
        if self._refused_since_us is not None and self.state is not None:
            log.info("engine answers again", extra={"boot_id": state.boot_id, "phase": state.phase})
        self._refused_since_us = None
        self.state = state
        if (state.boot_id, state.seq) != self._seq:
            self._seq, self._seq_us = (state.boot_id, state.seq), asked_us
        # A document that stands still, with work in it and no step in flight, is as old as its last change.
        frozen = state.step_running_us == 0 and bool(state.running_requests or state.waiting_requests)
        if state.phase == "ready":
            self._admission.observe(state, self._seq_us if frozen else asked_us, self._clock())


def without_process_metrics(page: bytes) -> bytes:
    """A Prometheus page without the `process_*` and `python_*` families: the gate's own would collide."""
    kept = []
    for line in page.splitlines(keepends=True):
        name = line.split(maxsplit=3)[2] if line.startswith((b"# HELP ", b"# TYPE ")) and line.count(b" ") > 2 else line
        if not name.startswith((b"process_", b"python_")):
            kept.append(line)
    return b"".join(kept)
