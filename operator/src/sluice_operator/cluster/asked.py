"""The cluster as the reconciler sees it: what it asks of the API server and of the pods' gates.

Owns the two protocols, so that deciding what to do does not know how it is sent. `kube.Kube` and `gates.GateClient` are
the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sluice_operator.plan import Key, Observed
from sluice_operator.rendering.pod_template import Object
from sluice_operator.status.changes import Told
from sluice_sidecar.telemetry.state import GateState


class Cluster(Protocol):
    """What the reconciler needs of the API server; `kube.Kube` is it."""

    async def observe(self, namespace: str, name: str, kinds: Sequence[str]) -> Observed:
        """Everything of these kinds that belongs to one service."""
        ...

    async def read(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object, or None."""
        ...

    async def create(self, item: Object) -> Object | None:
        """Apply an object that nobody is known to have made; None, and nothing is changed, where its name is taken."""
        ...

    async def apply(self, item: Object) -> Object:
        """Apply an object; returns it as the server has it then."""
        ...

    async def apply_status(self, body: Object, status: Mapping[str, Any]) -> None:
        """Apply the status of an InferenceService."""
        ...

    async def delete(self, found: Key, namespace: str) -> None:
        """Delete an object."""
        ...

    async def pod_events(self, namespace: str, uids: Mapping[str, str]) -> dict[str, list[Object]]:
        """What the kubelet told of these pods (name → uid)."""
        ...

    async def post_event(self, body: Object, told: Told) -> None:
        """Post an event about an InferenceService, or count one up."""
        ...


class Gates(Protocol):
    """What the reconciler needs of the pods; `gates.GateClient` is it."""

    async def states(self, addresses: Mapping[str, str]) -> dict[str, GateState]:
        """The states of those pods that answer."""
        ...
