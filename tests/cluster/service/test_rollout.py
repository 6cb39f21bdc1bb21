"""New pods for old ones while clients stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.service.release import Release
from cluster.service.space import MODELS_AT, Space
from cluster.service.streams import Stream, client, once, opened
from cluster.testnode.cluster import Cluster, Object

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from rollout import measure, paced_space  # found through the path above

pytestmark = pytest.mark.cluster


@pytest.mark.full
async def test_neither_a_restart_nor_the_eviction_of_every_pod_loses_a_stream(release: Release, namespace: str) -> None:
    seen = await measure(paced_space(release.node, namespace), clients=6, lengths_s=(3.0, 6.0), replicas=2)

    assert (seen["lost"], seen["failed"]) == ([], [])
    assert seen["completed"] >= 6


async def test_a_rolling_restart_under_load_loses_no_stream(space: Space) -> None:
    service = space.tiny("rolling", replicas=2)
    url = space.serve(service)
    before = {pod["metadata"]["uid"] for pod in space.pods("rolling")}
    ended: list[Stream] = []
    over = asyncio.Event()

    async def keep_streaming() -> None:
        while not over.is_set():
            # A new client each time, so that the node balances it anew; its retries come before the first byte only.
            ended.append(await once(url, "tiny", "once upon a time", max_tokens=300))

    async with asyncio.TaskGroup() as clients:
        for _ in range(4):
            clients.create_task(keep_streaming())
        await asyncio.to_thread(restart, space, service)
        over.set()

    after = {pod["metadata"]["uid"] for pod in space.pods("rolling")}
    assert before.isdisjoint(after)
    assert len(ended) >= 4
    assert {one.finish_reason for one in ended} == {"length"}


def restart(space: Space, service: Object) -> None:
    """Roll the pods by a change of their template, and return when the old ones are gone."""
    old = [pod["metadata"]["name"] for pod in space.pods("rolling")]
    service["spec"]["podTemplate"]["annotations"] = {"example.com/restart": "now"}
    space.apply(service)
    space.wait("rolling", "condition=Ready")
    for pod in old:
        space.wait_for(f"pod/{pod}", "delete")


@pytest.fixture
def one_device(node: Cluster) -> Iterator[Object]:
    """The part of a spec that takes the only device of the node, which computes nothing."""
    node.offer_gpus(1)
    requests = {"cpu": "100m", "memory": "256Mi"}
    yield {"resources": {"requests": requests, "limits": {"memory": "2Gi", "nvidia.com/gpu": "1"}}, **NO_ACCELERATOR}
    node.offer_gpus(0)


NO_ACCELERATOR = {"accelerator": {"count": 0, "resourceName": "example.com/none"}}


def running(space: Space, name: str) -> list[tuple[str, str]]:
    """The pods that are not on their way out: uid and revision."""
    return [
        (pod["metadata"]["uid"], pod["metadata"]["labels"]["pod-template-hash"])
        for pod in space.pods(name)
        if "deletionTimestamp" not in pod["metadata"]
    ]


async def test_a_roll_that_crashes_takes_nothing_away_and_the_old_manifest_brings_the_old_pods_back(
    space: Space,
) -> None:
    good = space.tiny("undone")
    url = space.serve(good)
    before = running(space, "undone")

    space.apply(space.tiny("undone", path=f"{MODELS_AT}/nowhere"))
    space.wait("undone", "jsonpath={.status.failure.reason}=ModelMissing")

    assert space.condition("undone", "Available")["status"] == "True"
    assert (await once(url, "tiny", "still here?", max_tokens=4)).finish_reason
    space.serve(good)
    assert running(space, "undone") == before, "the very same pod, of the very same revision"


@pytest.mark.full
def test_a_crash_looping_pod_makes_room_for_the_revision_that_mends_it(
    space: Space, one_device: dict[str, Any]
) -> None:
    space.apply(space.tiny("mended", path=f"{MODELS_AT}/nowhere", **one_device))
    space.wait("mended", "jsonpath={.status.failure.reason}=ModelMissing")

    # It holds the only device, so there is no room beside it; it is not waited for either.
    space.serve(space.tiny("mended", **one_device))


@pytest.mark.full
async def test_a_roll_without_a_spare_device_goes_on_in_place_and_ends_its_streams_first(
    space: Space, one_device: dict[str, Any]
) -> None:
    service = space.tiny("cramped", **one_device)
    url = space.serve(service)
    ((before, _),) = running(space, "cramped")
    service["spec"]["podTemplate"]["annotations"] = {"example.com/restart": "now"}
    space.apply(service)
    space.wait("cramped", "jsonpath={.status.failure.reason}=Unschedulable")
    assert space.condition("cramped", "Available")["status"] == "True"

    ended = []
    async with client(url) as who:
        # As long as the old pod may serve, streams begin; the last of them is there when it goes.
        while before in [uid for uid, _ in running(space, "cramped")]:
            answer = await opened(who, "tiny", "go on", max_tokens=400)
            ended.append([choice.finish_reason async for chunk in answer for choice in chunk.choices][-1])
    assert set(ended) == {"length"}
    await asyncio.to_thread(space.wait, "cramped", "condition=Ready")
    space.node.wait_for("the next roll to be a surge", lambda: surge_of(space, "cramped") == 1)


def surge_of(space: Space, name: str) -> int:
    surge: int = space.get("deployment", name)["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    return surge
