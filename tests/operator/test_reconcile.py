"""The reconcile against a fake API server: it sends what is needed, and then nothing."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import operator_scene as scene
from sluice_operator.config import Settings
from sluice_operator.errors import ApiRefused, NamespaceEnds, ServiceGone
from sluice_operator.metrics import Metrics
from sluice_operator.reconcile import reconciler
from sluice_operator.reconcile.reconciler import Reconciler
from sluice_operator.reconcile.service import Service
from sluice_operator.reconcile.turns import AT_ONCE
from sluice_operator.status.changes import transitions
from sluice_operator.status.status import condition

Json = dict[str, Any]


async def listed(*bodies: Json) -> list[Json]:
    """What a list of all services answers."""
    return list(bodies)


class World:
    """A reconciler, what it writes to, and its clock."""

    def __init__(self) -> None:
        self.cluster, self.gates, self.time_s = scene.FakeCluster(), scene.FakeGates(), 0.0
        self.registry = CollectorRegistry()
        self.reconciler = Reconciler(
            self.cluster,
            self.gates,
            Settings(images=scene.IMAGES),
            Metrics(self.registry),
            clock=lambda: self.time_s,
            wall_clock=lambda: 1.8e9 + self.time_s,
            now=lambda: f"2026-01-01T00:00:{int(self.time_s) % 60:02d}Z",
        )
        self.cluster.served = lambda: self.reconciler.kinds

    def service(self, body: Json | None = None) -> Service:
        """A service whose task the test plays itself."""
        service = Service(body=body or scene.body(), status={})
        service.wake.set()
        return service

    async def look(self, service: Service, *, woken: bool = True) -> list[str]:
        """One turn, after a change or only since time passed; returns what it wrote."""
        self.cluster.writes.clear()
        if woken:
            service.wake.set()
        await self.reconciler.look(service)
        return list(self.cluster.writes)

    def serve(self) -> None:
        """The Deployment's controller and the kubelet do their part."""
        deployment = self.cluster.objects["Deployment", "chat"]
        deployment["status"] = {"observedGeneration": deployment["metadata"]["generation"]}
        self.cluster.replica_sets = [scene.replica_set("new", 1)]
        self.cluster.pods = [scene.pod()]
        self.gates.known = {"chat-new-1": scene.gate_state()}

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.reconciler.close()


async def test_a_new_service_gets_its_objects_in_order_and_a_status(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(world.cluster, "read", lambda kind, *_: read.append(kind))

    written = await world.look(world.service())

    kinds = [write.split("/")[0] for write in written]
    assert kinds == [
        "apply ServiceAccount",
        "apply ControllerRevision",
        "apply ConfigMap",
        "apply ConfigMap",
        "apply Service",
        "apply Deployment",
        "apply PodDisruptionBudget",
        "apply NetworkPolicy",
        "status",
    ]
    assert condition(world.cluster.statuses[-1], "Ready")["reason"] == "Applying"
    assert read == [], "the API server itself tells of a name that is taken"


async def test_a_second_look_sends_nothing(world: World) -> None:
    service = world.service()
    await world.look(service)

    assert await world.look(service) == []
    assert await world.look(service) == []


async def test_a_service_that_serves_is_told_once(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()

    assert await world.look(service) == ["status", "event"]
    world.time_s += 3600
    assert await world.look(service) == []
    assert condition(world.cluster.statuses[-1], "Ready")["status"] == "True"
    assert world.cluster.events == [("Normal", "Ready", "1 of 1 replicas serve.")]


async def test_between_events_only_the_pods_are_asked(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()
    await world.look(service)
    observations = world.count("sluice_operator_reconciles_total", outcome="ok")

    world.gates.known = {"chat-new-1": scene.gate_state(is_open=False)}
    await world.reconciler.look(service)

    assert world.count("sluice_operator_reconciles_total", outcome="ok") == observations
    assert condition(world.cluster.statuses[-1], "AdmissionOpen")["reason"] == "Busy"


async def test_a_service_without_pods_is_left_alone_until_something_happens(world: World) -> None:
    service = world.service()

    def is_quiet() -> bool:
        return service.is_quiet

    await world.look(service)
    assert is_quiet()

    world.serve()
    await world.look(service)
    assert not is_quiet(), "pods are asked how they fare"

    world.cluster.pods = []
    await world.look(service)
    assert is_quiet()
    service.status = {**service.status, "measured": {"kvUsagePercent": 7}}
    await world.look(service)
    assert not is_quiet(), "numbers are held back for a minute, and are still to be written then"
    world.time_s += 61
    assert await world.look(service, woken=False) == ["status"]

    world.cluster.refuse["Service"] = ApiRefused(422, "Invalid", "no")
    world.cluster.drift(("Service", "chat"))
    await world.look(service)
    assert not is_quiet(), "what is in its way may be gone without an event"


async def test_drift_heals(world: World) -> None:
    service = world.service()
    await world.look(service)

    world.cluster.drift(("Deployment", "chat"))

    assert await world.look(service) == ["apply Deployment/chat"]
    assert await world.look(service) == []


async def test_what_was_deleted_comes_back(world: World) -> None:
    service = world.service()
    await world.look(service)

    del world.cluster.objects["Service", "chat"]

    assert await world.look(service) == ["apply Service/chat"]


async def test_what_the_garbage_collector_took_is_not_made_again_though_the_watch_is_late(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.cluster.is_service_gone = True
    del world.cluster.objects["Deployment", "chat"]

    with pytest.raises(ServiceGone):
        await world.look(service)

    assert world.cluster.writes == []


async def test_a_service_that_went_unheard_is_not_looked_at_for_ever(world: World) -> None:
    world.reconciler.see(scene.body())
    async with asyncio.timeout(10):
        await world.cluster.told.wait()
    (task,) = [one for one in asyncio.all_tasks() if one.get_name() == "service llm/chat"]
    world.cluster.is_service_gone = True
    del world.cluster.objects["Service", "chat"]

    world.reconciler.touch("llm", "chat")

    async with asyncio.timeout(10):
        await task
    assert world.count("sluice_operator_services") == 0


async def test_a_new_spec_is_not_ready_because_the_old_one_was(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()
    await world.look(service)

    service.body = scene.body({"scheduling": {"maxSequences": 4}}, generation=2)
    written = await world.look(service)

    assert written[-1] == "event"
    assert any(write.startswith("apply Deployment") for write in written)
    status = world.cluster.statuses[-1]
    assert (status["observedGeneration"], condition(status, "Ready")["reason"]) == (2, "Applying")


async def test_an_old_config_map_goes_once_no_replica_set_names_it(world: World) -> None:
    service = world.service()
    await world.look(service)
    old = next(name for kind, name in world.cluster.objects if kind == "ConfigMap" and "-config-" in name)
    world.cluster.replica_sets = [scene.replica_set("old", 1, config_maps=(old,))]

    service.body = scene.body({"scheduling": {"maxSequences": 4}}, generation=2)
    first = await world.look(service)
    world.cluster.replica_sets = [scene.replica_set("new", 2)]
    second = await world.look(service)

    assert f"delete ConfigMap/{old}" not in first
    assert second == [f"delete ConfigMap/{old}"]


@pytest.mark.parametrize("labelled", [True, False], ids=["with our labels", "without any label of ours"])
async def test_an_object_of_somebody_else_is_left_alone(world: World, labelled: bool) -> None:  # noqa: FBT001  # a case
    theirs: Json = {
        "kind": "Service",
        "metadata": {"name": "chat", "uid": "theirs", "resourceVersion": "5", "generation": 1},
        "spec": {"selector": {"app": "theirs"}},
    }
    if labelled:
        theirs["metadata"]["labels"] = {"sluice.dev/inferenceservice": "chat"}
    world.cluster.objects["Service", "chat"] = theirs

    service = world.service()
    written = await world.look(service)

    assert "apply Service/chat" not in written
    assert world.cluster.objects["Service", "chat"]["spec"] == {"selector": {"app": "theirs"}}
    failure = world.cluster.statuses[-1]["failure"]
    assert failure["reason"] == "NameTaken"
    assert "Service chat exists and belongs to something else" in failure["message"]
    assert await world.look(service) == [], "and it is told once"


async def test_a_name_that_became_free_is_taken_without_an_event(world: World) -> None:
    theirs: Json = {"kind": "Service", "metadata": {"name": "chat", "uid": "theirs", "resourceVersion": "5"}}
    world.cluster.objects["Service", "chat"] = theirs
    service = world.service()
    await world.look(service)
    del world.cluster.objects["Service", "chat"]

    await world.reconciler.look(service)
    assert ("Service", "chat") not in world.cluster.objects, "not with every poll"
    world.time_s += 15
    await world.reconciler.look(service)

    assert ("Service", "chat") in world.cluster.objects
    assert "failure" not in world.cluster.statuses[-1]


async def test_our_own_object_without_its_labels_is_ours_again(world: World) -> None:
    service = world.service()
    await world.look(service)

    world.cluster.objects["Service", "chat"]["metadata"]["labels"] = {}

    assert await world.look(service) == ["apply Service/chat"]


async def test_what_the_api_server_refuses_shows_in_the_status(world: World) -> None:
    world.cluster.refuse["Deployment"] = ApiRefused(
        422, "Invalid", "spec.template.spec.volumes[6].name: Duplicate value"
    )

    service = world.service()
    await world.look(service)

    status = world.cluster.statuses[-1]
    assert status["failure"]["reason"] == "DeploymentRefused"
    assert "Duplicate value" in status["failure"]["message"]
    assert world.count("sluice_operator_reconciles_total", outcome="refused") == 1
    world.cluster.refuse.clear()
    await world.look(service)
    assert "failure" not in world.cluster.statuses[-1]


@pytest.mark.parametrize("code", [401, 409, 429, 500, 503])
async def test_a_passing_refusal_is_tried_again_and_accuses_nobody(world: World, code: int) -> None:
    world.cluster.refuse["Deployment"] = ApiRefused(code, "", "later")

    with pytest.raises(ApiRefused):
        await world.look(world.service())

    assert world.cluster.statuses == []


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        pytest.param(
            'deployments.apps "chat" is forbidden: User "system:serviceaccount:sluice:sluice" cannot patch resource '
            '"deployments" in API group "apps" in the namespace "llm"',
            True,
            id="a right that the operator lacks, or that a server which just started has not read yet",
        ),
        pytest.param(
            'deployments.apps "chat" is forbidden: exceeded quota: few, requested: count/deployments.apps=1',
            False,
            id="a quota",
        ),
        pytest.param(
            'deployments.apps "chat" is forbidden: ValidatingAdmissionPolicy "p" denied request: no',
            False,
            id="a policy",
        ),
    ],
)
async def test_of_what_is_forbidden_only_what_the_spec_can_change_is_said_of_the_spec(
    world: World, message: str, *, passes: bool
) -> None:
    world.cluster.refuse["Deployment"] = ApiRefused(403, "Forbidden", message)

    if passes:
        with pytest.raises(ApiRefused):
            await world.look(world.service())
        assert world.cluster.statuses == []
    else:
        await world.look(world.service())
        assert world.cluster.statuses[-1]["failure"]["reason"] == "DeploymentRefused"


async def test_a_name_that_is_taken_is_not_written_to_while_it_is(world: World) -> None:
    theirs = {"kind": "Service", "metadata": {"name": "chat", "namespace": "llm", "uid": "theirs"}}
    world.cluster.objects["Service", "chat"] = theirs
    service = world.service()
    await world.look(service)
    created: list[Json] = []

    async def create(item: Json) -> Json | None:
        created.append(item)
        return await scene.FakeCluster.create(world.cluster, item)

    world.cluster.create = create  # type: ignore[method-assign]  # counted
    await world.look(service)
    assert created == [], "it is only asked whose the name is"

    del world.cluster.objects["Service", "chat"]
    assert "apply Service/chat" in await world.look(service)


async def test_what_nobody_expected_is_tried_again_and_claims_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_operator.reconcile.reconciler._BACKOFF_S", (0,))
    world.cluster.unexpected = [KeyError("kind"), KeyError("kind")]
    world.reconciler.see(scene.body())

    async with asyncio.timeout(10):
        await world.cluster.told.wait()

    (status,) = world.cluster.statuses
    assert condition(status, "Ready")["reason"] == "Applying"
    assert ("Deployment", "chat") in world.cluster.objects
    assert world.count("sluice_operator_reconciles_total", outcome="failed") == 2


async def test_a_reconcile_that_fails_again_and_again_is_told_until_it_works(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "_BACKOFF_S", (0,))
    broken = ApiRefused(500, "InternalError", "failed calling webhook x.y: no route to host")
    world.cluster.unexpected = [broken] * 3
    world.reconciler.see(scene.body())

    async with asyncio.timeout(10):
        while len(world.cluster.statuses) < 2:
            world.cluster.told.clear()
            await world.cluster.told.wait()

    first, last = world.cluster.statuses[:2]
    assert first["failure"]["reason"] == "NotApplied"
    assert "no route to host" in first["failure"]["message"]
    assert condition(first, "Ready")["status"] == "False"
    assert "failure" not in last


@pytest.mark.parametrize(
    ("wanted_s", "slept_s"),
    [
        pytest.param(0, 1, id="our own pause where it says nothing"),
        pytest.param(7, 7, id="the longer of the two"),
        pytest.param(3600, 60, id="a minute at most"),
    ],
)
async def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(
    world: World, monkeypatch: pytest.MonkeyPatch, wanted_s: float, slept_s: float
) -> None:
    busy = ApiRefused(429, "TooManyRequests", "later")
    busy.retry_after_s = wanted_s
    world.cluster.unexpected = [busy]
    slept: list[float] = []

    async def pause(service: Service, wait_s: float) -> None:
        slept.append(wait_s)

    monkeypatch.setattr(world.reconciler, "_pause", pause)
    world.reconciler.see(scene.body())

    async with asyncio.timeout(10):
        await world.cluster.told.wait()

    assert slept[0] == slept_s
    assert ("Deployment", "chat") in world.cluster.objects


async def test_a_changed_service_does_not_wait_for_those_that_the_clock_wakes(world: World) -> None:
    for _ in range(AT_ONCE):
        await world.reconciler._turns.places.acquire()  # that many are looked at, and none of them ends
    waiting, changed = world.service(), world.service()
    changed.news.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.look(waiting), timeout=0.05)
    assert world.cluster.writes == []
    async with asyncio.timeout(10):
        assert "apply Deployment/chat" in await world.look(changed)


async def test_one_that_is_changed_or_made_while_others_are_looked_at_does_not_wait_for_them(world: World) -> None:
    for _ in range(AT_ONCE):
        await world.reconciler._turns.places.acquire()
    world.reconciler.see(scene.body())
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.cluster.writes == [], "it waits in the line"

    world.reconciler.see(scene.body(generation=2))
    async with asyncio.timeout(10):
        await world.cluster.told.wait()
    world.cluster.told.clear()
    await world.reconciler.resync(listed(scene.body(generation=2)))
    world.reconciler.see(scene.body(name="new", uid="new"))
    async with asyncio.timeout(10):
        await world.cluster.told.wait()

    assert {("Deployment", "chat"), ("Deployment", "new")} <= world.cluster.objects.keys()
    assert world.reconciler._turns.places._value == 0, "who went past the line gave nothing back"


async def test_a_wait_in_the_line_is_no_part_of_a_look(world: World) -> None:
    for _ in range(AT_ONCE):
        await world.reconciler._turns.places.acquire()
    looking = asyncio.create_task(world.look(world.service()))
    await asyncio.sleep(0)

    world.time_s += 100
    world.reconciler._turns.places.release()
    await looking

    assert world.count("sluice_operator_reconcile_seconds_sum") == 0
    assert world.reconciler._turns.places._value == 1


@pytest.mark.parametrize(
    "news",
    [
        pytest.param(lambda world: world.reconciler.see(scene.body(generation=2)), id="a corrected spec"),
        pytest.param(lambda world: world.reconciler.touch_all(), id="an API server that lists again"),
    ],
)
async def test_the_pause_after_a_failure_is_ended_by(
    world: World, monkeypatch: pytest.MonkeyPatch, news: Callable[[World], None]
) -> None:
    monkeypatch.setattr("sluice_operator.reconcile.reconciler._BACKOFF_S", (3600,))
    failed = asyncio.Event()
    real = world.reconciler._pause

    async def pause(service: Service, wait_s: float) -> None:
        failed.set()
        await real(service, wait_s)

    monkeypatch.setattr(world.reconciler, "_pause", pause)
    world.cluster.unexpected = [TimeoutError()]
    world.reconciler.see(scene.body())
    async with asyncio.timeout(10):
        await failed.wait()

        news(world)
        await world.cluster.told.wait()

    assert ("Deployment", "chat") in world.cluster.objects


async def test_nothing_is_told_of_a_spec_that_was_not_looked_at_yet(world: World) -> None:
    service = world.service()
    service.wake.clear()

    await world.reconciler.look(service)

    assert world.cluster.writes == []


async def test_the_kubelet_is_asked_after_a_pod_that_says_too_little(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    world.cluster.pods, world.gates.known = [scene.pod(ready=False, engine=waiting)], {}
    world.cluster.told_of = {"chat-new-1": [{"reason": "FailedMount", "message": 'secret "k" not found'}]}

    await world.look(service)
    assert world.cluster.statuses[-1]["failure"]["reason"] == "SecretMissing"

    await world.look(service)
    assert world.cluster.asked == [["chat-new-1"]], "not at every look"

    world.time_s += 5
    world.cluster.refuse["PodEvents"] = ApiRefused(403, "Forbidden", "no")
    await world.look(service)
    assert "failure" not in world.cluster.statuses[-1]
    assert world.cluster.asked == [["chat-new-1"]] * 2


async def test_a_namespace_that_ends_is_left_in_peace(world: World) -> None:
    world.cluster.refuse["ServiceAccount"] = NamespaceEnds(403, "Forbidden", "it is being terminated")

    with pytest.raises(NamespaceEnds):
        await world.look(world.service())

    assert world.cluster.writes == []


async def test_an_event_that_cannot_be_posted_stops_nothing(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()
    world.cluster.refuse["Event"] = ApiRefused(403, "Forbidden", "no")

    assert await world.look(service) == ["status"]
    assert await world.look(service) == []


async def test_a_spec_that_cannot_be_understood_changes_nothing(world: World) -> None:
    service = world.service()
    await world.look(service)
    service.body = scene.body(generation=2)
    del service.body["spec"]["slo"]

    written = await world.look(service)

    assert written == ["status", "event"]
    assert world.cluster.statuses[-1]["failure"]["reason"] == "InvalidSpec"


async def test_a_value_that_only_a_newer_version_allows_is_named_in_the_status(world: World) -> None:
    service = world.service()
    service.body["spec"]["accelerator"]["count"] = 9

    assert await world.look(service) == ["status", "event"]
    failure = world.cluster.statuses[-1]["failure"]
    assert failure["reason"] == "InvalidSpec"
    assert "accelerator_count: must be 0 (CPU) to 8, not 9" in failure["message"]


@pytest.mark.parametrize("kind", ["Deployment", "Service", "ConfigMap"])
async def test_an_object_of_somebody_else_is_left_alone_and_named(world: World, kind: str) -> None:
    name = {"ConfigMap": "chat-live"}.get(kind, "chat")
    theirs = {"kind": kind, "metadata": {"name": name, "uid": "theirs", "resourceVersion": "1"}, "spec": {"theirs": 1}}
    world.cluster.objects[kind, name] = copy.deepcopy(theirs)
    service = world.service()

    await world.look(service)

    assert world.cluster.objects[kind, name] == theirs
    failure = world.cluster.statuses[-1]["failure"]
    assert failure["reason"] == "NameTaken"
    assert f"{kind} {name} exists and belongs to something else" in failure["message"]
    del world.cluster.objects[kind, name]
    await world.look(service)
    assert "failure" not in world.cluster.statuses[-1]


async def test_unicode_arrives_as_it_was_written(world: World) -> None:
    name = "größe-模型-🦙"
    service = world.service(scene.body({"model": {"servedName": name, **scene.MINIMAL_SPEC["model"]}}))

    await world.look(service)

    assert world.cluster.statuses[-1]["model"] == name
    config = [
        item
        for (kind, _), item in world.cluster.objects.items()
        if kind == "ConfigMap" and "config" in item["metadata"]["name"]
    ]
    assert json.loads(config[0]["data"]["engine.json"])["model"]["served_name"] == name


async def test_a_resource_on_its_way_out_is_not_touched(world: World) -> None:
    body = scene.body()
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert await world.look(world.service(body)) == []


async def test_events_wake_the_service_that_they_belong_to(world: World) -> None:
    world.reconciler.see(scene.body())
    service = world.reconciler._services["llm", "chat"]
    service.wake.clear()

    world.reconciler.touch("llm", "another")
    assert not service.wake.is_set()
    world.reconciler.touch("llm", "chat")
    assert service.wake.is_set()


async def test_our_own_status_write_wakes_nobody_and_a_new_generation_does(world: World) -> None:
    world.reconciler.see(scene.body())
    service = world.reconciler._services["llm", "chat"]
    service.wake.clear()

    world.reconciler.see({**scene.body(), "status": {"replicas": 1}})
    assert not service.wake.is_set()
    world.reconciler.see(scene.body(generation=2))
    assert service.wake.is_set()


async def test_a_recreated_resource_starts_afresh(world: World) -> None:
    world.reconciler.see(scene.body())
    first = world.reconciler._services["llm", "chat"]

    world.reconciler.see(scene.body(uid="another"))

    assert world.reconciler._services["llm", "chat"] is not first
    assert world.count("sluice_operator_services") == 1


async def test_a_resync_forgets_what_is_gone_and_suspects_a_watch_that_brought_too_little(world: World) -> None:
    world.reconciler.see(scene.body())
    world.reconciler.see(scene.body(name="gone", uid="gone"))

    await world.reconciler.resync(listed(scene.body()))
    assert set(world.reconciler._services) == {("llm", "chat")}
    assert not world.reconciler.is_watch_suspect

    await world.reconciler.resync(listed(scene.body(generation=2)))
    assert world.reconciler.is_watch_suspect


async def test_what_the_watch_told_while_a_list_was_on_its_way_is_newer(world: World) -> None:
    world.reconciler.see(scene.body())
    world.reconciler.see(scene.body(name="gone", uid="gone"))

    async def older() -> list[Json]:
        world.reconciler.see(scene.body(generation=2))
        world.reconciler.see(scene.body(name="new", uid="new"))
        world.reconciler.forget("llm", "gone")
        return [scene.body(), scene.body(name="gone", uid="gone")]

    await world.reconciler.resync(older())

    assert set(world.reconciler._services) == {("llm", "chat"), ("llm", "new")}
    assert world.reconciler._services["llm", "chat"].body["metadata"]["generation"] == 2
    assert not world.reconciler.is_watch_suspect


async def test_services_that_are_not_ready_are_counted_as_they_are_now(world: World) -> None:
    # As after a restart of the operator: the resource has a status, and nothing about it changes.
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    world.reconciler.see({**scene.body(), "status": {}})
    world.reconciler.see({**scene.body(name="well", uid="well"), "status": ready})
    assert world.count("sluice_operator_services_not_ready") == 1

    world.reconciler.forget("llm", "chat")
    assert world.count("sluice_operator_services_not_ready") == 0


async def test_a_task_a_service_carries_all_this_out(world: World) -> None:
    world.reconciler.see(scene.body())

    async with asyncio.timeout(10):
        await world.cluster.told.wait()

    assert ("Deployment", "chat") in world.cluster.objects
    world.reconciler.forget("llm", "chat")
    assert world.count("sluice_operator_services") == 0


async def test_an_object_of_an_optional_kind_comes_with_its_definition(world: World) -> None:
    service = world.service()
    await world.look(service)
    assert ("PodMonitor", "chat") not in world.cluster.objects

    world.reconciler.discovered("PodMonitor", is_served=True)

    assert await world.look(service) == ["apply PodMonitor/chat", "status"]
    assert await world.look(service) == []


async def test_a_definition_that_goes_takes_its_objects_and_stops_nothing(world: World) -> None:
    service = world.service()
    world.reconciler.discovered("PodMonitor", is_served=True)
    await world.look(service)
    del world.cluster.objects["PodMonitor", "chat"]
    world.cluster.refuse["PodMonitor"] = ApiRefused(404, "NotFound", "the server could not find the resource")

    world.cluster.drift(("Service", "chat"))
    written = await world.look(service)

    assert written == ["apply Service/chat", "status"]
    assert condition(world.cluster.statuses[-1], "MonitoringReady")["reason"] == "PodMonitorMissing"
    assert world.reconciler.kinds == frozenset()
    assert "failure" not in world.cluster.statuses[-1]


async def test_a_change_of_definitions_wakes_every_service(world: World) -> None:
    world.reconciler.see(scene.body())
    service = world.reconciler._services["llm", "chat"]
    service.wake.clear()

    world.reconciler.discovered("ScaledObject", is_served=False)
    assert not service.wake.is_set(), "nothing changed"
    world.reconciler.discovered("ScaledObject", is_served=True)
    assert service.wake.is_set()


async def test_a_pod_that_flaps_makes_one_event_a_reason_and_a_quiet_minute_none(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()
    killed = {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    for _ in range(10):
        world.cluster.pods = [scene.pod()]
        await world.look(service)
        world.cluster.pods = [scene.pod(ready=False, engine=killed)]
        await world.look(service)
    told = dict(world.cluster.series)

    for _ in range(12):
        world.time_s += 5
        await world.reconciler.look(service)

    assert {(kind, reason): count for (kind, reason, _), count in told.items()} == {
        ("Normal", "Ready"): 10,
        ("Warning", "EngineKilled"): 10,
    }
    assert world.cluster.series == told


FAILING = {
    "conditions": [{"type": "Ready", "status": "False", "reason": "X", "message": "m"}],
    "failure": {"reason": "X", "message": "m"},
}
READY = {"conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "all"}]}
MISSED, KEPT = (
    {"conditions": [*READY["conditions"], {"type": "SLOMet", "status": holds, "reason": reason, "message": text}]}
    for holds, reason, text in (("False", "PromiseMissed", "98 %"), ("True", "PromiseKept", "99 %"))
)
SLOW = {"conditions": [{"type": "Ready", "status": "False", "reason": "PromiseInfeasible", "message": "no"}]}
ROLLING = {"conditions": [{"type": "Ready", "status": "False", "reason": "RollingOut", "message": "one"}]}

INFEASIBLE = {
    "conditions": [
        *SLOW["conditions"], {"type": "SLOFeasible", "status": "False", "reason": "PromiseInfeasible", "message": "no"},
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "events"),
    [
        pytest.param({}, READY, [("Normal", "Ready", "all")], id="ready for the first time"),
        pytest.param(READY, READY, [], id="still ready"),
        pytest.param(READY, FAILING, [("Warning", "X", "m")], id="a failure is told once, not twice"),
        pytest.param(FAILING, FAILING, [], id="the same failure"),
        pytest.param(READY, SLOW, [("Warning", "PromiseInfeasible", "no")], id="not ready without a failure"),
        pytest.param(
            READY, ROLLING, [("Normal", "RollingOut", "one")], id="a roll that somebody asked for is no warning"
        ),
        pytest.param({}, SLOW, [], id="not ready yet"),
        pytest.param({}, INFEASIBLE, [("Warning", "PromiseInfeasible", "no")], id="infeasible from the beginning"),
        pytest.param(READY, INFEASIBLE, [("Warning", "PromiseInfeasible", "no")], id="infeasible is told once"),
        pytest.param(READY, MISSED, [("Warning", "PromiseMissed", "98 %")], id="the promise is missed"),
        pytest.param(MISSED, MISSED, [], id="still missed"),
        pytest.param(MISSED, KEPT, [("Normal", "PromiseKept", "99 %")], id="kept again"),
        pytest.param(READY, KEPT, [], id="kept from the beginning"),
    ],
)
def test_a_transition_is_worth_an_event(old: Json, new: Json, events: list[tuple[str, str, str]]) -> None:
    assert transitions(old, new) == events


async def test_whether_a_service_serves_and_is_settled_is_a_series_for_as_long_as_it_exists(world: World) -> None:
    one = {"namespace": "llm", "inferenceservice": "chat"}
    service = world.service()
    await world.look(service)
    seen = [world.count(f"sluice_operator_service_{word}", **one) for word in ("available", "settled")]

    world.serve()
    await world.look(service)
    then = [world.count(f"sluice_operator_service_{word}", **one) for word in ("available", "settled")]
    assert world.count("sluice_operator_service_ready_replicas", **one) == 1
    world.reconciler.forget("llm", "chat")

    assert (seen, then) == ([0, 0], [1, 1])
    assert world.registry.get_sample_value("sluice_operator_service_ready_replicas", one) is None
    assert world.registry.get_sample_value("sluice_operator_service_available", one) is None
    assert world.registry.get_sample_value("sluice_operator_service_settled", one) is None


async def test_a_service_that_nobody_wants_to_serve_is_not_said_to_be_down(world: World) -> None:
    service = world.service(scene.body({"replicas": 0}))

    await world.look(service)

    assert world.count("sluice_operator_service_available", namespace="llm", inferenceservice="chat") == 1


async def test_a_roll_without_room_goes_on_in_place_after_a_minute_though_nothing_happens(world: World) -> None:
    service = world.service()
    await world.look(service)
    world.serve()
    deployment = world.cluster.objects["Deployment", "chat"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    stuck = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient gpu"}
    stuck["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    world.cluster.replica_sets = [scene.replica_set("old", 1), scene.replica_set("new", 2)]
    world.cluster.pods = [
        scene.pod("chat-old-1", revision="old"),
        scene.pod("chat-new-1", ready=False, phase="Pending", conditions=[stuck]),
    ]
    await world.look(service)

    world.time_s += 59
    assert "apply Deployment/chat" not in await world.look(service, woken=False)
    world.time_s += 2
    assert "apply Deployment/chat" in await world.look(service, woken=False)

    rolling = world.cluster.objects["Deployment", "chat"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 0, "maxUnavailable": 1}


async def test_a_service_at_rest_holds_its_spec_once_and_as_text_and_is_looked_at_as_before(world: World) -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "team": "a"}
    body = scene.body({"slo": {"timeToFirstToken": "3s"}})
    world.reconciler.see({**body, "metadata": {**body["metadata"], "annotations": annotations}})
    async with asyncio.timeout(10):
        await world.cluster.told.wait()
    service = world.reconciler._services["llm", "chat"]
    await world.look(service)

    assert (service.spec, "spec" in service.body) == (None, False)
    assert service.body["metadata"]["annotations"] == {"team": "a"}
    assert service.whole()["spec"] == body["spec"]
    world.cluster.drift(("Deployment", "chat"))
    assert await world.look(service) == ["apply Deployment/chat"]

    world.serve()
    await world.look(service)
    assert service.spec is not None, "its pods are told of at every poll"
