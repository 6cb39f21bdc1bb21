"""One request at the gate, from its headers to its outcome: what is known of it by now, and how it is cut.

Owned by the server while it is in flight. Must not know how it is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
from aiohttp import web

from sluice_engine.core.terms import Terms
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimates.estimate import Route
from sluice_sidecar.refusals import MISSED
from sluice_sidecar.retries.attempts import FIRST, Attempt
from sluice_sidecar.telemetry.measure import StreamTimes
from sluice_sidecar.telemetry.tracing import RequestSpan
from sluice_sidecar.web import headers
from sluice_sidecar.web.body import Body
from sluice_sidecar.web.listener import SERVER

Outcome = Literal["completed", "refused", "failed", "client_left", "stalled", "drained", "expired"]

PATHS: dict[Route, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(slots=True, eq=False)
class Call:
    """One request, from its headers to its outcome."""

    request: web.BaseRequest
    route: Route
    request_id: str
    body: Body
    signals: Callable[[], dict[str, str]]
    """What every answer says of the pod."""
    span: RequestSpan
    terms: Terms = field(default_factory=Terms)
    arrived_us: int = 0
    outcome: Outcome | None = None
    refusal: Refusal | None = None
    """What it was told instead of an answer from the model."""
    times: StreamTimes | None = None
    """Of one that was let in."""
    streamed: bool = False
    attempt: Attempt = FIRST
    cut: Literal["drained", "expired"] | None = None
    """It ends in an error: the drain's time is over, or its own."""
    upstream: aiohttp.ClientResponse | None = None
    task: asyncio.Task[None] | None = None

    def end_early(self, because: Literal["drained", "expired"] = "drained") -> None:
        """Cut it: a running stream ends in an error event, everything else in a refusal."""
        self.cut = self.cut or because
        if self.upstream is not None:
            self.upstream.close()
        elif self.task is not None:
            self.task.cancel()

    @property
    def status(self) -> int | None:
        """The HTTP status that its client was told; None when it was told none."""
        if self.refusal is not None:
            return self.refusal.status
        return None if self.upstream is None else self.upstream.status

    def cut_refusal(self) -> Refusal:
        """What it is told when it was cut before its answer began."""
        if self.cut == "expired":
            return MISSED
        return Refusal(Reason.DRAINING, "This pod is shutting down; send the request again.")

    def answer_headers(self) -> dict[str, str]:
        """The ids that every answer carries, and what it says of the pod."""
        return headers.own(self.request.headers, self.request_id, SERVER) | self.signals()
