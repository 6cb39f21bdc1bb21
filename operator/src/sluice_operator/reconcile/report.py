"""What is told of a service: its status, its series and its events, from what is observed and what its pods say.

Owns when a status is worth a write. What it says is decided in `status/`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import aiohttp

from sluice_operator.cluster.asked import Cluster, Gates
from sluice_operator.cluster.kinds import observable
from sluice_operator.errors import ApiRefused
from sluice_operator.metrics import Metrics
from sluice_operator.observed import pods
from sluice_operator.plan import Observed
from sluice_operator.reconcile.service import Service, named, place
from sluice_operator.status import status
from sluice_operator.status.changes import is_available, is_settled, tell, transitions
from sluice_operator.status.figures import worth_writing

log = logging.getLogger(__name__)

# What a status is told from.
_TOLD = ("Deployment", "ScaledObject", "ReplicaSet", "Pod")
# A pod that hangs is asked after so often: with the time between two looks, its cause is known within 10 s.
_EVENTS_EVERY_S = 4.0


class Report:
    """Tells of services, each when it changed."""

    def __init__(
        self, cluster: Cluster, gates: Gates, metrics: Metrics, *, clock: Callable[[], float], now: Callable[[], str]
    ) -> None:
        self._cluster, self._gates, self._metrics = cluster, gates, metrics
        self._clock, self._now = clock, now

    async def tell(self, service: Service, kinds: frozenset[str], observed: Observed | None = None) -> None:
        """Write the status if it is worth it; of what is `observed`, by default of what is there now.

        Args:
            service: whose.
            kinds: the optional kinds whose definition the cluster has.
            observed: as a look just left it.
        """
        if service.spec is None and service.problem is None:
            return  # not looked at yet
        if observed is None:
            # Between two looks nothing of it is held: a thousand services would be most of the memory.
            observed = await self._cluster.observe(*place(service.body), observable(_TOLD, kinds))
        views = pods.views(observed)
        addresses = {pod.name: pod.ip for pod in views if status.is_pollable(pod)}
        states = await self._gates.states(addresses) if addresses else {}
        self._metrics.gate_polls.labels("ok").inc(len(states))
        self._metrics.gate_polls.labels("unanswered").inc(len(addresses) - len(states))
        await self._read_events(service, views)
        situation = status.Situation(
            generation=service.body["metadata"].get("generation", 0),
            spec=service.spec,
            observed=observed,
            gates=states,
            events=service.events,
            problem=service.problem,
            runtime=service.runtime,
            kinds=kinds,
        )
        new = status.compute(situation, service.status, self._now())
        self._metrics.tell_service(
            *place(service.body), available=is_available(new), settled=is_settled(new), ready=new["readyReplicas"]
        )
        is_worth = worth_writing(service.status, new, self._clock() - service.written_at)
        # Numbers that are held back for a minute are still to be written; asked only where nothing else keeps it awake.
        service.is_quiet = not (
            observed.pods or service.problem or (not is_worth and worth_writing(service.status, new, float("inf")))
        )
        if not is_worth:
            return
        await self._cluster.apply_status(service.body, new)
        self._metrics.writes.labels("status").inc()
        old, service.status, service.written_at = service.status, new, self._clock()
        for kind, reason, message in transitions(old, new):
            log.info("changed", extra={**named(service.body), "reason": reason, "detail": message})
            # The status has told it already; an event is a courtesy.
            with contextlib.suppress(ApiRefused, aiohttp.ClientError, TimeoutError):
                told = tell(service.told, kind, reason, message, self._now())
                await self._cluster.post_event(service.body, told)
                self._metrics.writes.labels("event").inc()

    async def _read_events(self, service: Service, views: Sequence[pods.PodView]) -> None:
        """What the kubelet told of pods that say too little themselves; not at every look: they stay so for long."""
        silent = {pod.name: pod.uid for pod in views if pod.is_silent}
        if not silent:
            service.events, service.events_at = {}, float("-inf")
        elif self._clock() - service.events_at >= _EVENTS_EVERY_S:
            service.events, service.events_at = {}, self._clock()
            # They only explain; a status without them is poorer, not wrong.
            with contextlib.suppress(ApiRefused, aiohttp.ClientError, TimeoutError):
                service.events = await self._cluster.pod_events(place(service.body)[0], silent)
