"""Quotas of tenants: tokens per second, as a bucket that fills at that rate.

A request takes what it is expected to use when it asks, and gives back what it did not: all of it when it is refused
for load, since counting refused calls would shut out for ever whoever keeps trying. Must not know classes or rooms.
Source of the headers: draft-ietf-httpapi-ratelimit-headers-10; OpenAI's `x-ratelimit-*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice_engine.live_config import TenantConfig
from sluice_sidecar.errors import RateLimit

# What may be used at once: ten seconds' worth, so that a caller need not be even to use what is its own.
WINDOW_S = 10
_MICRO = 1_000_000


@dataclass(slots=True)
class _Bucket:
    """One tenant's. Levels are millionths of a token, so that a microsecond adds whole numbers."""

    per_second: int
    level: int
    filled_us: int

    @property
    def most(self) -> int:
        return self.per_second * WINDOW_S * _MICRO

    def fill(self, now_us: int) -> None:
        elapsed_us = max(0, now_us - self.filled_us)
        self.level = min(self.most, self.level + elapsed_us * self.per_second)
        self.filled_us = max(self.filled_us, now_us)


class Quotas:
    """The buckets of those tenants that have a quota."""

    def __init__(self, configured: Sequence[TenantConfig]) -> None:
        self._buckets: dict[str, _Bucket] = {}
        self._reserved: dict[str, tuple[str, int]] = {}
        """Tenant and tokens by request id, of those whose use is not known yet."""
        self.configure(configured, 0)

    def configure(self, configured: Sequence[TenantConfig], now_us: int) -> None:
        """Take other quotas; what a tenant used of its old one is used of the new."""
        before, self._buckets = self._buckets, {}
        for tenant in configured:
            if tenant.tokens_per_second is None:
                continue
            most = tenant.tokens_per_second * WINDOW_S * _MICRO
            level = most
            if (bucket := before.get(tenant.name)) is not None:
                bucket.fill(now_us)
                level = most - (bucket.most - bucket.level)
            self._buckets[tenant.name] = _Bucket(tenant.tokens_per_second, level, now_us)

    def take(self, tenant: str, request_id: str, tokens: int, now_us: int) -> RateLimit | None:
        """Reserve; or, with nothing reserved, what the tenant is told.

        A request larger than the whole bucket needs a full one, and leaves a debt: else it could never run.
        """
        bucket = self._buckets.get(tenant)
        if bucket is None:
            return None
        bucket.fill(now_us)
        missing = min(tokens * _MICRO, bucket.most) - bucket.level
        if missing > 0:
            return RateLimit(
                per_second=bucket.per_second,
                limit_tokens=bucket.most // _MICRO,
                window_s=WINDOW_S,
                remaining_tokens=max(0, bucket.level // _MICRO),
                wait_us=-(-missing // bucket.per_second),
                full_us=-(-(bucket.most - bucket.level) // bucket.per_second),
            )
        bucket.level -= tokens * _MICRO
        self._reserved[request_id] = tenant, tokens
        return None

    def settle(self, request_id: str, used_tokens: int) -> None:
        """What was reserved is replaced by what was used; nothing when there was no quota."""
        tenant, tokens = self._reserved.pop(request_id, ("", 0))
        if (bucket := self._buckets.get(tenant)) is not None:
            bucket.level = min(bucket.most, bucket.level + (tokens - used_tokens) * _MICRO)
