"""Helm upgrades from the chart of an earlier commit, and goes back to it: no pod ends, and no stream is cut."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.service import defining
from cluster.service.earlier import Absent, Earlier
from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.streams import streaming
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

# The last release line that kept no template; and the last before adapters, which kept templates and took model,
# runtime, accelerator and resources whole for what a step costs. Each with a field that its definition lacked.
BEFORE = {"07c09eb": ("autoscaling",), "bcc470b": ("model", "properties", "adapters")}


@pytest.fixture(scope="session", params=["07c09eb", pytest.param("bcc470b", marks=pytest.mark.full)])
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Earlier:
    """The repository as it was then; where its history does not reach back so far, there is nothing to upgrade from."""
    try:
        return Earlier.checked_out(request.param, tmp_path_factory.mktemp("earlier"))
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


def pod_template(space: Space, name: str) -> Any:
    return copy.deepcopy(space.get("deployment", name)["spec"]["template"])


def identity(space: Space) -> str:
    uid: str = space.node.get("customresourcedefinition", KIND)["metadata"]["uid"]
    return uid


def is_of(earlier: Earlier, schema: Object) -> bool:
    """Whether a definition is the earlier one, and not today's."""
    *path, last = BEFORE[earlier.commit]
    found = defining.fields(schema)
    for step in path:
        found = found[step]
    return last not in found


def runtime(space: Space, name: str) -> dict[str, str]:
    found: dict[str, str] = space.status(name).get("runtime", {})
    return found


def is_taken_over(space: Space) -> bool:
    """Whether today's operator tells of the service, which has other images."""
    return "newer" in runtime(space, "chat")


def same_pod(space: Space, pod: Object) -> bool:
    (now,) = space.pods("chat")
    unmoved = all(one["restartCount"] == 0 for one in now["status"]["containerStatuses"])
    return unmoved and bool(now["metadata"]["uid"] == pod["metadata"]["uid"])


@pytest.mark.usefixtures("installed")
async def test_an_upgrade_ends_no_pod_and_no_stream_even_if_the_earlier_operator_lives_on_under_the_new_definition(
    release: Release, space: Space, earlier: Earlier, tmp_path: Path
) -> None:
    uid = identity(space)
    assert is_of(earlier, defining.of_node(space.node))
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    before, (pod,), version = pod_template(space, "chat"), space.pods("chat"), runtime(space, "chat").get("version")
    programs = [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
    assert {one["image"].rpartition(":")[2] for one in programs} == {earlier.commit}

    async with streaming(url, 4) as ended:
        # What Helm sends first. The earlier operator lives a moment longer: here, for as long as it takes it to look.
        first = defining.chart_with(defining.of_chart(), tmp_path, earlier.chart)
        await asyncio.to_thread(release.install_from, first, *earlier.values)
        await asyncio.to_thread(defining.Look(space).at, "chat")
        assert pod_template(space, "chat") == before
        assert not is_taken_over(space)
        await asyncio.to_thread(release.install)
        await asyncio.to_thread(space.node.wait_for, "it to be adopted", lambda: is_taken_over(space))
        so_far = len(ended)
        await asyncio.to_thread(space.node.wait_for, "another whole stream", lambda: len(ended) > so_far)

    assert {one.finish_reason for one in ended} <= {"stop", "length"}
    assert pod_template(space, "chat") == before
    assert same_pod(space, pod)
    assert runtime(space, "chat")["version"] == (version or "unknown")
    assert identity(space) == uid, "the definition was changed, not made anew"
    assert not is_of(earlier, defining.of_node(space.node))
    # The old pod goes on obeying: what needs no restart is carried out under the new operator.
    patch = '{"spec":{"slo":{"timeToFirstToken":"50s"}}}'
    space.kubectl("patch", KIND, "chat", "--type=merge", "-p", patch)
    await asyncio.to_thread(space.wait, "chat", "condition=Ready")
    assert pod_template(space, "chat") == before
    assert same_pod(space, pod)


@pytest.mark.full
@pytest.mark.usefixtures("installed")
async def test_helm_rolls_back_to_the_earlier_chart_and_pods_that_took_nothing_stay(
    release: Release, space: Space, earlier: Earlier
) -> None:
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    before, (pod,), uid = pod_template(space, "chat"), space.pods("chat"), identity(space)
    await asyncio.to_thread(release.install)
    await asyncio.to_thread(space.node.wait_for, "it to be adopted", lambda: is_taken_over(space))

    async with streaming(url, 4) as ended:
        await asyncio.to_thread(release.roll_back)
        patch = '{"spec":{"slo":{"timeToFirstToken":"50s"}}}'
        space.kubectl("patch", KIND, "chat", "--type=merge", "-p", patch)
        await asyncio.to_thread(space.wait, "chat", "condition=Ready")

    assert {one.finish_reason for one in ended} <= {"stop", "length"}
    assert pod_template(space, "chat") == before
    assert same_pod(space, pod)
    assert identity(space) == uid
    assert is_of(earlier, defining.of_node(space.node))
