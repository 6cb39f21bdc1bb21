"""The terms on which a call is served: its class, its tenant, and how long its caller will wait. As headers, both ways.

The one place that knows how they are written: the gate reads them from clients and writes them to the engine, which
reads them from the gate. Bounds are relative, and run from the moment at which the body is whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

CLASSES = ("critical", "interactive", "standard", "batch", "background")
"""Most urgent first; the base priority of a class is its index × 2."""
STANDARD = "standard"
BATCH = "batch"
FLEX = "flex"
"""OpenAI's service tier for a caller who can wait."""

CLASS_HEADER = "x-sluice-class"
TENANT_HEADER = "x-sluice-tenant"
TTFT_HEADER = "x-sluice-ttft-ms"
TIMEOUT_HEADER = "x-sluice-timeout-ms"
EXPECTED_OUTPUT_HEADER = "x-sluice-expected-output-tokens"
"""From the gate to the engine only."""
_TENANT_HEADERS = (TENANT_HEADER, "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""The first that is there counts; the others are llm-d's, today's and the older one."""
IDENTITY_HEADERS = (CLASS_HEADER, *_TENANT_HEADERS)
"""What is believed of trusted peers only."""

# A day: longer than any answer, short enough that no sum of microseconds is absurd.
MAX_BOUND_MS = 86_400_000

_TENANT = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_WHOLE = re.compile(r"[0-9]{1,8}")


class Headers(Protocol):
    """Headers by name, whatever its case, each as often as it was sent."""

    def getall(self, key: str, default: Sequence[str]) -> Sequence[str]:
        """All values of a header."""
        ...


class InvalidTerms(ValueError):
    """A header breaks a rule; the text is the rest of a sentence that begins with its name."""

    def __init__(self, header: str, problem: str) -> None:
        super().__init__(f"{header}: {problem}")
        self.header = header
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a caller is, and what it asks for beside the answer."""

    service_class: str = STANDARD
    tenant: str = ""
    first_token_us: int | None = None
    """Its first token is of no use later than this after its body was whole."""
    finish_us: int | None = None
    """Its last token is of no use later than this after its body was whole."""
    promise_us: int | None = None
    """It asks for a first token within this; later ones are of use all the same. For the gate alone."""
    door_us: int | None = None
    """It does not wait at the door longer than this. For the gate alone."""
    silence_us: int | None = None
    """Its reader gives up when nothing comes for this long. For the gate alone."""
    behind: bool = False
    """Whether its caller puts it behind its own others, as the body's `priority` says; no header."""
    expected_output_tokens: int | None = None
    """What the gate expects of each answer, where it has learned that; never what a client says."""

    def priority(self, *, behind: bool = False) -> int:
        """The base priority; `behind` puts it one level after its caller's others, and never into the next class."""
        return CLASSES.index(self.service_class) * 2 + (behind or self.behind)

    def flexible(self) -> Terms:
        """For a caller who can wait, as the tier FLEX says: class batch, where it would be more urgent."""
        urgent = CLASSES.index(self.service_class) < CLASSES.index(BATCH)
        return replace(self, service_class=BATCH) if urgent else self

    @property
    def bound_us(self) -> int | None:
        """The first moment at which waiting any longer is of no use; None without a bound."""
        bounds = [bound for bound in (self.first_token_us, self.finish_us) if bound is not None]
        return min(bounds) if bounds else None

    def headers(self, waited_us: int = 0) -> dict[str, str]:
        """How they are passed on, less the time that went by. What is left of a bound is rounded down to a whole ms."""
        headers = {CLASS_HEADER: self.service_class}
        if self.tenant:
            headers[TENANT_HEADER] = self.tenant
        for name, bound_us in ((TTFT_HEADER, self.first_token_us), (TIMEOUT_HEADER, self.finish_us)):
            if bound_us is not None:
                headers[name] = str(max(0, bound_us - waited_us) // 1000)
        if self.expected_output_tokens is not None:
            headers[EXPECTED_OUTPUT_HEADER] = str(self.expected_output_tokens)
        return headers


def is_tenant(name: str) -> bool:
    """Whether a tenant can be called so."""
    return _TENANT.fullmatch(name) is not None


def parse(headers: Headers, *, trusted: bool, by_gate: bool = False) -> Terms:
    """The terms that headers ask for; class and tenant only of a trusted peer, from others they are not even read.

    `by_gate`: they were written by a gate, which adds what it expects.

    Raises:
        InvalidTerms: a value is not one of those that can be, or a header came twice.
    """
    service_class = _one(headers, CLASS_HEADER) if trusted else None
    if service_class is not None and service_class not in CLASSES:
        raise InvalidTerms(CLASS_HEADER, f"must be one of {', '.join(CLASSES)}, not {_shown(service_class)}")
    return Terms(
        service_class=STANDARD if service_class is None else service_class,
        tenant=_tenant(headers) if trusted else "",
        first_token_us=_bound_us(headers, TTFT_HEADER),
        finish_us=_bound_us(headers, TIMEOUT_HEADER),
        expected_output_tokens=_tokens(headers, EXPECTED_OUTPUT_HEADER) if by_gate else None,
    )


def _tenant(headers: Headers) -> str:
    for name in _TENANT_HEADERS:
        tenant = _one(headers, name)
        if tenant is None:
            continue
        if not is_tenant(tenant):
            raise InvalidTerms(name, f"must be 1 to 128 letters, digits or . _ : @ / + = -, not {_shown(tenant)}")
        return tenant
    return ""


def _bound_us(headers: Headers, name: str) -> int | None:
    value = _one(headers, name)
    if value is None:
        return None
    if _WHOLE.fullmatch(value) is None or not 0 <= int(value) <= MAX_BOUND_MS:
        raise InvalidTerms(
            name, f"must be a whole number of milliseconds from 0 to {MAX_BOUND_MS}, not {_shown(value)}"
        )
    return int(value) * 1000


def _tokens(headers: Headers, name: str) -> int | None:
    value = _one(headers, name)
    if value is None:
        return None
    if _WHOLE.fullmatch(value) is None or int(value) < 1:
        raise InvalidTerms(name, f"must be a whole number of tokens, 1 or more, not {_shown(value)}")
    return int(value)


def _one(headers: Headers, name: str) -> str | None:
    values = headers.getall(name, ())
    if len(values) > 1:
        raise InvalidTerms(name, f"came {len(values)} times; send it once")
    return values[0].strip() if values else None


def _shown(value: str) -> str:
    return f"{value[:40]!r}"
