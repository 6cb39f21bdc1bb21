"""What `sluice run` takes of a pod's template, what it refuses by name, and what it says has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import operator_scene as scene
from sluice_operator.cli import main
from sluice_operator.local.environment import environment, refusals, with_model, without_meaning


def _template(**podTemplate: Any) -> Any:  # noqa: N803  # the manifest's own name
    return scene.spec({"podTemplate": podTemplate})


@pytest.mark.parametrize(
    ("template", "names"),
    [
        pytest.param(
            {"engine": {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
            ["spec.podTemplate.engine.env[0].valueFrom: its value is in a cluster"],
            id="a-value-from-a-secret",
        ),
        pytest.param(
            {"engine": {"env": [{"name": "A", "valueform": {}}]}},
            ["spec.podTemplate.engine.env[0].valueform: is unknown"],
            id="a-misspelt-key",
        ),
        pytest.param(
            {"engine": {"envFrom": [{"configMapRef": {"name": "x"}}, {"secretRef": {"name": "y"}}]}},
            ["spec.podTemplate.engine.envFrom[0]: is in a cluster", "spec.podTemplate.engine.envFrom[1]"],
            id="two-sources-of-variables",
        ),
        pytest.param(
            {"volumes": [{"name": "models", "emptyDir": {}}]},
            ["spec.podTemplate.volumes[0] (models): no volume is mounted"],
            id="a-volume",
        ),
        pytest.param(
            {"engine": {"volumeMounts": [{"name": "models", "mountPath": "/models"}]}},
            ["spec.podTemplate.engine.volumeMounts[0] (models): no volume is mounted"],
            id="a-mount",
        ),
        pytest.param({"engine": {"env": [{"name": "A", "value": "1"}, {"name": "B"}]}}, [], id="plain-variables"),
        pytest.param({}, [], id="nothing"),
    ],
)
def test_what_a_local_process_cannot_have_is_refused_by_its_field(template: dict[str, Any], names: list[str]) -> None:
    found = refusals(_template(**template))

    assert len(found) == len(names)
    assert all(problem.startswith(name) for problem, name in zip(found, names, strict=True))


def test_plain_variables_are_set_as_kubernetes_would() -> None:
    env = [
        {"name": "ROOT", "value": "/srv"},
        {"name": "EMPTY"},
        {"name": "CACHE", "value": "$(ROOT)/cache$(EMPTY)"},
        {"name": "LITERAL", "value": "$$(ROOT) $(LATER)"},
        {"name": "LATER", "value": "x"},
    ]

    assert environment(_template(engine={"env": env})) == {
        "ROOT": "/srv",
        "EMPTY": "",
        "CACHE": "/srv/cache",
        "LITERAL": "$(ROOT) $(LATER)",
        "LATER": "x",
    }


def test_every_field_of_the_full_example_is_taken_refused_or_named() -> None:
    spec = scene.example("full")

    named = {line.partition("[")[0].partition(":")[0].rpartition(".")[2] for line in refusals(spec)}
    named |= {field.rpartition(".")[2] for field in without_meaning(spec)}

    in_template = set(spec.pod_template) - {"engine"} | set(spec.pod_template["engine"]) - {"env"}
    assert in_template <= named
    assert {"replicas", "image", "resources"} <= named


def test_a_plain_manifest_has_nothing_to_be_told() -> None:
    assert without_meaning(scene.spec()) == []


def test_the_command_names_each_field_in_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = yaml.safe_load((scene.EXAMPLES / "demo-cpu.yaml").read_text())
    body["spec"]["podTemplate"] = {
        "volumes": [{"name": "models", "emptyDir": {}}],
        "engine": {"envFrom": [{"secretRef": {"name": "token"}}]},
    }
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(body))

    assert main.run(["run", str(file)]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["sluice", "sluice"]
    assert "spec.podTemplate.engine.envFrom[0]" in lines[0]
    assert "spec.podTemplate.volumes[0] (models)" in lines[1]


def test_a_claim_is_refused_until_its_files_are_named() -> None:
    spec = scene.spec({"model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "llama"}}}})

    (problem,) = refusals(spec)
    named = with_model(spec, "/mine/llama")

    assert problem.startswith("spec.model.source.persistentVolumeClaim: the claim is in a cluster")
    assert "--model" in problem
    assert refusals(named) == []
    assert named.model.source.path == "/mine/llama"
    assert named.model.served_name == spec.model.served_name


def test_a_hubs_model_runs_here_with_the_users_own_cache_and_token() -> None:
    hub = {"repository": "acme/llama", "cacheVolume": "mine", "tokenSecretRef": {"name": "hf", "key": "token"}}
    volumes = [{"name": "mine", "persistentVolumeClaim": {"claimName": "hub"}}]
    spec = scene.spec({"model": {"source": {"huggingFace": hub}}, "podTemplate": {"volumes": volumes}})

    assert refusals(spec) == []
    assert set(without_meaning(spec)) == {
        "spec.model.source.huggingFace.tokenSecretRef", "spec.model.source.huggingFace.cacheVolume",
    }  # fmt: skip
