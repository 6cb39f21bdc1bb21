"""What others put into our objects, by admission or by hand: it stays, and neither write nor roll follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster.service.space import KIND, Space
from cluster.service.streams import once
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

ADMISSION = "admissionregistration.k8s.io/v1"
RESTRICTED = """Object.spec.containers.securityContext{
  allowPrivilegeEscalation: false, runAsNonRoot: true, runAsUser: 65535,
  capabilities: Object.spec.containers.securityContext.capabilities{drop: ["ALL"]},
  seccompProfile: Object.spec.containers.securityContext.seccompProfile{type: "RuntimeDefault"}}"""
INTO_PODS = f"""Object{{
  metadata: Object.metadata{{annotations: {{"mesh.example/injected": "yes"}}}},
  spec: Object.spec{{containers: [
    Object.spec.containers{{name: "mesh", image: "sluice.test/pause:1", securityContext: {RESTRICTED}}},
    Object.spec.containers{{name: "engine", env: [Object.spec.containers.env{{name: "MESH", value: "on"}}]}}
  ]}}
}}"""
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


@pytest.fixture
def injector(space: Space) -> Iterator[None]:
    """A mesh, so to say, that writes into whatever pod and Deployment comes into the namespace."""
    into_pods = policy("mesh", space.name, "", "pods", INTO_PODS)
    into_deployments = policy("notes", space.name, "apps", "deployments", INTO_DEPLOYMENTS)
    space.node.apply(*into_pods, *into_deployments)
    try:
        space.node.wait_for("the policies to be in force", lambda: is_injected(space))
        yield
    finally:
        kinds = "mutatingadmissionpolicies,mutatingadmissionpolicybindings"
        space.kubectl("delete", kinds, "mesh", "notes")


def is_injected(space: Space) -> bool:
    """Whether a Deployment and a pod that were made now would be written into."""
    container = {"name": "engine", "image": "sluice.test/pause:1", "securityContext": SECURITY}
    pod = {"metadata": {"labels": {"app": "probe"}}, "spec": {"containers": [container]}}
    selector = {"matchLabels": {"app": "probe"}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"selector": selector, "template": pod}}
    alone = {"apiVersion": "v1", "kind": "Pod", "spec": pod["spec"]}
    return all(
        "mesh.example"
        in space.kubectl(
            "create", "--dry-run=server", "-o", "json", "-f", "-",
            stdin=json.dumps({**one, "metadata": {"name": "probe"}}),
        )
        for one in (deployment, alone)
    )  # fmt: skip


def template(space: Space, name: str) -> Object:
    found: Object = space.get("deployment", name)["spec"]["template"]
    return found


def generation(space: Space, name: str) -> int:
    """Changes with every write that changes what its Deployment asks for."""
    found: int = space.get("deployment", name)["metadata"]["generation"]
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


@pytest.mark.usefixtures("injector")
def test_what_others_write_into_a_deployment_stays_and_is_not_written_again(space: Space) -> None:
    space.apply(space.tiny("shared", replicas=0))
    space.wait("shared", "condition=Degraded=False")
    made = template(space, "shared")
    assert made["metadata"]["annotations"]["mesh.example/wanted"] == "yes"

    patch = ("--field-manager=somebody", "--type=strategic", "-p", json.dumps(BY_HAND))
    space.kubectl("patch", "deployment", "shared", *patch)
    theirs, then = template(space, "shared"), generation(space, "shared")
    change(space, "shared", slo={"timeToFirstToken": "50s"})  # carried out without touching the Deployment
    assert (template(space, "shared"), generation(space, "shared")) == (theirs, then)

    change(space, "shared", podTemplate={"labels": {"tier": "gold"}})  # what is ours changes, what is theirs does not
    assert template(space, "shared")["metadata"]["labels"].pop("tier") == "gold"
    now = template(space, "shared")
    del now["metadata"]["labels"]["tier"]
    assert now == theirs
    assert space.get("deployment", "shared")["metadata"]["annotations"]["team"] == "search"


@pytest.mark.full
@pytest.mark.usefixtures("injector")
async def test_a_service_whose_pods_carry_somebody_elses_sidecar_serves_and_is_not_rolled(space: Space) -> None:
    url = space.serve(space.tiny("meshed"))
    (pod,) = space.pods("meshed")
    assert {one["name"] for one in pod["spec"]["containers"]} == {"engine", "mesh"}
    assert pod["metadata"]["annotations"]["mesh.example/injected"] == "yes"
    (engine,) = [one for one in pod["spec"]["containers"] if one["name"] == "engine"]
    assert {"name": "MESH", "value": "on"} in engine["env"]
    then = generation(space, "meshed")

    assert (await once(url, "tiny", "through the mesh", max_tokens=4)).finish_reason
    change(space, "meshed", slo={"timeToFirstToken": "50s"})

    space.wait("meshed", "condition=Ready")
    (same,) = space.pods("meshed")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert generation(space, "meshed") == then
    assert space.status("meshed").get("failure") is None
