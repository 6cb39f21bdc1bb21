"""From a manifest to a stream, and back to nothing."""

from __future__ import annotations

import pytest

from cluster.service.space import KIND, Space, example, tiny, with_torch
from cluster.service.streams import client, stream

pytestmark = pytest.mark.cluster


async def test_the_cpu_example_becomes_a_service_that_streams(space: Space) -> None:
    service = with_torch(example("demo-cpu"))
    name, model = service["metadata"]["name"], service["spec"]["model"]["servedName"]

    url = space.serve(service)
    said = await stream(client(url, retries=5), model, "Say hello.", max_tokens=16)

    assert said.text
    assert said.finish_reason in {"stop", "length"}
    status = space.status(name)
    assert status["readyReplicas"] == 1
    assert status["derived"]["chunkCeilingTokens"] > 0
    assert space.condition(name, "SLOFeasible")["status"] == "True"
    listed = space.kubectl("get", KIND, name, "-o", "wide")
    columns = dict(zip(*(line.split() for line in listed.splitlines()), strict=False))
    assert (columns["READY"], columns["DESIRED"], columns["AVAILABLE"], columns["MODEL"]) == ("True", "1", "1", model)


async def test_deleting_the_service_leaves_nothing_behind(space: Space) -> None:
    owned = "serviceaccounts,configmaps,services,deployments,replicasets,pods,inferenceservices.sluice.dev"
    own = ["-l", "sluice.dev/inferenceservice=gone"]
    space.serve(tiny("gone"))
    pods = [pod["metadata"]["name"] for pod in space.pods("gone")]

    space.kubectl("delete", KIND, "gone")

    for pod in pods:
        space.kubectl.wait(f"pod/{pod}", "delete")
    for kind in owned.split(","):
        found = space.kubectl.all_of(kind, *own)
        for one in found:  # the garbage collector takes them one after the other
            space.kubectl.wait(f"{kind}/{one['metadata']['name']}", "delete")
        assert space.kubectl.all_of(kind, *own) == []
