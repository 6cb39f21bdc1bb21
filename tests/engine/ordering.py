"""Waiting requests for tests of the order, and what they cost: the planning constants, 8,192 prefill tokens a step."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_engine.core.order.service import Service
from sluice_engine.core.request import Request, SamplingParams


def step_us(decodes: int, prefill_tokens: int) -> int:
    """20 ms, 0.035 ms per prefill token, 10 ms for the decode share."""
    return 20_000 + 35 * prefill_tokens + (10_000 if decodes else 0)


SERVICE = Service(step_us, 8192)


def waiter(
    request_id: str,
    *,
    arrival_s: float = 0,
    arrival_us: int | None = None,
    prompt: int = 10,
    output: int = 10,
    expected: int | None = None,
    priority: int = 4,
    tenant: str = "",
    first_s: float | None = None,
    finish_s: float | None = None,
) -> Request:
    return Request(
        request_id,
        [0] * prompt,
        prompt,
        SamplingParams(max_tokens=output),
        round(arrival_s * 1e6) if arrival_us is None else arrival_us,
        priority=priority,
        tenant=tenant,
        first_token_deadline_us=None if first_s is None else round(first_s * 1e6),
        finish_deadline_us=None if finish_s is None else round(finish_s * 1e6),
        expected_output_tokens=expected,
    )


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.id for request in requests]
