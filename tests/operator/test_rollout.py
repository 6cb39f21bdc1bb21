"""Which way pods are replaced: beside the old ones, or in place once there has been no room for a while."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import operator_scene as scene
from sluice_operator.plan import Observed
from sluice_operator.rendering.rollout import PATIENCE_S, Way, way

T0, T59, T60, T90 = (f"2026-01-01T00:0{minute}Z" for minute in ("0:00", "0:59", "1:00", "1:30"))
NO_ROOM = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node affinity/selector. "
    "no new claims to deallocate, preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, "
    "1 Preemption is not helpful for scheduling."
)
NO_NODE = (
    "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
)
SURGE, IN_PLACE = Way(strategy="Surge"), Way(strategy="InPlace")
CRASHED = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}


def pending(message: str = NO_ROOM, *, since: str = T0, **more: Any) -> scene.Json:
    """A new pod that no node takes."""
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    conditions = [{**told, "lastTransitionTime": since}]
    return scene.pod("chat-new-1", ready=False, phase="Pending", conditions=conditions, **more)


def old(name: str = "chat-old-1", **more: Any) -> scene.Json:
    return scene.pod(name, revision="old", **more)


def going(surge: int, **more: Any) -> scene.Json:
    """Our Deployment, with the way that it goes."""
    deployment = scene.deployment(**more)
    deployment["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge}}
    return deployment


def short_of_quota() -> Observed:
    refused = scene.replica_set("new", 2)
    message = 'pods "chat-new-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1'
    told = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    refused["status"] = {"conditions": [{**told, "lastTransitionTime": T0}]}
    return scene.observed(old(), of=going(1), replica_sets=(scene.replica_set("old", 1), refused))


def decide(seen: Observed, strategy: str = "Auto", *, now: str = T90, quiet_s: float = 1e9) -> Way:
    return way(strategy, seen, now=now, quiet_s=quiet_s)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(Observed(), SURGE, id="nothing is there yet"),
        pytest.param(scene.observed(old(), of=going(1)), SURGE, id="a roll that has just begun"),
        pytest.param(scene.observed(scene.pod(), of=going(1)), SURGE, id="nothing to roll"),
        pytest.param(scene.observed(pending(), of=going(1)), SURGE, id="no room, and no old pod that could make some"),
        pytest.param(scene.observed(old(), pending(), of=going(1)), IN_PLACE, id="no room for a minute and a half"),
        pytest.param(scene.observed(old(), pending(NO_NODE), of=going(1)), SURGE, id="no node would take it anyway"),
        pytest.param(
            scene.observed(old(), pending("0/1 nodes are available: 1 Too many pods."), of=going(1)),
            IN_PLACE,
            id="a scheduler that says nothing of evictions",
        ),
        pytest.param(short_of_quota(), IN_PLACE, id="no quota for a pod beside the old one"),
        pytest.param(
            scene.observed(old(), pending(deleting=True), of=going(1)),
            SURGE,
            id="the pod without room leaves",
        ),
        pytest.param(
            scene.observed(old(), scene.pod(ready=False), of=going(0)), IN_PLACE, id="in place it goes on to the end"
        ),
        pytest.param(
            scene.observed(old(deleting=True), scene.pod(), of=going(0)), IN_PLACE, id="the last old pod drains"
        ),
        pytest.param(scene.observed(scene.pod(), of=going(0)), SURGE, id="the next roll begins anew"),
        pytest.param(
            scene.observed(old(), pending(), of=going(0, generation=2, observed=1)),
            IN_PLACE,
            id="before the newest template is seen the way is kept",
        ),
        pytest.param(
            scene.observed(old(), pending(), of=going(1, generation=2, observed=1)), SURGE, id="so is the other way"
        ),
    ],
)
def test_auto_goes(seen: Observed, expected: Way) -> None:
    assert decide(seen) == expected


@pytest.mark.parametrize(
    ("now", "quiet_s", "expected"),
    [
        pytest.param(T59, 1e9, Way(strategy="Surge", recheck_s=1), id="a second before a minute is over"),
        pytest.param(T60, 1e9, IN_PLACE, id="after a minute"),
        pytest.param(T90, 20, Way(strategy="Surge", recheck_s=40), id="an old pod ended its streams 20 s ago"),
        pytest.param(T90, 0, Way(strategy="Surge", recheck_s=60), id="an old pod still ends its streams"),
        pytest.param(T90, 60, IN_PLACE, id="what it held has been free for a minute"),
    ],
)
def test_auto_waits_a_minute_for_room(now: str, quiet_s: float, expected: Way) -> None:
    assert decide(scene.observed(old(), pending(), of=going(1)), now=now, quiet_s=quiet_s) == expected


@pytest.mark.parametrize("strategy", ["Auto", "Surge"])
def test_an_old_pod_that_does_not_serve_is_not_waited_for(strategy: str) -> None:
    broken = old("chat-old-2", ready=False, engine=CRASHED)

    assert decide(scene.observed(old(), broken, pending(), of=going(1)), strategy, now=T0, quiet_s=0) == IN_PLACE


def test_an_old_pod_that_still_loads_is_waited_for() -> None:
    loads = old(ready=False)

    assert decide(scene.observed(loads, pending(), of=going(1)), now=T0).strategy == "Surge"


def test_a_surge_stays_a_surge_and_in_place_stays_in_place() -> None:
    stuck = scene.observed(old(), pending(), of=going(1))

    assert decide(stuck, "Surge") == SURGE
    assert decide(scene.observed(old(), scene.pod(), of=going(1)), "InPlace") == IN_PLACE


@given(
    stuck=st.booleans(),
    surge=st.integers(0, 1),
    olds=st.integers(0, 3),
    quiet_s=st.floats(0, 200),
    now=st.sampled_from([T0, T59, T60, T90]),
)
def test_a_serving_pod_is_given_up_only_where_that_makes_room(  # each is one thing that may be seen
    *, stuck: bool, surge: int, olds: int, quiet_s: float, now: str
) -> None:
    pods = [old(f"chat-old-{number}") for number in range(olds)] + [pending() if stuck else scene.pod()]

    decided = decide(scene.observed(*pods, of=going(surge)), now=now, quiet_s=quiet_s)

    if decided.strategy == "InPlace" and surge == 1:
        assert stuck
        assert olds
        assert quiet_s >= PATIENCE_S
        assert now in {T60, T90}
    if decided.recheck_s is not None:
        assert 0 < decided.recheck_s <= PATIENCE_S, "it is looked at again, and soon"
