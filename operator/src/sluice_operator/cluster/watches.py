"""Following our children: label-selected watches of our own, which end in "look at this service again".

Owns list, watch and list again. kopf follows the InferenceServices themselves; it would follow every pod of the cluster
if it were asked to follow pods.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import aiohttp

from sluice_operator.cluster.connection import WatchExpired
from sluice_operator.cluster.kinds import OPTIONAL_KINDS
from sluice_operator.cluster.seen import Place
from sluice_operator.errors import ApiRefused
from sluice_operator.health import Health
from sluice_operator.metrics import Metrics
from sluice_operator.reconcile.reconciler import Reconciler

log = logging.getLogger(__name__)

# A watch beats with each event and bookmark (one a minute) and with each start. Five minutes of silence mean that not
# even starting it anew works.
SILENCE_LIMIT_S = 300.0
_RETRY_S = 5.0
# How often an optional kind that the cluster lacks is looked for: one small GET each time.
_DISCOVERY_S = 60.0


class Children(Protocol):
    """What a watch needs of the API server; `kube.Kube` is it."""

    async def list_children(self, kind: str, namespace: str) -> str:
        """See all children of a kind; returns the version to watch from."""
        ...

    async def serves(self, kind: str) -> bool:
        """Whether the API server has the kind's definition."""
        ...

    def watch_children(self, kind: str, namespace: str, since: str) -> AsyncIterator[tuple[str, list[Place]]]:
        """Of each event after a version: its own version, and to which services it is news."""
        ...


async def follow(
    children: Children, kind: str, namespace: str, reconciler: Reconciler, *, health: Health, metrics: Metrics
) -> None:
    """Watch one kind for ever; whatever breaks is begun anew from a fresh list."""
    name = f"watch {kind} in {namespace or 'all namespaces'}"
    health.expect(name, SILENCE_LIMIT_S)
    while True:
        try:
            if kind in OPTIONAL_KINDS and not await _is_served(children, kind, reconciler):
                health.beat(name)
                await asyncio.sleep(_DISCOVERY_S)
                continue
            since = await children.list_children(kind, namespace)
            # Between two watches anything may have happened.
            reconciler.touch_all()
            while True:
                health.beat(name)
                since = await _once(children, kind, namespace, since, reconciler, lambda: health.beat(name))
        except WatchExpired:
            continue
        except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            metrics.watch_restarts.labels(kind).inc()
            log.warning("watch broke", extra={"kind": kind, "error": str(error) or type(error).__name__})
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))  # noqa: S311  # spreads the returning watches


async def _is_served(children: Children, kind: str, reconciler: Reconciler) -> bool:
    """Whether an optional kind's definition is there; what is found is told to the reconciler."""
    is_served = await children.serves(kind)
    reconciler.discovered(kind, is_served=is_served)
    return is_served


async def _once(  # the parts of one stream
    children: Children, kind: str, namespace: str, since: str, reconciler: Reconciler, beat: Callable[[], None]
) -> str:
    async for version, concerned in children.watch_children(kind, namespace, since):
        beat()
        since = version
        for place in concerned:
            reconciler.touch(*place)
    return since
