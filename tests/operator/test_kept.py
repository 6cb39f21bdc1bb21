"""An upgrade of the operator restarts none: pods run by the rendering that is kept for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import operator_scene as scene
from sluice_engine import codec
from sluice_engine.live_config import LiveConfig
from sluice_operator.config import Settings
from sluice_operator.metrics import Metrics
from sluice_operator.reconcile.reconciler import Reconciler
from sluice_operator.reconcile.service import Service
from sluice_operator.rendering import kept
from sluice_operator.rendering.pod_template import Images
from sluice_operator.rendering.render import objects

Json = dict[str, Any]
OLD = Settings(images=scene.IMAGES, release="0.1.0+old")
NEW = Settings(
    images=Images(engine="sluice/engine:next", gate="sluice/gate:next"),
    otlp_endpoint="http://collector:4318",
    release="0.2.0+new",
)
NEWER = Settings(images=Images(engine="sluice/engine:last", gate="sluice/gate:last"), release="0.3.0+last")


class Installation:
    """One cluster, and the operators that follow each other in it."""

    def __init__(self) -> None:
        self.cluster = scene.FakeCluster()
        self.body = scene.body()

    async def run(self, settings: Settings, spec: Mapping[str, Any] | None = None) -> Json:
        """An operator starts, looks at the service (with this spec), and ends; the status it wrote last."""
        if spec is not None:
            self.body = scene.body(spec, generation=self.body["metadata"]["generation"] + 1)
        reconciler = Reconciler(
            self.cluster, scene.FakeGates(), settings, Metrics(CollectorRegistry()),
            clock=lambda: 0.0, wall_clock=lambda: 0.0, now=lambda: "2026-01-01T00:00:00Z",
        )  # fmt: skip
        service = Service(body=self.body, status={})
        for _ in range(3):
            service.wake.set()
            self.cluster.writes.clear()
            await reconciler.look(service)
        assert self.cluster.writes == [], "the last look sends nothing"
        self.body["status"] = self.cluster.statuses[-1]
        return self.cluster.statuses[-1]

    @property
    def deployment(self) -> Json:
        return self.cluster.objects["Deployment", "chat"]

    @property
    def template(self) -> Json:
        found: Json = self.deployment["spec"]["template"]
        return found

    @property
    def images(self) -> list[str]:
        pod = self.template["spec"]
        return [one["image"] for one in (*pod["initContainers"], *pod["containers"])]

    def configs(self) -> dict[str, Json]:
        """What pods are started with, by name."""
        found = self.cluster.objects.items()
        return {name: item["data"] for (kind, name), item in found if kind == "ConfigMap" and name != "chat-live"}

    def live(self) -> Json:
        found: Json = json.loads(self.cluster.objects["ConfigMap", "chat-live"]["data"]["live.json"])
        return found

    def revisions(self) -> list[Json]:
        return [item for (kind, _), item in self.cluster.objects.items() if kind == "ControllerRevision"]

    def rewrite(self, **changes: Any) -> None:
        """The kept rendering as another release would have written it."""
        (revision,) = self.revisions()
        data = json.loads(revision["data"]["kept"])
        revision["data"]["kept"] = json.dumps({**data, **changes})


@pytest.fixture
def installation() -> Installation:
    return Installation()


async def test_an_upgrade_with_other_images_and_configuration_leaves_the_pods_as_they_are(
    installation: Installation,
) -> None:
    before = await installation.run(OLD)
    template, configs = copy.deepcopy(installation.template), installation.configs()
    assert before["runtime"] == {"version": "0.1.0+old"}

    status = await installation.run(NEW)

    assert installation.template == template
    assert installation.configs() == configs
    assert status["runtime"] == {"version": "0.1.0+old", "newer": "0.2.0+new"}


async def test_what_restarts_no_pod_restarts_none_after_an_upgrade(installation: Installation) -> None:
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)

    await installation.run(NEW, {"replicas": 3, "slo": {"interTokenLatency": "90ms"}})

    assert installation.template == template
    assert installation.live()["slo"]["inter_token_latency_us"] == 90_000
    assert installation.cluster.objects["Deployment", "chat"]["spec"]["replicas"] == 3


async def test_a_change_that_restarts_pods_takes_the_new_release_and_the_old_manifest_brings_back_the_old_pods(
    installation: Installation,
) -> None:
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)

    status = await installation.run(NEW, {"scheduling": {"maxSequences": 4}})
    assert installation.images == ["sluice/gate:next", "sluice/engine:next"]
    assert status["runtime"] == {"version": "0.2.0+new"}
    assert [one["revision"] for one in installation.revisions()] == [1, 2]

    status = await installation.run(NEW, {})
    assert installation.template == template
    assert status["runtime"] == {"version": "0.1.0+old", "newer": "0.2.0+new"}


async def test_the_new_release_is_taken_by_its_name(installation: Installation) -> None:
    await installation.run(OLD)
    status = await installation.run(NEW)

    status = await installation.run(NEW, {"runtime": {"version": status["runtime"]["newer"]}})
    assert installation.images == ["sluice/gate:next", "sluice/engine:next"]
    assert status["runtime"] == {"version": "0.2.0+new"}

    # It stays when the next one comes, whether it is still named or not.
    assert (await installation.run(NEWER))["runtime"] == {"version": "0.2.0+new", "newer": "0.3.0+last"}
    assert (await installation.run(NEWER, {}))["runtime"]["version"] == "0.2.0+new"
    assert installation.images == ["sluice/gate:next", "sluice/engine:next"]


@pytest.mark.parametrize("wanted", ["0.2.0", "0.2.0+new"])
async def test_a_release_may_be_named_with_or_without_its_settings(installation: Installation, wanted: str) -> None:
    await installation.run(OLD)

    status = await installation.run(NEW, {"runtime": {"version": wanted}})

    assert status["runtime"]["version"] == "0.2.0+new"


async def test_a_release_that_cannot_be_had_is_named_and_changes_nothing(installation: Installation) -> None:
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)

    status = await installation.run(NEW, {"runtime": {"version": "0.9.0"}})

    assert installation.template == template
    assert status["failure"]["reason"] == "InvalidSpec"
    assert (
        "spec.runtime.version: 0.9.0 is not kept for this spec, and this operator is 0.2.0+new"
        in (status["failure"]["message"])
    )


async def test_a_default_that_a_newer_definition_added_changes_nothing(installation: Installation) -> None:
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)
    older = copy.deepcopy(installation.body["spec"])
    del older["rollout"], older["cache"]["blockTokens"]
    installation.rewrite(spec=older)

    await installation.run(NEW)

    assert installation.template == template


@pytest.mark.parametrize("is_noted", [True, False], ids=["today's", "one of before"])
async def test_defaults_of_a_definition_that_comes_before_its_operator_change_nothing(
    installation: Installation, *, is_noted: bool
) -> None:
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)
    for part in [one for one in installation.body["spec"].values() if isinstance(one, dict)]:
        part["ofALaterDefinition"] = {"such": "as a default"}
    installation.body["spec"]["model"]["source"]["ofALaterDefinition"] = 1
    if not is_noted:
        del installation.deployment["metadata"]["annotations"]

    await installation.run(OLD)

    assert installation.template == template, "`helm upgrade` would roll each pod, before the new operator is there"
    assert len(installation.revisions()) == 1


# Each is the operator's to read, or goes into the pods word for word, and had no default.
FILLED_IN: list[Any] = [
    pytest.param("model", {"maxLengthTokens": 4096}, id="a-field-of-engine-json"),
    pytest.param("runtime", {"image": "sluice/engine:of-a-later-definition"}, id="the-image"),
    pytest.param("resources", {"limits": {"cpu": "1"}}, id="resources"),
    pytest.param("podTemplate", {"nodeSelector": {"of": "a later definition"}}, id="the-pod's-template"),
]


@pytest.mark.parametrize(("part", "fields"), FILLED_IN)
async def test_what_nobody_set_restarts_nothing_though_the_spec_reads_otherwise_than_before(
    installation: Installation, part: str, fields: Json
) -> None:
    before = await installation.run(OLD)
    deployment, configs = copy.deepcopy(installation.deployment), installation.configs()
    installation.body["spec"][part] |= fields  # the generation stays: no client wrote it

    for settings in (OLD, NEW, OLD):  # before the new operator is there, under it, and after going back
        status = await installation.run(settings)

        assert installation.template == deployment["spec"]["template"]
        assert installation.configs() == configs
        assert status["runtime"]["version"] == before["runtime"]["version"]
        assert status["runtime"]["newer"] == settings.release, "the next roll would bring what was filled in"
        assert len(installation.revisions()) == 1
    assert installation.deployment["metadata"]["annotations"] == deployment["metadata"]["annotations"]


@pytest.mark.parametrize(("part", "fields"), FILLED_IN)
async def test_the_same_fields_set_by_somebody_restart_pods(
    installation: Installation, part: str, fields: Json
) -> None:
    await installation.run(OLD)
    written = {**installation.body["spec"], part: {**installation.body["spec"][part], **fields}}

    status = await installation.run(NEW, written)

    assert status["runtime"] == {"version": "0.2.0+new"}
    assert installation.images[0] == "sluice/gate:next"


async def test_pods_that_another_operator_rolled_meanwhile_are_not_rolled_back(installation: Installation) -> None:
    await installation.run(OLD)
    # An operator of before takes what a definition fills in for a change, and notes nothing.
    installation.body["spec"]["model"]["maxLengthTokens"] = 4096
    del installation.deployment["metadata"]["annotations"]
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)
    del installation.deployment["metadata"]["annotations"]

    await installation.run(NEW)
    await installation.run(NEW)

    assert installation.template == template
    assert len(installation.revisions()) == 2, "the one from before is still there to go back to"


async def test_pods_that_were_adopted_stay_whatever_is_filled_in_later(installation: Installation) -> None:
    for item in objects(scene.spec(), scene.IMAGES):
        await installation.cluster.apply(item)
    installation.body["status"] = {"observedGeneration": 1}
    await installation.run(NEW)
    template = copy.deepcopy(installation.template)
    installation.body["spec"]["model"]["maxLengthTokens"] = 4096

    status = await installation.run(NEW)

    assert installation.template == template
    assert status["runtime"]["version"] == "unknown"


async def test_a_value_other_than_that_default_does(installation: Installation) -> None:
    await installation.run(OLD)
    older = copy.deepcopy(installation.body["spec"])
    del older["cache"]["blockTokens"]
    installation.rewrite(spec=older)

    await installation.run(NEW, {"cache": {"blockTokens": 32}})

    assert installation.images == ["sluice/gate:next", "sluice/engine:next"]


async def test_a_key_that_old_programs_do_not_know_never_reaches_them(installation: Installation) -> None:
    await installation.run(OLD)
    shape = kept.shape(LiveConfig)
    del shape["admission"]["retry_budget_percent"], shape["admission"]["tenants"][0]["weight"]
    installation.rewrite(liveShape=shape)

    status = await installation.run(NEW)
    assert "retry_budget_percent" not in installation.live()["admission"]
    assert "pods ignore" not in json.dumps(status), "a default that is left out changes nothing"

    tenants = [{"name": "a", "weight": 3, "tokensPerSecond": 5}]
    status = await installation.run(NEW, {"admission": {"retryBudgetPercent": 20, "tenants": tenants}})
    assert "retry_budget_percent" not in installation.live()["admission"]
    assert installation.live()["admission"]["tenants"] == [{"name": "a", "tokens_per_second": 5}]

    # Pods of that release say the hash of what they were given, and that is what is waited for.
    gates = scene.FakeGates()
    gates.known = {"chat-new-1": scene.gate_state(live_hash=codec.digest(installation.live()))}
    installation.cluster.replica_sets = [scene.replica_set("new", 1)]
    installation.cluster.pods = [scene.pod()]
    reconciler = Reconciler(
        installation.cluster, gates, NEW, Metrics(CollectorRegistry()),
        clock=lambda: 0.0, wall_clock=lambda: 0.0, now=lambda: "2026-01-01T00:00:00Z",
    )  # fmt: skip
    service = Service(body=installation.body, status={})
    service.wake.set()
    await reconciler.look(service)
    deployment = installation.cluster.objects["Deployment", "chat"]
    deployment["status"] = {"observedGeneration": deployment["metadata"]["generation"]}
    service.wake.set()
    await reconciler.look(service)
    progressing = next(one for one in installation.cluster.statuses[-1]["conditions"] if one["type"] == "Progressing")
    assert progressing["reason"] == "Settled"
    assert "set spec.runtime.version to 0.2.0+new to take it" in progressing["message"]
    assert "until then pods ignore admission.retry_budget_percent" in progressing["message"]


async def test_pods_of_an_operator_that_kept_nothing_are_adopted_as_they_are(installation: Installation) -> None:
    for item in objects(scene.spec(), scene.IMAGES):
        await installation.cluster.apply(item)
    # The API server fills in its own defaults; they are part of what runs.
    installation.template["spec"]["dnsPolicy"] = "ClusterFirst"
    installation.template["metadata"]["creationTimestamp"] = None
    template = copy.deepcopy(installation.template)
    del template["metadata"]["creationTimestamp"]
    installation.body["status"] = {"observedGeneration": 1}

    status = await installation.run(NEW)

    assert installation.template == template
    assert status["runtime"] == {"version": "unknown", "newer": "0.2.0+new"}


async def test_a_spec_that_nobody_had_carried_out_yet_is_rendered_anew(installation: Installation) -> None:
    for item in objects(scene.spec(), scene.IMAGES):
        await installation.cluster.apply(item)
    installation.body["status"] = {"observedGeneration": 1}

    await installation.run(NEW, {"scheduling": {"maxSequences": 4}})

    assert installation.images == ["sluice/gate:next", "sluice/engine:next"]


@pytest.mark.parametrize("data", [{}, {"kept": "no JSON"}, {"kept": "{}"}, {"kept": "[]"}])
async def test_a_revision_that_cannot_be_read_counts_as_none(installation: Installation, data: Json) -> None:
    await installation.run(OLD)
    template = copy.deepcopy(installation.template)
    (revision,) = installation.revisions()
    revision["data"] = data

    await installation.run(NEW)

    assert installation.template == template, "what runs is adopted"


async def test_as_many_old_renderings_stay_as_the_deployment_keeps(installation: Installation) -> None:
    for sequences in range(1, 7):
        await installation.run(OLD, {"scheduling": {"maxSequences": sequences}})

    assert [one["revision"] for one in installation.revisions()] == [4, 5, 6]


def test_the_shape_of_a_configuration_is_that_of_what_is_written() -> None:
    live = scene.spec(
        {"admission": {"tenants": [{"name": "a"}], "classes": [{"name": "batch", "ceilingPercent": 50}]}}
    ).live
    document = codec.encode(live)

    assert list(kept.unknown_part(document, kept.shape(LiveConfig))) == []
    assert kept.known_part(document, kept.shape(LiveConfig)) == document
