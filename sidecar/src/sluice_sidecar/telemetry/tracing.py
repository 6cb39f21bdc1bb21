"""Spans: one for each request at the gate, and within it one for its time in the engine, which is told of it.

Owns the tracer, where an endpoint is configured; otherwise nothing of OpenTelemetry is even imported, and the W3C
headers of a client pass through. Must not decide anything. What happened when is read from the decision afterwards, so
that no token pays for it. The usual variables of OpenTelemetry (`OTEL_TRACES_SAMPLER`, `OTEL_RESOURCE_ATTRIBUTES`,
`OTEL_EXPORTER_OTLP_HEADERS`, …) are obeyed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from sluice_engine.errors import InvalidConfig
from sluice_sidecar.telemetry.decisions import Decision
from sluice_sidecar.web.headers import Headers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

# What is not sent by then is lost: a pod that ends does not wait for a collector.
_LAST_SPANS_S = 3.0
_TRACES = "/v1/traces"
CONTEXT_HEADERS = ("traceparent", "tracestate")


class RequestSpan(Protocol):
    """The span of one request."""

    def engine_headers(self) -> dict[str, str]:
        """It goes to the engine now: the context that the engine is told, in place of the client's."""
        ...

    def ended(self, decision: Decision, status: int | None, now_us: int) -> None:
        """It ended, and this is what became of it."""
        ...


class NoSpan:
    """Where no spans are made."""

    def engine_headers(self) -> dict[str, str]:
        """Nothing: the client's own headers pass."""
        return {}

    def ended(self, decision: Decision, status: int | None, now_us: int) -> None:
        """Nobody asks."""


class Tracing(Protocol):
    """Makes the spans."""

    def asked(self, received: Headers, path: str, request_id: str) -> RequestSpan:
        """A request has come."""
        ...

    async def close(self) -> None:
        """Send what is left."""
        ...


class NoTracing:
    """No endpoint is configured."""

    def asked(self, received: Headers, path: str, request_id: str) -> RequestSpan:  # noqa: ARG002  # as the other
        """The span that does nothing."""
        return _NO_SPAN

    async def close(self) -> None:
        """Nothing is left."""


_NO_SPAN = NoSpan()


def require_library(endpoint: str) -> None:
    """Check that spans can be made where an endpoint for them is set.

    Raises:
        InvalidConfig: the gate was installed without what they need.
    """
    if endpoint and find_spec("opentelemetry") is None:
        raise InvalidConfig("otlp_endpoint", "needs the gate's extra: pip install 'sluice-sidecar[tracing]'")


def tracing(endpoint: str, served_name: str) -> Tracing:
    """Spans to this endpoint (OTLP over HTTP); none when it is empty."""
    if not endpoint:
        return NoTracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # seldom
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    resource = Resource.create({"service.name": "sluice-gate", "sluice.served_name": served_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
    return OpenTelemetryTracing(provider)


def traces_url(endpoint: str) -> str:
    """Where spans are posted: the endpoint as it is, or its usual path where it names a host only."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES


class OpenTelemetryTracing:
    """Spans through the OpenTelemetry SDK, whose own thread sends them; when it falls behind, it drops."""

    def __init__(self, provider: TracerProvider, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("sluice_sidecar")
        self._wall_ns = wall_ns

    def asked(self, received: Headers, path: str, request_id: str) -> RequestSpan:
        """The span of a request, below the client's where its headers name one."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415  # likewise
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        carrier = {name: ",".join(values) for name in CONTEXT_HEADERS if (values := received.getall(name, ()))}
        span = self._tracer.start_span(
            f"POST {path}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": path, "sluice.request_id": request_id},
        )
        return _OpenSpan(self._tracer, span, self._wall_ns)

    async def close(self) -> None:
        """Send what is left, for a moment."""
        # A thread of its own: one of the loop's would be waited for, however long the collector takes.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _LAST_SPANS_S)


class _OpenSpan:
    def __init__(self, tracer: Tracer, span: Span, wall_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._wall_ns = wall_ns
        self._engine_span: Span | None = None

    def engine_headers(self) -> dict[str, str]:
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415  # likewise
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._engine_span = self._tracer.start_span("engine", set_span_in_context(self._span), SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._engine_span))
        return carrier

    def ended(self, decision: Decision, status: int | None, now_us: int) -> None:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415  # likewise

        span, wall_ns = self._span, self._wall_ns()
        for name, at_us in (("decided", decision.decided_us), ("first token", decision.first_token_us)):
            if at_us is not None:
                span.add_event(name, timestamp=wall_ns - (now_us - at_us) * 1_000)
        attributes = {
            "http.response.status_code": status,
            "sluice.outcome": decision.outcome,
            "sluice.reason": decision.reason or None,
            "sluice.held_by": decision.held_by or None,
            "sluice.promise": decision.promise or None,
            "sluice.attempt": decision.attempt,
            "gen_ai.usage.input_tokens": decision.prompt_tokens or None,
            "gen_ai.usage.output_tokens": decision.output_tokens,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if decision.outcome in {"failed", "drained"} or (status or 0) >= 500:
            span.set_status(StatusCode.ERROR, decision.reason or decision.outcome)
        if self._engine_span is not None:
            self._engine_span.end(wall_ns)
        span.end(wall_ns)
