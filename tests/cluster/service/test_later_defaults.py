"""A definition that fills in more than the operator knows, which each upgrade brings first: no pod ends for it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.service import defining
from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.streams import streaming

pytestmark = pytest.mark.cluster

Defaults = dict[str, dict[str, Any]]
Define = Callable[[str, Defaults], None]

NEW = "ofALaterDefinition"
# The operator of today reads none of these; those of before took model, runtime, accelerator and resources whole.
UNKNOWN: Defaults = {
    "": {NEW: "x"},
    "model": {NEW: "x"},
    "model.source.image": {NEW: "x"},
    "runtime": {NEW: "x"},
    "accelerator": {NEW: "x"},
    "resources": {NEW: "x"},
    "scheduling.preemption": {NEW: "x"},
    "cache": {NEW: "x"},
    "podTemplate": {NEW: "x"},
    "podTemplate.engine": {NEW: "x"},
}
# Each of these it would carry out, had somebody set it: into `engine.json`, into the pods' template, or word for word.
KNOWN: Defaults = {
    **UNKNOWN,
    "model": {NEW: "x", "maxLengthTokens": 4096},
    "scheduling": {"overlapDepth": 1, "tokenBudget": 4096},
    "podTemplate": {NEW: "x", "nodeSelector": {"sluice.test/no-node-has": "this"}},
    "podTemplate.volumes.[]": {NEW: "x"},
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What must not move."""

    deployment: Any
    generation: int
    annotations: Any
    pods: list[tuple[str, list[int]]]
    """By uid, with the restarts of its containers."""
    renderings: list[str]
    runtime: Any


def seen(space: Space) -> Seen:
    deployment = space.get("deployment", "chat")
    return Seen(
        deployment=copy.deepcopy(deployment["spec"]),
        generation=deployment["metadata"]["generation"],
        annotations=deployment["metadata"]["annotations"],
        pods=sorted(
            (pod["metadata"]["uid"], [one["restartCount"] for one in pod["status"]["containerStatuses"]])
            for pod in space.pods("chat")
        ),
        renderings=sorted(one["metadata"]["name"] for one in space.owned("controllerrevisions", "chat")),
        runtime=space.status("chat").get("runtime"),
    )


def spec(space: Space) -> Any:
    return space.get(KIND, "chat")["spec"]


def restart_operator(release: Release) -> None:
    deployment = f"deployment/{release.name}-operator"
    for verb in ("restart", "status"):
        release.node.kubectl("-n", release.namespace, "rollout", verb, deployment, timeout_s=180)


@pytest.fixture
def define(release: Release, tmp_path: Path) -> Iterator[Define]:
    """Upgrades to a chart whose definition fills in more, and nothing else; today's is there again afterwards."""

    def installed(name: str, more: Defaults) -> None:
        schema = defining.filling_in(defining.of_chart(), more)
        release.install_from(defining.chart_with(schema, tmp_path / name))

    try:
        yield installed
    finally:
        release.install()


async def test_defaults_that_nobody_set_end_no_pod_whatever_they_fill_in(
    space: Space, release: Release, define: Define
) -> None:
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    node, look = space.node, defining.Look(space)
    before, generation = seen(space), space.get(KIND, "chat")["metadata"]["generation"]

    async def filled_in(what: str, is_there: Callable[[], object]) -> None:
        await asyncio.to_thread(node.wait_for, what, is_there)
        await asyncio.to_thread(look.at, "chat")

    async with streaming(url, 4) as ended:
        await asyncio.to_thread(define, "unknown", UNKNOWN)
        await filled_in("new fields to be filled in", lambda: spec(space)["model"].get(NEW))
        assert seen(space) == before

        await asyncio.to_thread(define, "known", KNOWN)
        await filled_in("known fields to be filled in", lambda: spec(space)["model"].get("maxLengthTokens"))
        assert spec(space)["podTemplate"]["volumes"][0][NEW] == "x"
        told = seen(space)
        assert (told.deployment, told.generation, told.pods) == (before.deployment, before.generation, before.pods)
        assert (told.annotations, told.renderings) == (before.annotations, before.renderings)
        assert told.runtime["version"] == before.runtime["version"]
        # Whoever takes over next knows nothing but what is in the cluster.
        await asyncio.to_thread(restart_operator, release)
        await asyncio.to_thread(look.at, "chat")
        assert seen(space) == told
        assert space.get(KIND, "chat")["metadata"]["generation"] == generation, "no client wrote any of it"

        # Back to the definition of before: what it knows of them may be stored by now.
        await asyncio.to_thread(release.install)
        await filled_in("new fields to be gone", lambda: NEW not in spec(space)["model"])
        told = seen(space)
        assert (told.deployment, told.pods, told.renderings) == (before.deployment, before.pods, before.renderings)
        so_far = len(ended)
        await asyncio.to_thread(node.wait_for, "another whole stream", lambda: len(ended) > so_far)

    assert {one.finish_reason for one in ended} <= {"stop", "length"}
    status = space.status("chat")
    assert status["observedGeneration"] == generation
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    conditions = {one["type"]: one["status"] for one in status["conditions"]}
    assert (conditions["Ready"], conditions["Available"]) == ("True", "True")
    assert (conditions["Progressing"], conditions["Degraded"]) == ("False", "False")


async def test_an_edit_that_restarts_nothing_restarts_nothing_under_a_later_definition(
    space: Space, define: Define
) -> None:
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    before = seen(space)

    async with streaming(url, 4) as ended:
        await asyncio.to_thread(define, "unknown", UNKNOWN)
        await asyncio.to_thread(
            space.node.wait_for, "new fields to be filled in", lambda: spec(space)["model"].get(NEW)
        )
        patch = '{"spec":{"slo":{"timeToFirstToken":"50s"}}}'
        space.kubectl("patch", KIND, "chat", "--type=merge", "-p", patch)
        await asyncio.to_thread(space.wait, "chat", "condition=Ready")

    assert {one.finish_reason for one in ended} <= {"stop", "length"}
    after = seen(space)
    assert (after.deployment, after.pods, after.renderings) == (before.deployment, before.pods, before.renderings)
