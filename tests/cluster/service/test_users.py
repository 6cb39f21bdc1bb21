"""What the cluster's own view and edit roles let a plain user do to InferenceServices, once the chart is installed."""

from __future__ import annotations

import functools
import json

import pytest

from cluster.service.space import KIND, Space
from cluster.testnode.cluster import Refused

pytestmark = pytest.mark.cluster


def test_who_may_edit_a_namespace_applies_services_and_who_may_view_it_reads_them(space: Space) -> None:
    for role in ("edit", "view"):
        space.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}or")
    editor, viewer = (functools.partial(space.kubectl, f"--as={role}or") for role in ("edit", "view"))
    service = json.dumps(space.tiny("theirs", replicas=0))
    # An API server knows a moment late who may do what.
    space.node.wait_for("the viewer to be let in", lambda: viewer("get", KIND, "-o", "name") == "")
    space.node.wait_for("the editor to be let in", lambda: editor("get", KIND, "-o", "name") == "")

    editor("apply", "--server-side", "-f", "-", stdin=service)
    space.wait("theirs", "condition=Degraded=False")
    editor("scale", f"{KIND}/theirs", "--replicas=0")
    assert json.loads(viewer("get", KIND, "theirs", "-o", "json"))["status"]["conditions"]
    assert json.loads(viewer("get", "--raw", path(space, "theirs/scale")))["kind"] == "Scale"
    patch = ("patch", KIND, "theirs", "--type=merge", "-p", '{"spec":{"replicas":0}}')
    for forbidden, words in (
        (viewer, patch),
        (viewer, ("delete", KIND, "theirs")),
        (editor, ("patch", KIND, "theirs", "--subresource=status", "--type=merge", "-p", '{"status":{}}')),
        (functools.partial(space.kubectl, "--as=stranger"), ("get", KIND)),
    ):
        with pytest.raises(Refused, match="Forbidden"):
            forbidden(*words)
    editor("delete", KIND, "theirs")


def path(space: Space, rest: str) -> str:
    return f"/apis/sluice.dev/v1alpha1/namespaces/{space.name}/inferenceservices/{rest}"
