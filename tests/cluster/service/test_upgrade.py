"""Helm upgrades from the chart of an earlier commit, and goes back to it: no pod ends, and no stream is cut."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.service.earlier import Absent, Earlier
from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.streams import Stream, once
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

# The last release line that kept no template.
BEFORE = "07c09eb"


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Earlier:
    """The repository as it was then; where its history does not reach back so far, there is nothing to upgrade from."""
    try:
        return Earlier.checked_out(BEFORE, tmp_path_factory.mktemp("earlier"))
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.fixture
def installed(release: Release, earlier: Earlier) -> Iterator[None]:
    """The time in which the earlier release is installed; today's is there afterwards, whatever happened."""
    earlier.bring_images()
    since = dt.datetime.now(dt.UTC)
    try:
        release.go_back_to(earlier.chart, *earlier.values)
        yield
    finally:
        release.install()
        release.node.earlier_releases.append((since, dt.datetime.now(dt.UTC)))


@asynccontextmanager
async def streams(url: str, clients: int) -> AsyncIterator[list[Stream]]:
    """So many clients stream meanwhile, one answer after the other; in the end each waits for its last."""
    ended: list[Stream] = []
    over = asyncio.Event()

    async def keep_streaming(number: int) -> None:
        while not over.is_set():
            ended.append(await once(url, "tiny", f"client {number}", max_tokens=300))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(keep_streaming(number))
        yield ended
        over.set()


def pod_template(space: Space, name: str) -> Any:
    return copy.deepcopy(space.get("deployment", name)["spec"]["template"])


def definition(space: Space) -> tuple[str, Object]:
    """Who it is, and what it allows under `spec`."""
    found = space.node.get("customresourcedefinition", KIND)
    properties = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return found["metadata"]["uid"], properties["spec"]["properties"]


def runtime(space: Space, name: str) -> dict[str, str]:
    found: dict[str, str] = space.status(name).get("runtime", {})
    return found


def same_pod(space: Space, pod: Object) -> bool:
    (now,) = space.pods("chat")
    unmoved = all(one["restartCount"] == 0 for one in now["status"]["containerStatuses"])
    return unmoved and bool(now["metadata"]["uid"] == pod["metadata"]["uid"])


@pytest.mark.usefixtures("installed")
async def test_an_upgrade_from_a_chart_that_kept_nothing_ends_no_pod_and_no_stream(
    release: Release, space: Space
) -> None:
    identity, allowed = definition(space)
    assert "autoscaling" not in allowed, "the definition is the earlier chart's"
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    before, (pod,) = pod_template(space, "chat"), space.pods("chat")
    programs = [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
    assert {one["image"].rpartition(":")[2] for one in programs} == {BEFORE}

    async with streams(url, 4) as ended:
        await asyncio.to_thread(release.install)
        await asyncio.to_thread(space.node.wait_for, "it to be adopted", lambda: runtime(space, "chat"))
        so_far = len(ended)
        await asyncio.to_thread(space.node.wait_for, "another whole stream", lambda: len(ended) > so_far)

    assert {one.finish_reason for one in ended} <= {"stop", "length"}
    assert pod_template(space, "chat") == before
    assert same_pod(space, pod)
    assert runtime(space, "chat")["version"] == "unknown"
    same, allowed = definition(space)
    assert same == identity, "the definition was changed, not made anew"
    assert "autoscaling" in allowed
    # The old pod goes on obeying: what needs no restart is carried out under the new operator.
    patch = '{"spec":{"slo":{"timeToFirstToken":"50s"}}}'
    space.kubectl("patch", KIND, "chat", "--type=merge", "-p", patch)
    await asyncio.to_thread(space.wait, "chat", "condition=Ready")
    assert pod_template(space, "chat") == before
    assert same_pod(space, pod)


@pytest.mark.full
@pytest.mark.usefixtures("installed")
async def test_helm_rolls_back_to_a_chart_that_kept_nothing_and_pods_that_took_nothing_stay(
    release: Release, space: Space
) -> None:
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    before, (pod,) = pod_template(space, "chat"), space.pods("chat")
    identity, _ = definition(space)
    await asyncio.to_thread(release.install)
    await asyncio.to_thread(space.node.wait_for, "it to be adopted", lambda: runtime(space, "chat"))

    async with streams(url, 4) as ended:
        await asyncio.to_thread(release.roll_back)
        patch = '{"spec":{"slo":{"timeToFirstToken":"50s"}}}'
        space.kubectl("patch", KIND, "chat", "--type=merge", "-p", patch)
        await asyncio.to_thread(space.wait, "chat", "condition=Ready")

    assert {one.finish_reason for one in ended} <= {"stop", "length"}
    assert pod_template(space, "chat") == before
    assert same_pod(space, pod)
    same, allowed = definition(space)
    assert same == identity
    assert "autoscaling" not in allowed
