"""What KEDA is told, the floor under replicas while pods load, and what the condition says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import operator_scene as scene
from sluice_operator.plan import Observed
from sluice_operator.rendering.autoscale import floored
from sluice_operator.rendering.render import objects
from sluice_operator.rendering.surroundings import Surroundings
from sluice_operator.resource.spec import Autoscaling
from sluice_operator.status.conditions.around import autoscaling

PAGE = (Path(__file__).resolve().parents[2] / "docs/autoscaling.md").read_text()
WANTED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 6}}
LOADS = scene.pod("chat-new-2", ready=False)
STUCK = scene.pod(
    "chat-new-3",
    ready=False,
    phase="Pending",
    conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}],
)


def scaled(surroundings: Surroundings = scene.EVERYTHING, changes: scene.Json = WANTED) -> list[scene.Json]:
    made = objects(scene.spec(changes), scene.IMAGES, surroundings=surroundings)
    return [one for one in made if one["kind"] == "ScaledObject"]


def test_the_hpa_of_the_docs_asks_what_keda_asks() -> None:
    (made,) = scaled()
    (rules,) = (
        yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "metricsQuery" in one
    )

    (rule,) = rules["rules"]["external"]
    asked = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="llm",inferenceservice="chat"').split()

    (tokens,) = (one for one in made["spec"]["triggers"] if one["name"] == "tokens")
    assert asked == tokens["metadata"]["query"].split()


def test_the_page_tells_how_full_a_pod_is_meant_to_be() -> None:
    (made,) = scaled()
    (share,) = {trigger["metadata"]["threshold"] for trigger in made["spec"]["triggers"]}
    table = dict(re.findall(r"^\| (work asked for|pods)[^|]*\|(.*)\|$", PAGE, re.MULTILINE))
    asked, pods = (table[row].split("|") for row in ("work asked for", "pods"))

    assert f"the `threshold` {share}:" in PAGE
    assert f"averageValue: {float(share) * 1000:.0f}m" in PAGE
    assert [int(one) for one in pods] == [math.ceil(float(one) / float(share)) for one in asked]


def test_the_resource_is_what_is_scaled() -> None:
    (made,) = scaled()

    assert made["spec"]["scaleTargetRef"] == {
        "apiVersion": "sluice.dev/v1alpha1", "kind": "InferenceService", "name": "chat",
    }  # fmt: skip
    assert (made["spec"]["minReplicaCount"], made["spec"]["maxReplicaCount"]) == (1, 6)
    for trigger in made["spec"]["triggers"]:
        assert 'namespace="llm",inferenceservice="chat"' in trigger["metadata"]["query"]
        assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes nothing else"


@pytest.mark.parametrize(
    ("surroundings", "changes"),
    [
        pytest.param(scene.EVERYTHING, {}, id="it is not asked for"),
        pytest.param(Surroundings(prometheus_url="http://p:9090"), WANTED, id="the cluster has no such kind"),
        pytest.param(Surroundings(kinds=frozenset({"ScaledObject"})), WANTED, id="no Prometheus is known"),
    ],
)
def test_none_is_made_where(surroundings: Surroundings, changes: scene.Json) -> None:
    assert scaled(surroundings, changes) == []


@pytest.mark.parametrize(
    ("pods", "replicas", "least"),
    [
        pytest.param([scene.pod()], 4, 1, id="all that run serve"),
        pytest.param([scene.pod(), LOADS], 4, 4, id="one loads"),
        pytest.param([scene.pod(), LOADS], 9, 6, id="one loads, and more were asked for than are allowed"),
        pytest.param([scene.pod(), LOADS], 0, 1, id="one loads, and none were asked for"),
        pytest.param([scene.pod(), STUCK], 4, 1, id="one finds no room: it may never load"),
        pytest.param([scene.pod(), scene.pod("o", revision="old", ready=False)], 4, 1, id="an old one is not ready"),
        pytest.param([scene.pod(), scene.pod("d", ready=False, deleting=True)], 4, 1, id="one is on its way out"),
        pytest.param([], 4, 1, id="there are none"),
    ],
)
def test_while_pods_load_none_is_taken_away(pods: list[scene.Json], replicas: int, least: int) -> None:
    bounds = floored(scene.spec({**WANTED, "replicas": replicas}), scene.observed(*pods))

    assert bounds == Autoscaling(min_replicas=least, max_replicas=6)


@given(least=st.integers(1, 10), more=st.integers(0, 10), replicas=st.integers(0, 30), loads=st.booleans())
def test_the_floor_stays_within_the_bounds(*, least: int, more: int, replicas: int, loads: bool) -> None:
    wanted = {"autoscaling": {"minReplicas": least, "maxReplicas": least + more}, "replicas": replicas}

    bounds = floored(scene.spec(wanted), scene.observed(LOADS if loads else scene.pod()))

    assert bounds is not None
    assert least <= bounds.min_replicas <= bounds.max_replicas == least + more


def test_without_an_autoscaler_there_is_no_floor() -> None:
    assert floored(scene.spec(), Observed()) is None


def told(**conditions: str) -> scene.Json:
    listed = [{"type": kind, "status": value, "message": f"{kind} is {value}"} for kind, value in conditions.items()]
    return {"status": {"conditions": listed}}


@pytest.mark.parametrize(
    ("kinds", "seen", "expected"),
    [
        pytest.param(set(), None, "False/ScaledObjectMissing", id="no KEDA"),
        pytest.param({"ScaledObject"}, None, "False/PrometheusUnknown", id="no Prometheus"),
        pytest.param({"ScaledObject"}, {}, "Unknown/NotObserved", id="KEDA has not looked yet"),
        pytest.param({"ScaledObject"}, told(Ready="False"), "False/ScalerFailing", id="KEDA refuses it"),
        pytest.param(
            {"ScaledObject"}, told(Ready="True", Fallback="True"), "False/DemandUnknown", id="Prometheus is silent"
        ),
        pytest.param({"ScaledObject"}, told(Ready="True", Fallback="False"), "True/Scaling", id="all is well"),
    ],
)
def test_the_condition_says_whether_anything_scales(kinds: set[str], seen: Any, expected: str) -> None:
    claim = autoscaling(scene.spec(WANTED), kinds, seen)

    assert claim is not None
    assert f"{claim.status}/{claim.reason}" == expected


def test_there_is_no_condition_where_nothing_is_to_scale() -> None:
    assert autoscaling(scene.spec(), {"ScaledObject"}, None) is None
    assert autoscaling(None, {"ScaledObject"}, None) is None
