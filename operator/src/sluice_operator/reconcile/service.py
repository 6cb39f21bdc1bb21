"""What is known of one InferenceService between two looks at it."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice_operator.observed import pods
from sluice_operator.observed.failures import Failure
from sluice_operator.plan import Applied, Key
from sluice_operator.rendering.pod_template import Object
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.status.changes import Series
from sluice_operator.status.situation import Runtime

# What `kubectl apply` keeps of its manifest.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


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
    spec: ServiceSpec | None = None
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
    packed: bytes = b""
    """The spec as it is written, while it is at rest."""

    def whole(self) -> Object:
        """The resource with its spec."""
        return self.body if "spec" in self.body else {**self.body, "spec": json.loads(zlib.decompress(self.packed))}

    def rest(self) -> None:
        """Hold the spec as compact text until the next look; what is understood of it, only while pods are told of."""
        if "spec" in self.body:
            self.packed = zlib.compress(json.dumps(self.body["spec"], separators=(",", ":")).encode())
            self.body = {name: value for name, value in self.body.items() if name != "spec"}
        if self.is_quiet:
            self.spec = None


def place(body: Object) -> tuple[str, str]:
    """The namespace and the name."""
    return body["metadata"]["namespace"], body["metadata"]["name"]


def held(body: Object) -> Object:
    """A resource as it is held: of the status, which is held apart, only what it speaks of; its spec once."""
    seen = body.get("status", {}).get("observedGeneration")
    annotations = {
        name: text for name, text in body["metadata"].get("annotations", {}).items() if name != _LAST_APPLIED
    }
    metadata = {**body["metadata"], "annotations": annotations}
    return {**body, "metadata": metadata, "status": {} if seen is None else {"observedGeneration": seen}}


def named(body: Object) -> dict[str, str]:
    """The service, as a line of log has it."""
    return dict(zip(("namespace", "service"), place(body), strict=True))
