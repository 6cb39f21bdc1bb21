"""Keeping the cluster as the InferenceServices want it: one task a service, one idempotent reconcile.

Owns which services there are and when one is looked at. Events only say that it is time; what is done follows from the
resource and from what is observed then. Reading order: `Reconciler.see` (an event), `_tend` (the task), `_reconcile`
(look and plan), then `execution.py` (apply) and `report.py` (status). Decisions are in `plan.py` and `status/`, and I/O
comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from sluice_operator import plan as plans
from sluice_operator.cluster.asked import Cluster, Gates
from sluice_operator.cluster.kinds import CHILD_KINDS, SERVICE_KIND, observable
from sluice_operator.config import Settings
from sluice_operator.errors import ApiRefused, InvalidSpec, LeaseLost, NamespaceEnds, ServiceGone
from sluice_operator.metrics import Metrics
from sluice_operator.observed import pods
from sluice_operator.observed.failures import Failure
from sluice_operator.plan import Observed
from sluice_operator.reconcile.execution import Execution
from sluice_operator.reconcile.report import Report
from sluice_operator.reconcile.service import Service, held, named, place
from sluice_operator.reconcile.turns import Turns
from sluice_operator.rendering import autoscale, rollout, templates
from sluice_operator.rendering import kept as kepts
from sluice_operator.rendering.pod_template import Object
from sluice_operator.rendering.render import objects
from sluice_operator.resource import parsing
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.status import status
from sluice_operator.status.changes import not_applied

log = logging.getLogger(__name__)

# Events come in bursts (a Deployment, its ReplicaSet, its pods): one look serves them all.
_GATHER_S = 0.05
_BACKOFF_S = (1, 2, 5, 10, 30, 60)
# A reconcile that failed so many times in a row is told in the status; fewer are hiccups.
_TOLD_AFTER = 3
# No event tells that an obstacle outside our labels is gone: a foreign object, a policy, a quota.
_OBSTACLE_S = 15.0


class Reconciler:
    """All services of this operator."""

    def __init__(  # everything it needs from outside
        self,
        cluster: Cluster,
        gates: Gates,
        settings: Settings,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        now: Callable[[], str],
    ) -> None:
        self._cluster, self._settings, self._metrics = cluster, settings, metrics
        self._clock, self._wall_clock, self._now = clock, wall_clock, now
        self._services: dict[tuple[str, str], Service] = {}
        self._is_synced = False
        """All services were listed once: one that comes now is new, and somebody waits for it."""
        self._heard: set[tuple[str, str]] = set()
        """Of which services the watch told something since the last list of all was asked for."""
        metrics.services.set_function(lambda: len(self._services))
        metrics.not_ready.set_function(lambda: sum(not _is_ready(one.status) for one in self._services.values()))
        self._turns = Turns()
        self._execution = Execution(cluster, metrics, lambda kind: self.discovered(kind, is_served=False))
        self._report = Report(cluster, gates, metrics, clock=clock, now=now)
        self.is_watch_suspect = False
        """A list held what the watch of the services had not brought; until it brings something, it may be dead."""
        self.kinds: frozenset[str] = frozenset()
        """The optional kinds that the API server has the definition of, as last discovered."""

    def see(self, body: Object) -> None:
        """A service as the watch tells of it; looked at soon, unless nothing about it is new."""
        self._heard.add(place(body))
        self._take(body)

    def _take(self, body: Object) -> None:
        at = place(body)
        service = self._services.get(at)
        if service is not None and service.body["metadata"]["uid"] != body["metadata"]["uid"]:
            self._drop(*at)
            service = None
        if service is None:
            service = Service(body=held(body), status=body.get("status", {}))
            service.wake.set()
            service.task = asyncio.create_task(self._tend(service), name=f"service {at[0]}/{at[1]}")
            self._services[at] = service
            if self._is_synced:
                service.news.set()
            return
        known, new = service.body["metadata"], body["metadata"]
        # Our own status writes come back as events; the generation is the spec's.
        if any(known.get(field) != new.get(field) for field in ("generation", "deletionTimestamp")):
            service.news.set()
            service.hope.set()
            service.wake.set()
        service.body = held(body)

    def forget(self, namespace: str, name: str) -> None:
        """The watch tells that a service is gone; the cluster collects what it owned."""
        self._heard.add((namespace, name))
        self._drop(namespace, name)

    def _drop(self, namespace: str, name: str) -> None:
        service = self._services.pop((namespace, name), None)
        if service is not None and service.task is not None:
            service.task.cancel()
        self._metrics.forget_service(namespace, name)

    def touch(self, namespace: str, name: str) -> None:
        """Something that belongs to this service changed."""
        if service := self._services.get((namespace, name)):
            service.wake.set()

    async def resync(self, listing: Awaitable[Sequence[Object]]) -> None:
        """Look at all services again, as the list has them that is asked for now."""
        self._heard.clear()
        bodies = await listing
        listed = {place(body) for body in bodies}
        # What the watch told while the list was on its way is newer: a service that was made, changed or deleted
        # meanwhile would be taken back for a whole interval.
        for gone in self._services.keys() - listed - self._heard:
            self._drop(*gone)
        for body in bodies:
            at = place(body)
            if at not in self._heard:
                service = self._services.get(at)
                if service is None or _generation(service.body) != _generation(body):
                    self.is_watch_suspect = True
                self._take(body)
            self.touch(*at)
        self._is_synced = True

    def discovered(self, kind: str, *, is_served: bool) -> None:
        """Whether the API server has an optional kind's definition now; a change concerns every service."""
        if is_served == (kind in self.kinds):
            return
        self.kinds = self.kinds | {kind} if is_served else self.kinds - {kind}
        log.info("optional kind", extra={"kind": kind, "is_served": is_served})
        for service in self._services.values():
            # What was applied of it is gone with its definition.
            service.applied = {found: one for found, one in service.applied.items() if found[0] != kind}
        self.touch_all()

    def touch_all(self) -> None:
        """Changes may have been missed while the API server was away: look at every service again."""
        for service in self._services.values():
            service.hope.set()
            service.wake.set()

    async def close(self) -> None:
        """End all tasks."""
        tasks = [service.task for service in self._services.values() if service.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tend(self, service: Service) -> None:
        """Look when woken, ask the pods in between, and tell what is seen."""
        failures = 0
        while True:
            try:
                await self.look(service)
                failures = 0
                wait_s = self._settings.resync_s if service.is_quiet else self._settings.poll_s
            except NamespaceEnds:
                wait_s = self._settings.poll_s
            except ServiceGone:
                if self._services.get(place(service.body)) is service:
                    service.task = None  # it ends by itself
                    self._drop(*place(service.body))
                return
            except Exception as error:
                self._metrics.reconciles.labels("failed").inc()
                wait_s = max(
                    float(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]),
                    # A server that asks for more than a minute is asked again then: it may have recovered long before.
                    min(error.retry_after_s, _BACKOFF_S[-1]) if isinstance(error, ApiRefused) else 0.0,
                )
                failures += 1
                service.wake.set()  # the next turn looks again: until then nothing is known that could be told
                told = {**named(service.body), "error": str(error) or type(error).__name__, "retry_s": wait_s}
                is_expected = isinstance(error, (ApiRefused, LeaseLost, aiohttp.ClientError, TimeoutError, OSError))
                level, trace = (logging.WARNING, None) if is_expected else (logging.ERROR, error)
                log.log(level, "reconcile failed", extra=told, exc_info=trace)
                if failures >= _TOLD_AFTER and not isinstance(error, LeaseLost):
                    service.problem = not_applied(error)
                    with contextlib.suppress(ApiRefused, LeaseLost, aiohttp.ClientError, TimeoutError, OSError):
                        await self._report.tell(service, self.kinds)
                await self._pause(service, wait_s)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.wake.wait(), timeout=wait_s)
                await asyncio.sleep(_GATHER_S)

    @staticmethod
    async def _pause(service: Service, wait_s: float) -> None:
        """After a failure; nobody is kept waiting once it may go well."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.hope.wait(), timeout=wait_s)

    async def look(self, service: Service) -> None:
        """One turn: reconcile if something changed, ask the pods, write the status if it is worth it."""
        if service.body["metadata"].get("deletionTimestamp"):
            service.wake.clear()
            return
        observed = None
        is_due = self._clock() >= service.decide_at
        if service.wake.is_set() or is_due or (service.problem and self._clock() - service.looked_at >= _OBSTACLE_S):
            async with self._turns.of(service):
                service.wake.clear()
                began = service.looked_at = self._clock()
                observed = await self._reconcile(service)
            self._metrics.reconcile_seconds.observe(self._clock() - began)
            self._metrics.reconciles.labels("refused" if service.problem else "ok").inc()
            self._metrics.last_reconcile.set(self._wall_clock())
        try:
            await self._report.tell(service, self.kinds, observed)
        except ApiRefused as refused:
            if refused.is_not_found:
                await self._check_is_there(service)
            raise
        service.rest()

    async def _reconcile(self, service: Service) -> Observed:
        """Look, plan and apply; returns what is there then."""
        body = service.whole()
        uid, namespace, name = body["metadata"]["uid"], *place(body)
        settings = self._settings
        try:
            service.spec = parsing.parse(body)
        except InvalidSpec as error:
            service.spec, service.problem = None, Failure(reason="InvalidSpec", message=str(error))
        observed = await self._cluster.observe(namespace, name, observable(CHILD_KINDS, self.kinds))
        if service.spec is None:
            return observed
        try:
            with parsing.understood():
                kept, service.runtime = templates.choose(body, service.spec, observed, settings)
                surroundings = replace(settings.surroundings, kinds=self.kinds)
                spec = replace(
                    service.spec,
                    strategy=self._way(service, service.spec, observed),
                    autoscaling=autoscale.floored(service.spec, observed),
                )
                desired = objects(spec, settings.images, settings.otlp_endpoint, surroundings, kept)
        except InvalidSpec as error:
            service.spec, service.problem = None, Failure(reason="InvalidSpec", message=str(error))
            return observed
        history = kepts.history(observed, desired)
        todo = plans.plan(desired, uid, observed, service.applied, history)
        if any(plans.key(item) in service.applied for item in todo.create):
            # Somebody deleted it: a person, or the garbage collector, which may be sooner than our watch.
            await self._check_is_there(service)
        owned = dict(observed.owned)
        service.problem = await self._execution.carry_out(service, todo, owned)
        # The status speaks of what was just applied, not of what was there before.
        return Observed(owned=owned, replica_sets=observed.replica_sets, pods=observed.pods)

    async def _check_is_there(self, service: Service) -> None:
        """Ask the API server itself whether the resource is there and stays.

        Raises:
            ServiceGone: it does not; whatever was made for it now would be an orphan.
        """
        namespace, name = place(service.body)
        there = await self._cluster.read(SERVICE_KIND, namespace, name)
        metadata = there["metadata"] if there else {}
        if metadata.get("uid") != service.body["metadata"]["uid"] or metadata.get("deletionTimestamp"):
            raise ServiceGone(f"{namespace}/{name}")

    def _way(self, service: Service, spec: ServiceSpec, observed: Observed) -> str:
        """Which way the pods are replaced, and when to decide that again."""
        now = self._clock()
        if pods.leaving(observed) or service.leaving_at == float("-inf"):
            service.leaving_at = now
        decided = rollout.way(spec.strategy, observed, now=self._now(), quiet_s=now - service.leaving_at)
        service.decide_at = float("inf") if decided.recheck_s is None else now + decided.recheck_s
        return decided.strategy


def _is_ready(seen: Mapping[str, Any]) -> bool:
    return status.condition(seen, "Ready").get("status") == "True"


def _generation(body: Object) -> int:
    return int(body["metadata"].get("generation", 0))
