"""Kill -9 of every part in turn, under load: no promised stream is lost, and the status is soon true again."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.service.load import MODEL, Load
from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.truth import Truth
from cluster.testnode import processes
from cluster.testnode.cluster import Cluster, Object

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from rollout import paced_space  # found through the path above

pytestmark = [pytest.mark.cluster, pytest.mark.full]

NAME = "chaos"
TRUE_WITHIN_S = 30.0
HANGS_S = 20.0
# Not timed: two busy cores start containers, and the kubelet lets one wait that ended twice.
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def served(release: Release) -> Iterator[Space]:
    """Two pods of the real gate before an engine that computes nothing, for all tests of this file."""
    with release.node.namespace(NAME) as namespace:
        space = paced_space(release.node, namespace)
        service = space.tiny(NAME, replicas=2, rollout={"drainTimeout": "30s"})
        service["spec"]["model"]["servedName"] = MODEL
        space.serve(service)
        yield space


@pytest.fixture
def space(served: Space) -> Space:
    """The service with its two pods and no other."""
    served.kubectl("scale", KIND, NAME, "--replicas=2")
    served.node.wait_for("two pods and no other", lambda: len(served.pods(NAME)) == 2, timeout_s=PATIENCE_S)
    served.wait(NAME, "condition=Ready")
    return served


Strike = Callable[[Cluster], Awaitable[None]]
"""Something is done to a part; returns when the part does its work again."""


def killed(process: Callable[[Cluster], int], answers: Callable[[Cluster], object]) -> Strike:
    """Kill -9, and somebody else starts another in its place."""

    async def strike(node: Cluster) -> None:
        victim, since = process(node), dt.datetime.now(dt.UTC)
        processes.kill(victim)
        await asyncio.to_thread(
            node.wait_for, "another in its place", lambda: process(node) != victim and answers(node)
        )
        node.without_rights.append(("", since, dt.datetime.now(dt.UTC)))

    return strike


def of_node(program: str) -> Callable[[Cluster], int]:
    return lambda _: processes.of_node(program)


async def api_server_hangs(node: Cluster) -> None:
    """It takes connections and answers nothing, for longer than a Lease lasts."""
    process = processes.of_node("kube-apiserver")
    os.kill(process, signal.SIGSTOP)
    try:
        await asyncio.sleep(HANGS_S)
    finally:
        os.kill(process, signal.SIGCONT)
    await asyncio.to_thread(node.wait_for, "its answer", lambda: api_answers(node))


def operator_process(node: Cluster) -> int:
    return processes.of_pod(operator_pod(node)["metadata"]["uid"], "sluice_operator")


def operator_pod(node: Cluster) -> Object:
    (pod,) = node.list("pods", selector="app.kubernetes.io/part-of=sluice,app.kubernetes.io/name=sluice-operator")
    return pod


def operator_restarts(node: Cluster) -> int:
    (container,) = operator_pod(node)["status"]["containerStatuses"]
    count: int = container["restartCount"]
    return count


def api_answers(node: Cluster) -> bool:
    return node.kubectl("get", "--raw", "/readyz", timeout_s=5).strip() == "ok"


def kubelet_answers(_: Cluster) -> bool:
    try:
        with urllib.request.urlopen("http://127.0.0.1:10248/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def containers(space: Space) -> dict[str, int]:
    """By pod and container: how often it was started again."""
    told = {}
    for pod in space.pods(NAME):
        for one in (*pod["status"]["initContainerStatuses"], *pod["status"]["containerStatuses"]):
            told[f"{pod['metadata']['uid']}/{one['name']}"] = one["restartCount"]
    return told


@pytest.mark.parametrize(
    ("strike", "operators"),
    [
        pytest.param(killed(operator_process, lambda _: True), 1, id="the operator is killed"),
        pytest.param(killed(of_node("kubelet"), kubelet_answers), 0, id="the kubelet is killed"),
        pytest.param(killed(of_node("kube-apiserver"), api_answers), 0, id="the API server is killed"),
        pytest.param(killed(of_node("etcd"), api_answers), 0, id="etcd is killed"),
        pytest.param(api_server_hangs, 0, id="the API server hangs for longer than a Lease lasts"),
    ],
)
async def test_no_stream_notices_and_the_next_change_is_told_truly_when(
    space: Space, strike: Strike, operators: int
) -> None:
    node, before, restarts = space.node, containers(space), operator_restarts(space.node)
    load, truth = Load(space.url(NAME)), Truth(space, NAME)
    async with load.by(8), truth.watched():
        struck_s = time.monotonic()
        await strike(node)
        back_s = time.monotonic()
        # A change that all parts are needed for: operator, controllers, scheduler, kubelet.
        await asyncio.to_thread(node.wait_for, "it to be scaled", lambda: scaled(space, 3))
        settled_s = await truth.settled(time.monotonic(), PATIENCE_S)

    report(load, truth, struck_s, back_s, settled_s)
    assert (load.silent, load.failed, load.errors, load.cut) == ([], [], {}, 0)
    assert load.unanswered == 0
    assert load.whole >= 8
    assert {name: count for name, count in containers(space).items() if name in before} == before
    assert operator_restarts(node) == restarts + operators, "no kubelet makes an operator wait that only lost its Lease"
    assert_true_in_time(truth, back_s)


@pytest.mark.parametrize(
    ("program", "container"),
    [
        pytest.param("sluice_engine", "engine", id="an engine is killed"),
        pytest.param("sluice_sidecar", "gate", id="a gate is killed"),
    ],
)
async def test_the_other_pod_goes_on_and_every_client_is_told_and_served_when(
    space: Space, program: str, container: str
) -> None:
    hit, spared = space.pods(NAME)
    everybody = Load(space.url(NAME))
    loads = {"service": everybody, "hit": Load(address(hit)), "spared": Load(address(spared))}
    truth, before = Truth(space, NAME), containers(space)
    async with everybody.by(6), loads["hit"].by(3), loads["spared"].by(3), truth.watched():
        killed_s = time.monotonic()
        processes.kill(processes.of_pod(hit["metadata"]["uid"], program))
        again = f"{hit['metadata']['uid']}/{container}"
        await asyncio.to_thread(
            space.node.wait_for, "it to start again", lambda: containers(space)[again] == before[again] + 1
        )
        settled_s = await truth.settled(time.monotonic(), PATIENCE_S)

    for load in loads.values():
        report(load, truth, killed_s, killed_s, settled_s)
    # Never a silent end: an error event where a gate is left to send one, a broken connection where none is.
    assert [(load.silent, load.failed) for load in loads.values()] == [([], [])] * 3
    spared_load = loads["spared"]
    assert (spared_load.errors, spared_load.cut, spared_load.unanswered) == ({}, 0, 0)
    assert spared_load.whole >= 3
    hit_load = loads["hit"]
    if container == "engine":
        assert set(hit_load.errors) == {"engine_failed"}
        assert (hit_load.cut, hit_load.unanswered) == (0, 0)
    else:
        assert hit_load.cut
    assert containers(space) == {**before, again: before[again] + 1}
    assert_true_in_time(truth, killed_s)


def scaled(space: Space, replicas: int) -> bool:
    space.kubectl("scale", KIND, NAME, f"--replicas={replicas}")
    return True


def address(pod: Object) -> str:
    return f"http://{pod['status']['podIP']}:8080"


def assert_true_in_time(truth: Truth, since_s: float) -> None:
    longest_s, said = truth.longest_lie(since_s)
    assert longest_s <= TRUE_WITHIN_S, said


def report(load: Load, truth: Truth, killed_s: float, back_s: float, settled_s: float) -> None:
    """What docs/chaos.md is written from: `pytest -s`."""
    longest_s, said = truth.longest_lie(back_s)
    told: dict[str, Any] = {
        "whole": load.whole,
        "errors": dict(load.errors),
        "cut": load.cut,
        "refused": dict(load.refused),
        "unanswered": load.unanswered,
        "silent": load.silent,
        "failed": load.failed,
        "longest_wait_s": round(load.longest_wait_s, 2),
        "longest_gap_s": round(load.longest_gap_s, 2),
        "back_after_s": round(back_s - killed_s, 1),
        "true_again_s": round(truth.untrue_until(back_s) - back_s, 1),
        "longest_lie_s": round(longest_s, 1),
        "lie": said,
        "settled_s": round(settled_s - back_s, 1),
    }
    print(f"chaos {json.dumps(told)}")
