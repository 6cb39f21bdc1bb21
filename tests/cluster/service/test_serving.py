"""From a manifest to a stream, and back to nothing."""

from __future__ import annotations

import pytest

from cluster.service.space import KIND, LABEL, Space, example
from cluster.service.streams import once

pytestmark = pytest.mark.cluster


async def test_the_cpu_example_becomes_a_service_that_streams(space: Space) -> None:
    service = space.mounted(example("demo-cpu"))
    service["spec"]["slo"]["enforcement"] = "Observe"  # whatever else keeps this machine busy
    name, model = service["metadata"]["name"], service["spec"]["model"]["servedName"]

    url = space.serve(service)
    said = await once(url, model, "Say hello.", max_tokens=16)

    assert said.text
    assert said.finish_reason in {"stop", "length"}
    status = space.status(name)
    assert status["readyReplicas"] == 1
    assert status["stepCost"]["fixedMicroseconds"] > 0
    assert status["derived"]["kvCapacityTokens"] > 1000
    listed = space.kubectl("get", KIND, name).splitlines()
    columns = dict(zip(*(line.split() for line in listed), strict=False))
    assert (columns["READY"], columns["DESIRED"], columns["AVAILABLE"], columns["MODEL"]) == ("True", "1", "1", model)


def test_deleting_the_service_leaves_nothing_behind(space: Space) -> None:
    space.serve(space.tiny("gone"))

    space.kubectl("delete", KIND, "gone")

    for kind in ("deployments", "replicasets", "pods", "services", "configmaps", "serviceaccounts"):
        space.kubectl("wait", kind, "-l", f"{LABEL}=gone", "--for=delete", "--timeout=300s")
        assert space.owned(kind, "gone") == []
