"""What others put into our objects, by admission or by hand: it stays, and neither write nor roll follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.streams import once
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

ADMISSION = "admissionregistration.k8s.io/v1"
INTO_PODS = """Object{
  metadata: Object.metadata{annotations: {"mesh.example/injected": "yes"}},
  spec: Object.spec{containers: [
    Object.spec.containers{name: "mesh", image: "sluice.test/pause:1"},
    Object.spec.containers{name: "engine", env: [Object.spec.containers.env{name: "MESH", value: "on"}]}
  ]}
}"""
INTO_DEPLOYMENTS = """Object{
  metadata: Object.metadata{annotations: {"mesh.example/seen": "yes"}},
  spec: Object.spec{template: Object.spec.template{metadata: Object.spec.template.metadata{
    annotations: {"mesh.example/wanted": "yes"}}}}
}"""
SECURITY = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 65535,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def policy(name: str, namespace: str, group: str, resource: str, expression: str) -> list[Object]:
    """A policy of one namespace, and its binding."""
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {
        "matchConstraints": {"namespaceSelector": selector, "resourceRules": [rule]},
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}],
    }
    meta = {"metadata": {"name": name}}
    return [
        {"apiVersion": ADMISSION, "kind": "MutatingAdmissionPolicy", **meta, "spec": spec},
        {"apiVersion": ADMISSION, "kind": "MutatingAdmissionPolicyBinding", **meta, "spec": {"policyName": name}},
    ]


@contextmanager
def in_force(space: Space, written: list[Object], probe: Object) -> Iterator[None]:
    """The time in which a policy writes into whatever of its kind comes into the namespace."""
    space.node.apply(*written)
    name = written[0]["metadata"]["name"]
    try:
        dry = ("create", "--dry-run=server", "-o", "json", "-f", "-")
        stdin = json.dumps({**probe, "metadata": {"name": "probe"}})
        space.node.wait_for("the policy to be in force", lambda: "mesh.example" in space.kubectl(*dry, stdin=stdin))
        yield
    finally:
        space.kubectl("delete", "mutatingadmissionpolicies,mutatingadmissionpolicybindings", name)


CONTAINER = {"name": "engine", "image": "sluice.test/pause:1"}


@pytest.fixture
def annotated(space: Space) -> Iterator[None]:
    """The namespace while something notes down in every Deployment that it saw it."""
    pod = {"metadata": {"labels": {"app": "probe"}}, "spec": {"containers": [CONTAINER]}}
    spec = {"selector": {"matchLabels": {"app": "probe"}}, "template": pod}
    probe = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": spec}
    with in_force(space, policy("notes", space.name, "apps", "deployments", INTO_DEPLOYMENTS), probe):
        yield


@pytest.fixture
def meshed(release: Release) -> Iterator[Space]:
    """A namespace in which a mesh puts its container into every pod; it asks for more than `restricted` allows."""
    probe = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [CONTAINER]}}
    with release.node.namespace("meshed", enforce="baseline") as namespace:
        space = Space.prepare(release.node, namespace)
        with in_force(space, policy("mesh", namespace, "", "pods", INTO_PODS), probe):
            yield space


def template(space: Space, name: str) -> Object:
    found: Object = space.get("deployment", name)["spec"]["template"]
    return found


def asked(space: Space, name: str) -> Object:
    """What the Deployment asks for; its annotations say of which generation of the resource, and change with that."""
    found: Object = space.get("deployment", name)["spec"]
    return found


BY_HAND = {
    "metadata": {"annotations": {"team": "search"}},
    "spec": {
        "template": {
            "metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "2026-11-30T12:00:00Z"}},
            "spec": {
                "nodeSelector": {"disk": "fast"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "containers": [
                    {"name": "engine", "env": [{"name": "EXTRA", "value": "1"}]},
                    {"name": "logs", "image": "sluice.test/pause:1", "securityContext": SECURITY},
                ],
            },
        }
    },
}


def change(space: Space, name: str, **spec: Object) -> None:
    """Change a service, and wait until that was carried out."""
    space.kubectl("patch", KIND, name, "--type=merge", "-p", json.dumps({"spec": spec}))
    space.wait(name, "condition=Degraded=False")


@pytest.mark.usefixtures("annotated")
def test_what_others_write_into_a_deployment_stays_and_is_not_written_again(space: Space) -> None:
    space.apply(space.tiny("shared", replicas=0))
    space.wait("shared", "condition=Degraded=False")
    made = template(space, "shared")
    assert made["metadata"]["annotations"]["mesh.example/wanted"] == "yes"

    patch = ("--field-manager=somebody", "--type=strategic", "-p", json.dumps(BY_HAND))
    space.kubectl("patch", "deployment", "shared", *patch)
    theirs, then = template(space, "shared"), asked(space, "shared")
    change(space, "shared", slo={"timeToFirstToken": "50s"})  # carried out without asking for anything else
    assert asked(space, "shared") == then

    change(space, "shared", podTemplate={"labels": {"tier": "gold"}})  # what is ours changes, what is theirs does not
    assert template(space, "shared")["metadata"]["labels"].pop("tier") == "gold"
    now = template(space, "shared")
    del now["metadata"]["labels"]["tier"]
    assert now == theirs
    assert space.get("deployment", "shared")["metadata"]["annotations"]["team"] == "search"


@pytest.mark.full
async def test_a_service_whose_pods_carry_somebody_elses_container_serves_and_is_not_rolled(meshed: Space) -> None:
    space = meshed
    url = space.serve(space.tiny("meshed"))
    (pod,) = space.pods("meshed")
    assert {one["name"] for one in pod["spec"]["containers"]} == {"engine", "mesh"}
    assert pod["metadata"]["annotations"]["mesh.example/injected"] == "yes"
    (engine,) = [one for one in pod["spec"]["containers"] if one["name"] == "engine"]
    assert {"name": "MESH", "value": "on"} in engine["env"]
    then = asked(space, "meshed")

    assert (await once(url, "tiny", "through the mesh", max_tokens=4)).finish_reason
    change(space, "meshed", slo={"timeToFirstToken": "50s"})

    space.wait("meshed", "condition=Ready")
    (same,) = space.pods("meshed")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert asked(space, "meshed") == then
    assert space.status("meshed").get("failure") is None
