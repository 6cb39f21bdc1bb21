"""Every answer of the gate's own that is not a success: one table of reasons, so that no race can change a status.

Owns the mapping reason → HTTP status. Must not know HTTP libraries. An expected refusal is a value (`Refusal`);
exceptions exist only where a value cannot be returned.

    GateError
    ├── Refused             a `Refusal` raised from deep inside reading a request
    └── EngineUnreachable   the engine's socket refused, closed or timed out
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Characters of a path that an answer repeats.
_MOST_SHOWN = 100

UNKNOWN_CALLER_STATUS = 401
BUSY_STATUS = 429
UNAVAILABLE_STATUS = 503


class Reason(StrEnum):
    """Stable codes: `error.code`, the header `x-sluice-reason` and the metric label `reason`."""

    DRAINING = "draining"
    ENGINE_LOADING = "engine_loading"
    ENGINE_DEAD = "engine_dead"
    INVALID_API_KEY = "invalid_api_key"
    BODY_TOO_LARGE = "body_too_large"
    BODIES_HELD = "bodies_held"
    INVALID_JSON = "invalid_json"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_PEAK = "kv_peak"
    TTFT_PROMISE = "ttft_promise"
    SLOTS = "slots"
    TENANT_QUOTA = "tenant_quota"
    CLASS_CEILING = "class_ceiling"
    TENANT_SHARE = "tenant_share"
    SIZE_GUARD = "size_guard"
    ENGINE_OVERLOADED = "engine_overloaded"
    ENGINE_FAILED = "engine_failed"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    DEADLINE_MISSED = "deadline_missed"
    RETRY_BUDGET = "retry_budget"
    BAD_REQUEST = "bad_request"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Answer:
    """How a reason is answered."""

    status: int
    type: str
    should_retry: bool


_INVALID = "invalid_request_error"
_ANSWERS = {
    Reason.DRAINING: Answer(503, "server_error", True),
    Reason.ENGINE_LOADING: Answer(503, "server_error", True),
    Reason.ENGINE_DEAD: Answer(503, "server_error", True),
    Reason.INVALID_API_KEY: Answer(401, _INVALID, False),
    Reason.BODY_TOO_LARGE: Answer(413, _INVALID, False),
    Reason.BODIES_HELD: Answer(429, "rate_limit_error", True),
    Reason.INVALID_JSON: Answer(400, _INVALID, False),
    Reason.CONTEXT_LENGTH_EXCEEDED: Answer(400, _INVALID, False),
    Reason.KV_PEAK: Answer(429, "rate_limit_error", True),
    Reason.TTFT_PROMISE: Answer(429, "rate_limit_error", True),
    Reason.SLOTS: Answer(429, "rate_limit_error", True),
    Reason.TENANT_QUOTA: Answer(429, "rate_limit_error", True),
    Reason.CLASS_CEILING: Answer(429, "rate_limit_error", True),
    Reason.TENANT_SHARE: Answer(429, "rate_limit_error", True),
    Reason.SIZE_GUARD: Answer(429, "rate_limit_error", True),
    Reason.ENGINE_OVERLOADED: Answer(429, "rate_limit_error", True),
    Reason.ENGINE_FAILED: Answer(502, "server_error", True),
    Reason.DEADLINE_UNREACHABLE: Answer(429, "rate_limit_error", False),
    Reason.RETRY_BUDGET: Answer(429, "rate_limit_error", False),
    Reason.DEADLINE_MISSED: Answer(504, "server_error", False),
    Reason.BAD_REQUEST: Answer(400, _INVALID, False),
    Reason.NOT_FOUND: Answer(404, _INVALID, False),
    Reason.METHOD_NOT_ALLOWED: Answer(405, _INVALID, False),
    Reason.REQUEST_TIMEOUT: Answer(408, _INVALID, True),
    Reason.UNSUPPORTED_ENCODING: Answer(415, _INVALID, False),
    Reason.INTERNAL_ERROR: Answer(500, "server_error", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A tenant's quota as it stands, for the one refusal that is about it."""

    per_second: int
    limit_tokens: int
    """What may be used at once."""
    window_s: int
    """In which that much comes back."""
    remaining_tokens: int
    wait_us: int
    """Until what was asked for may be used."""
    full_us: int
    """Until all of it may be used."""

    def headers(self) -> dict[str, str]:
        """As OpenAI names them, and as the IETF's draft does."""
        return {
            "x-ratelimit-limit-tokens": str(self.limit_tokens),
            "x-ratelimit-remaining-tokens": str(self.remaining_tokens),
            "x-ratelimit-reset-tokens": _spelled(self.full_us),
            "RateLimit-Policy": f'"tokens";q={self.limit_tokens};w={self.window_s}',
            "RateLimit": f'"tokens";r={self.remaining_tokens};t={-(-self.wait_us // 1_000_000)}',
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a caller is told instead of an answer from the model."""

    reason: Reason
    message: str
    retry_after_us: int | None = None
    """When to come back; None where it is pointless or not measured yet."""
    param: str | None = None
    rate_limit: RateLimit | None = None
    """Of a refusal for a tenant's quota."""
    wait_us: int | None = None
    """The measured wait for the room it needs, neither clamped nor spread; for records, not told."""
    is_pointless: bool = False
    """Whether a retry would be refused for certain, whatever else of this reason may come again."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _ANSWERS[self.reason].status

    @property
    def should_retry(self) -> bool:
        """Whether the very same request may succeed later or elsewhere."""
        return _ANSWERS[self.reason].should_retry and not self.is_pointless

    @property
    def closes_connection(self) -> bool:
        """429 and 503 close: a retry on the kept connection would land on the same pod."""
        return self.status in {BUSY_STATUS, UNAVAILABLE_STATUS}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error object, as the engine writes it; which request it was, a header says."""
        answer, code = _ANSWERS[self.reason], self.reason.value
        return {"error": {"message": self.message, "type": answer.type, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        """The headers that go with it, but for the connection's own."""
        headers = {
            "Cache-Control": "no-store",
            "x-sluice-reason": self.reason.value,
            "x-should-retry": "true" if self.should_retry else "false",
        }
        if self.status == UNKNOWN_CALLER_STATUS:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == BUSY_STATUS:
            # Envoy retries a 429 only where it is told to, and never one that says this.
            headers["x-envoy-ratelimited"] = "true"
        if self.retry_after_us is not None:
            headers["Retry-After"] = str(-(-self.retry_after_us // 1_000_000))
            headers["retry-after-ms"] = str(-(-self.retry_after_us // 1_000))
        if self.rate_limit is not None:
            headers |= self.rate_limit.headers()
        return headers


def _spelled(duration_us: int) -> str:
    """A duration as OpenAI writes it: 250ms, 12s, 6m0s."""
    if duration_us < 1_000_000:
        return f"{-(-duration_us // 1000)}ms"
    minutes, seconds = divmod(-(-duration_us // 1_000_000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


class GateError(Exception):
    """Any error this package expects."""


class Refused(GateError):
    """A request was refused while it was being read."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class EngineUnreachable(GateError):
    """The engine gave no answer. `refused` tells a socket nobody listens on from one that is slow."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


def shown(said: str) -> str:
    """What a caller wrote, as an answer repeats it: its beginning is enough to know it again."""
    return said if len(said) <= _MOST_SHOWN else f"{said[:_MOST_SHOWN]}…"
