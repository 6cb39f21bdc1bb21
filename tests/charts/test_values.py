"""Values that the chart refuses, and what Helm then says: the value's name and what it should be."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from charts.helm import CHART, Helm


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        pytest.param(
            "--set=crds.install=maybe", ("/crds/install", "got string, want boolean"), id="a word for a switch"
        ),
        pytest.param(
            "--set=images.engine.tag=15", ("/images/engine/tag", "got number, want string"), id="a number for a tag"
        ),
        pytest.param("--set=images.gate.digest=abc", ("/images/gate/digest", "sha256"), id="a digest that is none"),
        pytest.param(
            "--set=watchNamespaces=team-a",
            ("/watchNamespaces", "got string, want array"),
            id="one namespace for a list",
        ),
        pytest.param(
            "--set=watchNamespaces={Team_A}", ("/watchNamespaces/0", "pattern"), id="a namespace that cannot exist"
        ),
        pytest.param(
            "--set=logLevel=loud", ("/logLevel", "'Debug', 'Info', 'Warning', 'Error'"), id="an unknown level"
        ),
        pytest.param(
            "--set=images.pullPolicy=Sometimes", ("/images/pullPolicy", "'Always'"), id="an unknown pull policy"
        ),
        pytest.param("--set=copies=2", ("copies",), id="an unknown value"),
        pytest.param(
            "--set=images.operator.repo=x", ("/images/operator", "repo"), id="an unknown value inside a group"
        ),
        pytest.param("--set=resources.limit.cpu=1", ("/resources", "limit"), id="a misspelt limit"),
        pytest.param(
            "--set=podLabels.team=1", ("/podLabels/team", "got number, want string"), id="a number for a label"
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(helm: Helm, argument: str, said: tuple[str, ...]) -> None:
    refusal = helm.refusal(argument)

    assert all(words in refusal for words in said), refusal


def objects_in(schema: Any) -> list[dict[str, Any]]:
    """Every object schema with named properties, at any depth."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    here = [schema] if isinstance(schema, dict) and isinstance(schema.get("properties"), dict) else []
    return here + [found for one in inner for found in objects_in(one)]


def test_no_group_of_values_accepts_an_unknown_one() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert all(group.get("additionalProperties") is False for group in objects_in(schema))


def test_every_value_has_a_place_in_the_schema_and_a_file_of_fewer_than_150_lines() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert len(text.splitlines()) < 150
    assert set(schema["properties"]) - {"global"} == set(yaml.safe_load(text))


def test_every_value_has_a_description_for_editors() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def bare(node: dict[str, Any], path: str) -> list[str]:
        found = []
        for name, field in node.get("properties", {}).items():
            if "properties" in field:
                found += bare(field, f"{path}.{name}")
            elif not field.get("description") and not has_parts(schema, field) and path not in OWN_WORDS:
                found.append(f"{path}.{name}")
        return found

    assert bare(schema, "") == []
    assert bare(schema["$defs"]["image"], "$defs.image") == []


OWN_WORDS = {".resources"}
"""Kubernetes' own types: the group is described, its parts are Kubernetes'."""


def has_parts(schema: dict[str, Any], field: dict[str, Any]) -> bool:
    """Whether a field points to a group whose parts are described."""
    return "properties" in schema["$defs"].get(field.get("$ref", "").rsplit("/", 1)[-1], {})
