"""Whose fields `kubectl sluice why` names."""

from __future__ import annotations

from typing import Any

import pytest

import operator_scene as scene
from sluice_operator.status.diagnosis import Evidence, diagnose, tell
from sluice_operator.status.owners import foreign_fields

ENGINE = 'k:{"name":"engine"}'
OUR_ENGINE: scene.Json = {".": {}, "f:image": {}, "f:env": {'k:{"name":"A"}': {".": {}, "f:value": {}}}}
OUR_TEMPLATE = {
    "f:metadata": {"f:annotations": {"f:sluice.dev/cost-basis": {}}},
    "f:spec": {"f:containers": {ENGINE: OUR_ENGINE}},
}
OURS = {"f:spec": {"f:replicas": {}, "f:template": OUR_TEMPLATE}}


def in_pods(**fields: Any) -> scene.Json:
    return {"f:spec": {"f:template": {"f:spec": fields}}}


def entry(manager: str, fields: scene.Json, **more: Any) -> scene.Json:
    return {"manager": manager, "time": "2026-01-01T00:07:00Z", "fieldsV1": fields, **more}


def edited(*entries: scene.Json) -> scene.Json:
    made = scene.deployment()
    made["metadata"] |= {"namespace": "llm", "managedFields": [entry("sluice", OURS), *entries]}
    return made


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        pytest.param(
            in_pods(
                **{"f:containers": {ENGINE: {"f:env": {'k:{"name":"B"}': {".": {}, "f:name": {}, "f:value": {}}}}}}
            ),
            ["spec.template.spec.containers[engine].env[B]"],
            id="a variable, once and not part by part",
        ),
        pytest.param(
            in_pods(**{"f:containers": {'k:{"name":"logs"}': {".": {}, "f:image": {}, "f:name": {}}}}),
            ["spec.template.spec.containers[logs]"],
            id="a container",
        ),
        pytest.param(
            in_pods(**{"f:nodeSelector": {".": {}, "f:disk": {}, "f:example.com/zone": {}}, "f:hostNetwork": {}}),
            [
                "spec.template.spec.hostNetwork",
                "spec.template.spec.nodeSelector.disk",
                "spec.template.spec.nodeSelector[example.com/zone]",
            ],
            id="entries of a map that we do not have, and a field",
        ),
        pytest.param(
            {
                "f:spec": {
                    "f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:port": {}}},
                    "f:set": {'v:"x"': {}},
                }
            },
            ["spec.ports[80,TCP]", "spec.set[x]"],
            id="elements of lists by several keys, and by value",
        ),
        pytest.param(OURS, [], id="what the operator sets as well it puts back"),
        pytest.param({"f:metadata": {"f:annotations": {"f:team": {}}}}, [], id="nothing of the spec"),
        pytest.param(
            {"f:spec": {"f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}}},
            [],
            id="a restart that was asked for",
        ),
    ],
)
def test_fields_that_only_another_manager_owns(fields: scene.Json, paths: list[str]) -> None:
    found = list(foreign_fields(edited(entry("kubectl-edit", fields))))

    assert found == ([("kubectl-edit", "2026-01-01T00:07:00Z", paths)] if paths else [])


def test_what_is_written_into_a_status_is_nobodys_edit() -> None:
    of_status = entry("kube-controller-manager", {"f:spec": {"f:paused": {}}}, subresource="status")

    assert list(foreign_fields(edited(of_status))) == []


def test_why_names_the_manager_the_fields_and_what_to_do() -> None:
    made = edited(entry("kubectl-edit", in_pods(**{f"f:field{number}": {} for number in range(7)})))

    service = {**scene.body(), "status": {}}
    lines = list(tell(diagnose(Evidence(service=service, children=[made], now="2026-01-01T00:10:00Z"))))

    section = lines[lines.index("set by others") :]
    assert section[1].startswith("  deployment/chat: kubectl-edit (3 min ago) set spec.template.spec.field0, spec.")
    assert section[1].endswith("field4 and 2 more")
    assert "`kubectl -n llm edit deployment chat`" in section[2]


def test_why_says_nothing_where_all_fields_are_ours() -> None:
    answer = diagnose(Evidence(service={**scene.body(), "status": {}}, children=[edited()]))

    assert answer.foreign_fields == ()
