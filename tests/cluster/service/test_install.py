"""Uninstalling and installing beside a service that goes on, and an operator that knows one namespace only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.streams import once

pytestmark = pytest.mark.cluster


@pytest.fixture
def uninstalled(release: Release, space: Space) -> Iterator[None]:
    """The time without the operator, which is back afterwards."""
    try:
        release.uninstall()
        yield
    finally:
        release.install()


async def test_without_the_operator_definition_services_and_streams_stay_and_its_return_restarts_nothing(
    release: Release, space: Space
) -> None:
    url = space.serve(space.tiny("kept"))
    (pod,) = space.pods("kept")

    said = release.uninstall()
    try:
        assert "inferenceservices.sluice.dev" in said  # Helm names what it keeps
        assert release.objects() == []
        assert space.get(KIND, "kept")["spec"]["accelerator"] == {"count": 0, "resourceName": "nvidia.com/gpu"}
        assert (await once(url, "tiny", "still here?", max_tokens=4)).finish_reason
    finally:
        release.install()

    space.wait("kept", "condition=Ready")
    (same,) = space.pods("kept")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.usefixtures("uninstalled")
def test_an_operator_of_one_namespace_needs_no_right_outside_it(space: Space) -> None:
    node = space.node
    with node.namespace("scoped") as home, node.namespace("elsewhere") as elsewhere:
        scoped = Release(node, "scoped", home)
        scoped.install(
            f"--set=watchNamespaces={{{space.name}}}", "--set=crds.install=false", "--set=rbac.aggregate=false"
        )
        node.apply(space.tiny("unseen"), namespace=elsewhere)

        space.serve(space.tiny("seen"))

        assert "status" not in node.get(KIND, "unseen", elsewhere)
        assert node.list("clusterroles,clusterrolebindings", selector="app.kubernetes.io/instance=scoped") == []
        scoped.uninstall()
