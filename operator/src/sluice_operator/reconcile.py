"""Keeping the cluster as the InferenceServices want it: one task a service, one idempotent reconcile.

Owns what is known of each service between two looks at it. Events only say that it is time to look; what is done
follows from the resource and from what is observed then. Reading order: `Reconciler.see` (an event), `_tend` (the
task), `_reconcile` (look, plan, apply), `_tell` (status). Decisions are in `plan.py` and `status.py`; I/O comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from sluice_engine import codec
from sluice_operator import plan as plans
from sluice_operator.cluster.asked import Cluster, Gates
from sluice_operator.cluster.kinds import CHILD_KINDS, OPTIONAL_KINDS
from sluice_operator.config import Settings
from sluice_operator.errors import ApiRefused, InvalidSpec, LeaseLost, NamespaceEnds
from sluice_operator.metrics import Metrics
from sluice_operator.observed import pods
from sluice_operator.observed.failures import Failure
from sluice_operator.plan import Applied, Key, Observed, Plan
from sluice_operator.rendering import autoscale, rollout, templates
from sluice_operator.rendering import kept as kepts
from sluice_operator.rendering.pod_template import Object
from sluice_operator.rendering.render import objects
from sluice_operator.resource import spec as specs
from sluice_operator.status import status
from sluice_operator.status.changes import (
    REFUSED_HINT,
    Series,
    is_available,
    is_settled,
    name_taken,
    not_applied,
    tell,
    transitions,
)
from sluice_operator.status.figures import worth_writing
from sluice_operator.status.situation import Runtime

log = logging.getLogger(__name__)

# Events come in bursts (a Deployment, its ReplicaSet, its pods): one look serves them all.
_GATHER_S = 0.05
_AT_ONCE = 8
_BACKOFF_S = (1, 2, 5, 10, 30, 60)
# A pod that hangs is asked after so often: with the time between two looks, its cause is known within 10 s.
_EVENTS_EVERY_S = 4.0
# A reconcile that failed so many times in a row is told in the status; fewer are hiccups.
_TOLD_AFTER = 3
# No event tells that an obstacle outside our labels is gone: a foreign object, a policy, a quota.
_OBSTACLE_S = 15.0
# 401: the token was just rotated. 409: somebody wrote at the same time. 408, 429: the server is busy.
_TEMPORARY = frozenset({401, 408, 409, 429})
_NOT_FOUND = 404
# What a status is told from.
_TOLD = ("Deployment", "ScaledObject", "ReplicaSet", "Pod")


@dataclass(slots=True, kw_only=True)
class Service:
    """What is known of one InferenceService."""

    body: Object
    status: Mapping[str, Any]
    """As last read or written."""
    written_at: float = float("-inf")
    looked_at: float = float("-inf")
    leaving_at: float = float("-inf")
    """When a pod of it was last seen on its way out; the first look counts as one."""
    is_quiet: bool = False
    """It has no pods and nothing is in its way: until an event comes, what is told of it stays as it is."""
    decide_at: float = float("inf")
    """When to look again though nothing happens."""
    events: pods.Events = field(default_factory=dict)
    """Of its pods that say too little themselves, as last read."""
    events_at: float = float("-inf")
    spec: specs.ServiceSpec | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody made it or changed its spec, and waits: it goes before those that the clock wakes."""
    hope: asyncio.Event = field(default_factory=asyncio.Event)
    """What failed may go well now: the spec is another, or the API server answers again. Ends a pause."""
    problem: Failure | None = None
    runtime: Runtime | None = None
    applied: dict[Key, Applied] = field(default_factory=dict)
    taken: set[Key] = field(default_factory=set)
    """Names that we need and that were somebody else's when we last looked."""
    told: Series = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


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
        self._cluster, self._gates, self._settings, self._metrics = cluster, gates, settings, metrics
        self._clock, self._wall_clock, self._now = clock, wall_clock, now
        self._services: dict[tuple[str, str], Service] = {}
        self._is_synced = False
        """All services were listed once: one that comes now is new, and somebody waits for it."""
        self._heard: set[tuple[str, str]] = set()
        """Of which services the watch told something since the last list of all was asked for."""
        metrics.services.set_function(lambda: len(self._services))
        metrics.not_ready.set_function(lambda: sum(not _is_ready(one.status) for one in self._services.values()))
        # After a start or a resync all want to be looked at: so many at once, or the memory of all is needed together.
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.is_watch_suspect = False
        """A list held what the watch of the services had not brought; until it brings something, it may be dead."""
        self.kinds: frozenset[str] = frozenset()
        """The optional kinds that the API server has the definition of, as last discovered."""

    def see(self, body: Object) -> None:
        """A service as the watch tells of it; looked at soon, unless nothing about it is new."""
        self._heard.add(_place(body))
        self._take(body)

    def _take(self, body: Object) -> None:
        at = _place(body)
        service = self._services.get(at)
        if service is not None and service.body["metadata"]["uid"] != body["metadata"]["uid"]:
            self._drop(*at)
            service = None
        if service is None:
            service = Service(body=_kept(body), status=body.get("status", {}))
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
        service.body = _kept(body)

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
        listed = {_place(body) for body in bodies}
        # What the watch told while the list was on its way is newer: a service that was made, changed or deleted
        # meanwhile would be taken back for a whole interval.
        for gone in self._services.keys() - listed - self._heard:
            self._drop(*gone)
        for body in bodies:
            at = _place(body)
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

    def _observable(self) -> list[str]:
        return [kind for kind in CHILD_KINDS if kind not in OPTIONAL_KINDS or kind in self.kinds]

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
            except Exception as error:
                self._metrics.reconciles.labels("failed").inc()
                wait_s = max(
                    float(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]),
                    # A server that asks for more than a minute is asked again then: it may have recovered long before.
                    min(error.retry_after_s, _BACKOFF_S[-1]) if isinstance(error, ApiRefused) else 0.0,
                )
                failures += 1
                service.wake.set()  # the next turn looks again: until then nothing is known that could be told
                told = {**_named(service.body), "error": str(error) or type(error).__name__, "retry_s": wait_s}
                is_expected = isinstance(error, (ApiRefused, LeaseLost, aiohttp.ClientError, TimeoutError, OSError))
                level, trace = (logging.WARNING, None) if is_expected else (logging.ERROR, error)
                log.log(level, "reconcile failed", extra=told, exc_info=trace)
                if failures >= _TOLD_AFTER and not isinstance(error, LeaseLost):
                    service.problem = not_applied(error)
                    with contextlib.suppress(ApiRefused, LeaseLost, aiohttp.ClientError, TimeoutError, OSError):
                        await self._tell(service)
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

    @contextlib.asynccontextmanager
    async def _turn(self, service: Service) -> AsyncIterator[None]:
        """A place among those that are looked at; at once for one that is news, or becomes so while it waits."""
        place = asyncio.ensure_future(self._turns.acquire())
        news = asyncio.ensure_future(service.news.wait())
        try:
            await asyncio.wait((place, news), return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                place.cancel()
            service.news.clear()
            service.hope.clear()
            yield
        finally:
            news.cancel()
            if not place.cancel() and not place.cancelled():
                self._turns.release()

    async def look(self, service: Service) -> None:
        """One turn: reconcile if something changed, ask the pods, write the status if it is worth it."""
        if service.body["metadata"].get("deletionTimestamp"):
            service.wake.clear()
            return
        observed = None
        is_due = self._clock() >= service.decide_at
        if service.wake.is_set() or is_due or (service.problem and self._clock() - service.looked_at >= _OBSTACLE_S):
            async with self._turn(service):
                service.wake.clear()
                began = service.looked_at = self._clock()
                observed = await self._reconcile(service)
            self._metrics.reconcile_seconds.observe(self._clock() - began)
            self._metrics.reconciles.labels("refused" if service.problem else "ok").inc()
            self._metrics.last_reconcile.set(self._wall_clock())
        await self._tell(service, observed)

    async def _reconcile(self, service: Service) -> Observed:
        """Look, plan and apply; returns what is there then."""
        body = service.body
        uid, namespace, name = body["metadata"]["uid"], *_place(body)
        observed = await self._cluster.observe(namespace, name, self._observable())
        settings = self._settings
        try:
            service.spec = specs.parse(body)
            with specs.understood():
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
        owned = dict(observed.owned)
        service.problem = await self._carry_out(service, todo, owned)
        # The status speaks of what was just applied, not of what was there before.
        return Observed(owned=owned, replica_sets=observed.replica_sets, pods=observed.pods)

    def _way(self, service: Service, spec: specs.ServiceSpec, observed: Observed) -> str:
        """Which way the pods are replaced, and when to decide that again."""
        now = self._clock()
        if pods.leaving(observed) or service.leaving_at == float("-inf"):
            service.leaving_at = now
        decided = rollout.way(spec.strategy, observed, now=self._now(), quiet_s=now - service.leaving_at)
        service.decide_at = float("inf") if decided.recheck_s is None else now + decided.recheck_s
        return decided.strategy

    async def _carry_out(self, service: Service, todo: Plan, owned: dict[Key, Object]) -> Failure | None:
        """Send what the plan says, and note in `owned` what is there then; returns what stood in the way."""
        namespace, _ = _place(service.body)
        problem = name_taken(todo.foreign)
        done: list[str] = []
        try:
            for item in (*todo.create, *todo.update):
                found = plans.key(item)
                try:
                    after = await self._send(service, item, is_new=item in todo.create)
                except ApiRefused as refused:
                    if refused.status == _NOT_FOUND and found[0] in self.kinds:
                        self.discovered(found[0], is_served=False)  # its definition went a moment ago
                        continue
                    if _may_pass(refused):
                        raise
                    text = f"the API server refused {found[0]} {found[1]}: {refused.message}"
                    return Failure(reason=f"{found[0]}Refused", message=text, hint=REFUSED_HINT)
                if after is None:
                    problem = name_taken([found])
                    continue
                done.append("/".join(found))
                service.applied[found] = Applied(digest=codec.digest(item), version=plans.version(after))
                owned[found] = after
        finally:
            if done:
                log.info("applied", extra={**_named(service.body), "objects": done})
        for found in todo.delete:
            await self._cluster.delete(found, namespace)
            self._metrics.writes.labels("delete").inc()
            log.info("deleted", extra={**_named(service.body), "object": "/".join(found)})
            service.applied.pop(found, None)
        return problem

    async def _send(self, service: Service, item: Object, *, is_new: bool) -> Object | None:
        """Apply an object; None where somebody else has the name of one that is new."""
        found, (namespace, _) = plans.key(item), _place(service.body)
        after = None
        if is_new and found not in service.taken:
            after = await self._cluster.create(item)
        if is_new and after is None:
            there = await self._cluster.read(found[0], namespace, found[1])
            if there is not None and not plans.is_owned(there, service.body["metadata"]["uid"]):
                service.taken.add(found)  # from now on it is asked before anything is sent
                return None
            service.taken.discard(found)
        if after is None:
            after = await self._cluster.apply(item)
        self._metrics.writes.labels("apply").inc()
        return after

    async def _read_events(self, service: Service, views: Sequence[pods.PodView]) -> None:
        """What the kubelet told of pods that say too little themselves; not at every look: they stay so for long."""
        silent = {pod.name: pod.uid for pod in views if pod.is_silent}
        if not silent:
            service.events, service.events_at = {}, float("-inf")
        elif self._clock() - service.events_at >= _EVENTS_EVERY_S:
            service.events, service.events_at = {}, self._clock()
            # They only explain; a status without them is poorer, not wrong.
            with contextlib.suppress(ApiRefused, aiohttp.ClientError, TimeoutError):
                service.events = await self._cluster.pod_events(_place(service.body)[0], silent)

    async def _tell(self, service: Service, observed: Observed | None = None) -> None:
        """Write the status if it is worth it; of what is `observed`, by default of what is there now."""
        if service.spec is None and service.problem is None:
            return  # not looked at yet
        if observed is None:
            # Between two looks nothing of it is held: a thousand services would be most of the memory.
            observed = await self._cluster.observe(*_place(service.body), _TOLD)
        service.is_quiet = not (observed.pods or service.problem)
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
            kinds=self.kinds,
        )
        new = status.compute(situation, service.status, self._now())
        self._metrics.tell_service(
            *_place(service.body), available=is_available(new), settled=is_settled(new), ready=new["readyReplicas"]
        )
        if not worth_writing(service.status, new, self._clock() - service.written_at):
            return
        await self._cluster.apply_status(service.body, new)
        self._metrics.writes.labels("status").inc()
        old, service.status, service.written_at = service.status, new, self._clock()
        for kind, reason, message in transitions(old, new):
            log.info("changed", extra={**_named(service.body), "reason": reason, "detail": message})
            # The status has told it already; an event is a courtesy.
            with contextlib.suppress(ApiRefused, aiohttp.ClientError, TimeoutError):
                told = tell(service.told, kind, reason, message, self._now())
                await self._cluster.post_event(service.body, told)
                self._metrics.writes.labels("event").inc()


def _may_pass(refused: ApiRefused) -> bool:
    """Whether what the API server refused may go well later though the spec stays as it is."""
    is_over = isinstance(refused, NamespaceEnds)
    return is_over or refused.lacks_right or refused.status in _TEMPORARY or refused.status >= 500


def _place(body: Object) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _kept(body: Object) -> Object:
    """A resource as it is held between two looks: of the status, which is held apart, only what it speaks of."""
    seen = body.get("status", {}).get("observedGeneration")
    return {**body, "status": {} if seen is None else {"observedGeneration": seen}}


def _named(body: Object) -> dict[str, str]:
    return dict(zip(("namespace", "service"), _place(body), strict=True))


def _is_ready(seen: Mapping[str, Any]) -> bool:
    return status.condition(seen, "Ready").get("status") == "True"


def _generation(body: Object) -> int:
    return int(body["metadata"].get("generation", 0))
