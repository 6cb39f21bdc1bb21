"""Who acts: a Lease that one process holds at a time, taken before anything is watched.

Owns the decision when it may be taken, is renewed and counts as lost. Times are read from this process's own clock
only: a Lease has run out when it was seen unchanged for its whole duration, so clocks of two machines need not agree.
Reading and writing the object come in (`kube.Kube`). Start reading at `Election.turn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from sluice_operator.errors import ApiRefused, LeaseLost

log = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a Lease lasts, and how often it is looked at.

    A holder that dies without a word is followed within `duration_s` + 2 × `retry_s` = 16 s. One that could not renew
    for `deadline_s` acts no more, well before another may take it, also while an answer is still waited for.
    """

    duration_s: float = 12.0
    deadline_s: float = 8.0
    retry_s: float = 2.0


class Leases(Protocol):
    """What an election needs of the API server; `kube.Kube` is it."""

    async def read_lease(self, namespace: str, name: str) -> Json | None:
        """The Lease, or None."""
        ...

    async def write_lease(self, lease: Json) -> Json:
        """Create it, or replace the version that it names."""
        ...


class Election:
    """One candidate for one Lease."""

    def __init__(  # everything it needs from outside
        self,
        leases: Leases,
        place: tuple[str, str],
        identity: str,
        *,
        clock: Callable[[], float],
        now: Callable[[], str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        timing: Timing | None = None,
    ) -> None:
        self._leases, self._place, self._identity = leases, place, identity
        self._clock, self._now, self._sleep = clock, now, sleep
        self._timing = timing or Timing()
        self._seen: Json = {}
        self._seen_at = float("-inf")
        self._renewed_at = float("-inf")
        self.beat: Callable[[], None] = lambda: None
        """Called whenever the API server answered."""

    def is_held(self) -> bool:
        """Whether this process may act now. False in time even where the loop that renews was kept from running."""
        return self._clock() - self._renewed_at < self._timing.deadline_s

    async def acquire(self) -> None:
        """Wait until the Lease is ours, through whatever outage."""
        while not await self._try():
            await self._sleep(self._timing.retry_s)
        log.info("leading", extra={"lease": "/".join(self._place), "identity": self._identity})

    async def keep(self) -> None:
        """Renew it for ever.

        Raises:
            LeaseLost: another process holds it, or it could not be renewed for `deadline_s`.
        """
        while True:
            await self._sleep(self._timing.retry_s)
            await self._try()
            holder = self._seen.get("spec", {}).get("holderIdentity")
            if holder != self._identity:
                self._renewed_at = float("-inf")
                raise LeaseLost(f"the lease {'/'.join(self._place)} is held by {holder or 'nobody'} now")
            if self._clock() - self._renewed_at >= self._timing.deadline_s:
                self._renewed_at = float("-inf")
                raise LeaseLost(f"the lease {'/'.join(self._place)} could not be renewed in time")

    async def release(self) -> None:
        """Let another process have it at once, if it is ours and the API server listens."""
        if not self.is_held():
            return
        self._renewed_at = float("-inf")
        given_up = {**self._seen, "spec": {**self._seen["spec"], "holderIdentity": ""}}
        with contextlib.suppress(ApiRefused, aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(self._timing.retry_s):
                await self._leases.write_lease(given_up)

    async def _try(self) -> bool:
        # An answer that takes longer than this is none: the deadline would pass with it.
        try:
            async with asyncio.timeout(self._timing.deadline_s / 2):
                return await self.turn()
        except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("lease", extra={"error": str(error) or type(error).__name__})
            return False

    async def turn(self) -> bool:
        """Take or renew the Lease if that may be done now; whether it is ours then.

        Raises:
            ApiRefused: somebody wrote at the same time, or it may not be written.
        """
        found = await self._leases.read_lease(*self._place)
        self.beat()
        if found is None:
            return await self._write({"metadata": dict(zip(("namespace", "name"), self._place, strict=True))})
        if found["metadata"]["resourceVersion"] != self._seen.get("metadata", {}).get("resourceVersion"):
            self._seen, self._seen_at = found, self._clock()
        spec = found.get("spec", {})
        holder = spec.get("holderIdentity")
        lasts_s = float(spec.get("leaseDurationSeconds") or self._timing.duration_s)
        if holder and holder != self._identity and self._clock() - self._seen_at < lasts_s:
            return False
        return await self._write(found)

    async def _write(self, found: Json) -> bool:
        before = found.get("spec", {})
        now = self._now()
        is_ours = before.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._timing.duration_s),
            "acquireTime": before.get("acquireTime", now) if is_ours else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions", 0)) + (not is_ours),
        }
        # What holds from the moment before the request went out holds for whoever counts from its arrival.
        sent_at = self._clock()
        written = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **found, "spec": spec}
        self._seen = await self._leases.write_lease(written)
        self._seen_at = self._clock()
        self._renewed_at = sent_at
        return True
