"""The schema for editors says what the API server will say, as far as JSON Schema can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import operator_scene as scene
from sluice_operator.resource import manifest

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "crds/inferenceservice.schema.json").read_text())
VALID = sorted(path for path in scene.EXAMPLES.glob("*.yaml") if not path.name.startswith("invalid-"))
# Cross-checks are the API server's; these break types, bounds or names.
BROKEN = [
    "invalid-block-of-twelve", "invalid-duration-without-unit", "invalid-name-too-long", "invalid-name-with-dot",
    "invalid-no-model", "invalid-percent-of-hundred", "invalid-quota-of-nothing", "invalid-relative-path",
    "invalid-replicas-as-text", "invalid-secret-name", "invalid-strategy-unknown", "invalid-nine-devices",
    "invalid-unknown-field", "invalid-class-unknown", "invalid-victim-unknown", "invalid-capacity-of-nothing",
]  # fmt: skip


def problems(path: Path) -> list[str]:
    validator = jsonschema.Draft7Validator(SCHEMA)
    return [
        error.message for document in yaml.safe_load_all(path.read_text()) for error in validator.iter_errors(document)
    ]


def test_it_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_a_good_example_has_no_red_line(path: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_type_bound_or_name_has_one(name: str) -> None:
    assert problems(scene.EXAMPLES / f"{name}.yaml")


def test_the_name_is_held_to_the_rule_of_the_definition() -> None:
    root = manifest.load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rule = root["x-kubernetes-validations"][0]["rule"]
    name: dict[str, Any] = SCHEMA["properties"]["metadata"]["properties"]["name"]

    assert f"<= {name['maxLength']} " in rule
    assert f"matches('{name['pattern']}')" in rule
