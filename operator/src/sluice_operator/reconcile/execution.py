"""Carrying out a plan: what is sent to the API server, in which order, and what a refusal means for the service.

Owns the difference between what may pass (it is tried again) and what only another spec can change (it is told). Knows
nothing of when to look. Before: `plan.py`, which decides what is to be done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sluice_operator import plan as plans
from sluice_operator.cluster.asked import Cluster
from sluice_operator.cluster.kinds import OPTIONAL_KINDS
from sluice_operator.errors import ApiRefused, NamespaceEnds
from sluice_operator.metrics import Metrics
from sluice_operator.observed.failures import Failure
from sluice_operator.plan import Applied, Key, Plan
from sluice_operator.reconcile.service import Service, named, place
from sluice_operator.rendering.pod_template import Object
from sluice_operator.status.changes import REFUSED_HINT, name_taken

log = logging.getLogger(__name__)

# 401: the token was just rotated. 409: somebody wrote at the same time. 408, 429: the server is busy.
_TEMPORARY = frozenset({401, 408, 409, 429})


class Execution:
    """Sends what plans say."""

    def __init__(self, cluster: Cluster, metrics: Metrics, definition_gone: Callable[[str], None]) -> None:
        self._cluster, self._metrics, self._definition_gone = cluster, metrics, definition_gone

    async def carry_out(self, service: Service, todo: Plan, owned: dict[Key, Object]) -> Failure | None:
        """Send what the plan says, and note in `owned` what is there then; returns what stood in the way."""
        namespace, _ = place(service.body)
        problem = name_taken(todo.foreign)
        done: list[str] = []
        try:
            for item in (*todo.create, *todo.update):
                found = plans.key(item)
                try:
                    after = await self._send(service, item, is_new=item in todo.create)
                except ApiRefused as refused:
                    if refused.is_not_found and found[0] in OPTIONAL_KINDS:
                        self._definition_gone(found[0])  # a moment ago
                        continue
                    if _may_pass(refused):
                        raise
                    text = f"the API server refused {found[0]} {found[1]}: {refused.message}"
                    return Failure(reason=f"{found[0]}Refused", message=text, hint=REFUSED_HINT)
                if after is None:
                    problem = name_taken([found])
                    continue
                done.append("/".join(found))
                service.applied[found] = Applied(digest=todo.digests[found], version=plans.version(after))
                owned[found] = after
        finally:
            if done:
                log.info("applied", extra={**named(service.body), "objects": done})
        for found in todo.delete:
            await self._cluster.delete(found, namespace)
            self._metrics.writes.labels("delete").inc()
            log.info("deleted", extra={**named(service.body), "object": "/".join(found)})
            service.applied.pop(found, None)
        return problem

    async def _send(self, service: Service, item: Object, *, is_new: bool) -> Object | None:
        """Apply an object; None where somebody else has the name of one that is new."""
        found, (namespace, _) = plans.key(item), place(service.body)
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


def _may_pass(refused: ApiRefused) -> bool:
    """Whether what the API server refused may go well later though the spec stays as it is."""
    is_over = isinstance(refused, NamespaceEnds)
    return is_over or refused.lacks_right or refused.status in _TEMPORARY or refused.status >= 500
