"""Uninstalling and installing beside a service that goes on, and an operator that knows one namespace only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.kubectl import Kubectl
from cluster.service.release import Release
from cluster.service.space import KIND, Space, open_space, tiny
from cluster.service.streams import client, stream

pytestmark = pytest.mark.cluster


@pytest.fixture
def uninstalled(release: Release, space: Space) -> Iterator[str]:
    """What Helm said when it uninstalled the operator, which is back afterwards."""
    try:
        yield release.uninstall()
    finally:
        release.install()


async def test_without_the_operator_definition_services_and_streams_stay_and_its_return_restarts_nothing(
    release: Release, space: Space
) -> None:
    url = space.serve(tiny("kept"))
    (pod,) = space.pods("kept")

    said = release.uninstall()
    try:
        assert "inferenceservices.sluice.dev" in said  # Helm names what it keeps
        assert objects_of(release) == []
        assert space.kubectl.get(KIND, "kept")["spec"]["accelerator"] == {"count": 0, "resourceName": "nvidia.com/gpu"}
        assert (await stream(client(url, retries=5), "tiny", "still here?", max_tokens=4)).finish_reason
    finally:
        release.install()

    space.wait("kept", "condition=Ready")
    (same,) = space.pods("kept")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0


def test_an_operator_of_one_namespace_needs_no_right_outside_it(uninstalled: str, space: Space) -> None:
    scoped = Release("scoped", "sluice-scoped")
    scoped.prepare()
    scoped.install(f"--set=watchNamespaces={{{space.name}}}", "--set=crds.install=false", "--set=rbac.aggregate=false")
    try:
        with open_space() as elsewhere:
            elsewhere.kubectl.apply(tiny("unseen"))
            space.serve(tiny("seen"))

            assert "status" not in elsewhere.kubectl.get(KIND, "unseen")
        cluster_wide = Kubectl("default").all_of(
            "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/instance=scoped"
        )
        assert cluster_wide == []
    finally:
        scoped.uninstall()


def objects_of(release: Release) -> list[str]:
    """Names of what the release still has, in its namespace and cluster-wide; the definition apart."""
    mine = ["-l", f"app.kubernetes.io/instance={release.name},app.kubernetes.io/part-of=sluice"]
    kinds = "all,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings"
    return [one["metadata"]["name"] for one in Kubectl(release.namespace).all_of(kinds, *mine)]
