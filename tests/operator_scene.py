"""A cluster on paper for the operator's tests: resources, pods and gate states, and a fake API server that holds them.

It lies outside `tests/operator/` since nothing in a folder of that name can be imported: the standard library's wins.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice_engine.core.state import DerivedLimits, EngineState, LoadingProgress, PoolState, StepCost
from sluice_operator import plan
from sluice_operator.cluster.kinds import OPTIONAL_KINDS
from sluice_operator.errors import ApiRefused
from sluice_operator.plan import Key, Observed
from sluice_operator.rendering import labels, ownership
from sluice_operator.rendering.pod_template import Images
from sluice_operator.rendering.surroundings import Surroundings
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.status.changes import Told
from sluice_sidecar.telemetry.state import Admission, GateState, Measured

Json = dict[str, Any]

EXAMPLES = Path(__file__).parents[1] / "crds" / "examples"
IMAGES = Images(engine="sluice/engine:test", gate="sluice/gate:test")
EVERYTHING = Surroundings(kinds=frozenset(OPTIONAL_KINDS), prometheus_url="http://prometheus.monitoring:9090")
UID = "uid-of-chat"
MINIMAL_SPEC: Json = {"model": {"source": {"image": {"path": "/models/llama"}}}}


def body(spec: Mapping[str, Any] | None = None, *, name: str = "chat", uid: str = UID, generation: int = 1) -> Json:
    """A resource as the API server returns it: defaulted, with its metadata; `spec` is merged over the minimal one."""
    document = {
        "apiVersion": ownership.API_VERSION,
        "kind": ownership.KIND,
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": uid,
            "generation": generation,
            "resourceVersion": "1",
        },
        "spec": copy.deepcopy({**MINIMAL_SPEC, **(spec or {})}),
    }
    return manifest.check(document, "test")


def spec(changes: Mapping[str, Any] | None = None, **metadata: Any) -> ServiceSpec:
    """The parsed spec of `body`."""
    return parse(body(changes, **metadata))


def example(name: str) -> ServiceSpec:
    """An example of crds/examples, in namespace llm."""
    (document,) = manifest.read_file(str(EXAMPLES / f"{name}.yaml"))
    return parse({**document, "metadata": {"namespace": "llm", **document["metadata"], "uid": UID}})


def pod(  # each is one thing a test varies
    name: str = "chat-new-1",
    *,
    revision: str = "new",
    ready: bool = True,
    phase: str = "Running",
    engine: Json | None = None,
    gate: Json | None = None,
    conditions: list[Json] | None = None,
    deleting: bool = False,
    basis: str | None = None,
    reason: str = "",
    message: str = "",
) -> Json:
    """A pod; `engine` and `gate` are its containers' statuses."""
    status: Json = {
        "phase": phase,
        "podIP": "10.0.0.1",
        "reason": reason,
        "message": message,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}, *(conditions or [])],
        "containerStatuses": [{"name": "engine", "state": {"running": {}}, **(engine or {})}],
        "initContainerStatuses": [{"name": "gate", "state": {"running": {}}, **(gate or {})}],
    }
    metadata: Json = {
        "name": name,
        "uid": f"uid-of-{name}",
        "labels": {"pod-template-hash": revision},
        "annotations": {labels.COST_BASIS_ANNOTATION: labels.cost_basis(spec()) if basis is None else basis},
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"kind": "Pod", "metadata": metadata, "status": status}


def deployment(*, generation: int = 1, observed: int | None = None, conditions: list[Json] | None = None) -> Json:
    """Our Deployment as the API server returns it."""
    return {
        "kind": "Deployment",
        "metadata": {"name": "chat", "uid": "uid-of-deployment", "generation": generation, "resourceVersion": "7"},
        "spec": {"template": {"spec": {"volumes": []}}},
        "status": {
            "observedGeneration": generation if observed is None else observed,
            "conditions": conditions or [],
        },
    }


def replica_set(revision: str, number: int, *, config_maps: tuple[str, ...] = ()) -> Json:
    """A ReplicaSet of the Deployment's revision `number`."""
    volumes = [{"name": name, "configMap": {"name": name}} for name in config_maps]
    return {
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"chat-{revision}",
            "labels": {"pod-template-hash": revision},
            "annotations": {"deployment.kubernetes.io/revision": str(number)},
        },
        "spec": {"template": {"spec": {"volumes": volumes}}},
        "status": {},
    }


def observed(*pods: Json, of: Json | None = None, replica_sets: tuple[Json, ...] | None = None) -> Observed:
    """What is seen: the Deployment, a new and an old revision, and these pods."""
    seen = of or deployment()
    sets = (replica_set("old", 1), replica_set("new", 2)) if replica_sets is None else replica_sets
    return Observed(owned={plan.key(seen): seen}, replica_sets=sets, pods=pods)


def gate_state(  # each is one thing a test varies
    *,
    phase: str = "ready",
    feasible: bool = True,
    reason: str = "",
    cost: StepCost | None = None,
    ceiling: int = 3428,
    is_open: bool = True,
    why_shut: str = "kv_peak",
    measured: Measured | None = None,
    loading: LoadingProgress | None = None,
    hung: bool = False,
    failure: str = "",
    live_hash: str = "",
    engine_live_hash: str | None = None,
    refused: str = "",
    api_keys: int | None = None,
    mode: str = "Enforce",
) -> GateState:
    """What a gate says; the engine's step costs are those of the planning profile, and it obeys what the gate does."""
    loaded = phase != "loading"
    engine = EngineState(
        schema_version="1.0",
        boot_id="boot",
        seq=1,
        phase=phase,  # type: ignore[arg-type]  # a test may name any
        failure=failure,
        hung=hung,
        step_running_us=12_000_000 if hung else 0,
        pool=PoolState(block_tokens=16, total_blocks=100, free_blocks=40),
        derived=DerivedLimits(
            feasible=feasible,
            reason=reason,
            chunk_ceiling_tokens=ceiling,
            token_budget=ceiling + 64,
            max_sequences=64,
            kv_capacity_tokens=1600,
        )
        if loaded
        else None,
        step_cost=(cost or StepCost(fixed_us=20_000, decode_us=10_000, per_prefill_token_ns=35_000))
        if loaded
        else None,
        loading=loading,
        live_config_hash=live_hash if engine_live_hash is None else engine_live_hash,
    )
    return GateState(
        schema_version="1.0",
        ready=loaded,
        draining=False,
        freshness="fresh",
        live_config_hash=live_hash,
        live_config_refused=refused,
        api_keys=api_keys,
        gate_config_hash="",
        measured=measured or Measured(),
        admission=Admission(open=is_open, reason="" if is_open else why_shut, refused_total={}, mode=mode),
        engine=engine,
    )


class FakeCluster:
    """An API server in memory: server-side apply that raises the generation, labels, owners, and a count of writes."""

    def __init__(self) -> None:
        self.objects: dict[Key, Json] = {}
        self.replica_sets: list[Json] = []
        self.pods: list[Json] = []
        self.statuses: list[Json] = []
        self.events: list[tuple[str, str, str]] = []
        self.series: dict[tuple[str, str, str], int] = {}
        """The events that there are, by kind, reason and first time, and their counts."""
        self.writes: list[str] = []
        self.told_of: dict[str, list[Json]] = {}
        """What the kubelet told of each pod."""
        self.asked: list[list[str]] = []
        """Whose events were read."""
        self.refuse: dict[str, ApiRefused] = {}
        """Kind → what its application is answered with."""
        self.unexpected: list[Exception] = []
        """What the next observations end in."""
        self.told = asyncio.Event()
        """A status was written."""
        self.is_service_gone = False
        """Whether the resource was deleted, while nobody has told so yet."""
        self.served: Callable[[], frozenset[str]] = frozenset
        """The optional kinds whose definition there is: what the others are is never known, however long one waits."""
        self._versions = itertools.count(100)

    async def observe(self, namespace: str, name: str, kinds: Sequence[str]) -> Observed:
        if never := [kind for kind in kinds if kind in OPTIONAL_KINDS and kind not in self.served()]:
            raise TimeoutError(f"nothing lists {never}")
        if self.unexpected:
            raise self.unexpected.pop()
        selected = {
            found: copy.deepcopy(item)
            for found, item in self.objects.items()
            if found[0] in kinds and item["metadata"].get("labels", {}).get(labels.SERVICE_LABEL) == name
        }
        return Observed(owned=selected, replica_sets=list(self.replica_sets), pods=list(self.pods))

    async def read(self, kind: str, namespace: str, name: str) -> Json | None:
        if kind == "InferenceService":
            return None if self.is_service_gone else body()
        return copy.deepcopy(self.objects.get((kind, name)))

    async def create(self, item: Json) -> Json | None:
        return None if plan.key(item) in self.objects else await self.apply(item)

    async def apply(self, item: Json) -> Json:
        if refused := self.refuse.get(item["kind"]):
            raise refused
        found = plan.key(item)
        self.writes.append("apply " + "/".join(found))
        before = self.objects.get(found)
        after = copy.deepcopy(item)
        old: Json = before["metadata"] if before else {"uid": f"uid-{next(self._versions)}", "generation": 0}
        after["metadata"] |= {
            "uid": old["uid"],
            "generation": old["generation"] + 1,
            "resourceVersion": str(next(self._versions)),
        }
        after["status"] = (before or {}).get("status", {})
        self.objects[found] = after
        return copy.deepcopy(after)

    def drift(self, found: Key) -> None:
        """Somebody edits an object behind our back."""
        metadata = self.objects[found]["metadata"]
        metadata["generation"] += 1
        metadata["resourceVersion"] = str(next(self._versions))

    async def apply_status(self, resource: Json, status: Mapping[str, Any]) -> None:
        if self.is_service_gone:
            raise ApiRefused(404, "NotFound", "not found")
        self.writes.append("status")
        self.statuses.append(copy.deepcopy(dict(status)))
        self.told.set()

    async def delete(self, found: Key, namespace: str) -> None:
        self.writes.append("delete " + "/".join(found))
        self.objects.pop(found, None)

    async def pod_events(self, namespace: str, uids: Mapping[str, str]) -> dict[str, list[Json]]:
        self.asked.append(sorted(uids))
        if refused := self.refuse.get("PodEvents"):
            raise refused
        return {name: list(self.told_of.get(name, ())) for name in uids}

    async def post_event(self, resource: Json, told: Told) -> None:
        if refused := self.refuse.get("Event"):
            raise refused
        self.writes.append("event")
        self.events.append((told.kind, told.reason, told.message))
        self.series[told.kind, told.reason, told.first] = told.count


class FakeGates:
    """Gates that say what the test put down."""

    def __init__(self) -> None:
        self.known: dict[str, GateState] = {}

    async def states(self, addresses: Mapping[str, str]) -> dict[str, GateState]:
        return {name: self.known[name] for name in addresses if name in self.known}
