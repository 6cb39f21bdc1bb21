"""The CRD: sane, small, described, and honest about its examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import operator_scene as scene
from sluice_operator.errors import InvalidManifest
from sluice_operator.resource import manifest, schema
from sluice_operator.resource.cel import compile_rule
from sluice_operator.resource.parsing import parse

CRD = manifest.load_crd()
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
VALID = sorted(path for path in scene.EXAMPLES.glob("*.yaml") if not path.name.startswith("invalid-"))
INVALID = sorted(scene.EXAMPLES.glob("invalid-*.yaml"))


def nodes(node: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below the root, with its path."""
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield f"{path}[]", node[key]
            yield from nodes(node[key], f"{path}[]")


NODES = dict(nodes())


def expectation(path: Path) -> str:
    first, _, _ = path.read_text().partition("\n")
    assert first.startswith("# expect: ")
    return first.removeprefix("# expect: ")


def test_it_is_small_enough_for_every_way_of_applying_it() -> None:
    # Client-side apply keeps a copy in an annotation, which may have 256 KiB; we stay far below.
    assert len(json.dumps(CRD)) < 64 * 1024


def test_there_is_one_served_and_stored_version() -> None:
    (version,) = CRD["spec"]["versions"]

    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    assert CRD["metadata"]["name"] == f"{CRD['spec']['names']['plural']}.{CRD['spec']['group']}"
    assert CRD["spec"]["names"]["shortNames"] == ["sluice"]
    assert CRD["spec"]["names"]["categories"] == ["sluice"]


@pytest.mark.parametrize("path", [path for path in NODES if not path.endswith("[]") and path != ".metadata"])
def test_every_field_is_described(path: str) -> None:
    text = NODES[path].get("description", "")

    assert text.endswith((".", "%")), f"{path}: {text!r}"


@pytest.mark.parametrize("path", NODES)
def test_every_node_is_structural(path: str) -> None:
    node = NODES[path]

    assert "type" in node or node.get("x-kubernetes-int-or-string")
    assert not (node.get("properties") and node.get("additionalProperties"))
    if node.get("type") == "string" and not {"enum", "format"} & node.keys() and path not in {".apiVersion", ".kind"}:
        assert "maxLength" in node, "a rule's cost is estimated from it"
    if node.get("type") == "array":
        assert "maxItems" in node
    if "additionalProperties" in node:
        assert "maxProperties" in node


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if node.get("type") == "object"])
def test_an_optional_parent_has_an_empty_default(path: str) -> None:
    node = NODES[path]
    parent, _, name = path.rpartition(".")
    filled = [child for child in node.get("properties", {}).values() if "default" in child]
    is_required = name in (NODES.get(parent, SCHEMA).get("required") or [])
    is_choice = parent.endswith(".source") or name == "autoscaling"  # presence itself says something there
    # It came after the first upgrades: what a later definition fills in, an operator of before takes for a change.
    is_choice |= path == ".spec.model.adapterLoading"

    if filled and not is_required and not is_choice and not path.endswith("[]"):
        assert node.get("default") == {}


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if "default" in node])
def test_a_default_satisfies_its_own_schema(path: str) -> None:
    node = NODES[path]
    value = schema.with_defaults(node, node["default"])

    assert list(schema._violations(node, value, path)) == []


@pytest.mark.parametrize("path", [path for path, node in NODES.items() if "default" in node])
def test_a_default_keeps_the_rules_as_it_stands(path: str) -> None:
    """The API server takes a CRD only if it does, and fills in no further defaults first."""
    node = NODES[path]

    for rule in node.get("x-kubernetes-validations", ()):
        assert compile_rule(rule["rule"])({"self": node["default"]}) is True, rule["message"]


@pytest.mark.parametrize(
    ("path", "rule"), list(schema.rules(SCHEMA)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_rule_can_be_checked_offline_and_says_what_to_do(path: str, rule: dict[str, str]) -> None:
    compile_rule(rule["rule"])

    assert ":" in rule["message"], "the part after the colon says what to do"
    assert any(word in rule["message"] for word in ("must", "takes longer")), "the part before it names field and limit"


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_a_good_example_is_accepted_and_understood(path: Path) -> None:
    for document in manifest.read_file(str(path)):
        assert parse(document).name == document["metadata"]["name"]


@pytest.mark.parametrize("name", ["minimal", "demo-cpu"])
def test_an_example_to_begin_with_runs_on_any_node_with_the_images_of_the_chart(name: str) -> None:
    spec = scene.example(name)

    assert spec.model.source.demo is not None, "the engine's image holds it"
    assert (spec.image, spec.accelerator_count, spec.pod_template.get("volumes")) == (None, 0, None)


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_a_bad_example_is_refused_with_its_message(path: Path) -> None:
    with pytest.raises(InvalidManifest) as refused:
        manifest.read_file(str(path))

    assert [problem for problem in refused.value.problems if expectation(path) in problem], refused.value.problems


def test_each_rule_about_one_state_has_an_example_that_breaks_it() -> None:
    told = {expectation(path) for path in INVALID}

    for _, rule in schema.rules(SCHEMA):
        if "oldSelf" not in rule["rule"]:
            assert rule["message"] in told, rule["message"]


def test_the_full_example_sets_every_field() -> None:
    document = yaml.safe_load((scene.EXAMPLES / "full.yaml").read_text())

    def missing(node: dict[str, Any], value: Any, path: str) -> Iterator[str]:
        for name, child in node.get("properties", {}).items():
            if name not in value:
                yield f"{path}.{name}"
            elif child.get("type") == "object":
                yield from missing(child, value[name], f"{path}.{name}")

    assert list(missing(SCHEMA["properties"]["spec"], document["spec"], "spec")) == [
        f"spec.model.source.{other}" for other in ("persistentVolumeClaim", "huggingFace", "demo")
    ]


COST = {"fixedMicroseconds": 20_000, "decodeMicroseconds": 10_000, "perPrefillTokenNanoseconds": 35_000}


def problems(old: dict[str, Any], new: dict[str, Any], cost: dict[str, int] | None = COST) -> list[str]:
    before, after = scene.body(old), scene.body(new)
    if cost:
        before["status"] = after["status"] = {"stepCost": cost}
    return schema.problems(SCHEMA, after, before)


def slo(chunk: int | None, latency: str = "150ms", **more: str) -> dict[str, Any]:
    scheduling = {} if chunk is None else {"prefillChunkTokens": chunk}
    return {"slo": {"interTokenLatency": latency, **more}, "scheduling": scheduling}


@pytest.mark.parametrize(
    ("old", "new", "is_refused"),
    [
        pytest.param(slo(8192), slo(8192), False, id="the same spec again is accepted"),
        pytest.param(slo(8192), slo(8000), True, id="another chunk above the ceiling is refused"),
        pytest.param(slo(None), slo(3428), False, id="3,428 tokens for 150 ms are accepted"),
        pytest.param(slo(None), slo(3429), True, id="3,429 tokens for 150 ms are refused"),
        pytest.param(slo(3428), slo(3428, "100ms"), True, id="a tighter promise with the same chunk is refused"),
        pytest.param(slo(3428), slo(2000, "100ms"), False, id="2,000 tokens for 100 ms are accepted"),
        pytest.param(slo(3428), slo(None, "100ms"), False, id="a promise without a chunk is never refused"),
        pytest.param(slo(None), slo(8192, enforcement="Observe"), False, id="one that is only observed is accepted"),
        pytest.param(
            slo(8192, enforcement="Observe"), slo(8192), True, id="enforcing what was only observed is judged anew"
        ),
        pytest.param(
            slo(None),
            {**slo(8192), "model": {"source": {"image": {"path": "/models/smaller"}}}},
            False,
            id="another model is not judged by the old one's cost",
        ),
        pytest.param(slo(None), {**slo(8192), "runtime": {"image": "other"}}, False, id="nor is another runtime"),
        pytest.param(
            slo(None), {**slo(8192), "accelerator": {"resourceName": "a.b/c"}}, False, id="nor is another device"
        ),
        pytest.param(
            slo(None), {**slo(8192), "resources": {"limits": {"cpu": 8}}}, False, id="nor are other resources"
        ),
        pytest.param(slo(8192), {**slo(8192), "replicas": 4}, False, id="scaling is accepted"),
    ],
)
def test_the_measured_cost_judges_a_change(old: dict[str, Any], new: dict[str, Any], *, is_refused: bool) -> None:
    found = problems(old, new)

    assert bool(found) is is_refused
    assert all("(measured: status.stepCost)" in problem for problem in found)


@pytest.mark.parametrize(
    ("budget", "requests", "is_refused"),
    [
        pytest.param(257, 256, False, id="one token of prefill beside all decodes"),
        pytest.param(256, 256, True, id="no prefill beside all decodes"),
        pytest.param(8, 1, False, id="the least budget for one request"),
    ],
)
def test_a_budget_leaves_room_for_prefill(budget: int, requests: int, *, is_refused: bool) -> None:
    scheduling = {"tokenBudget": budget, "maxSequences": requests}
    document = {**scene.body(), "spec": {**scene.MINIMAL_SPEC, "scheduling": scheduling}}

    found = schema.problems(SCHEMA, schema.with_defaults(SCHEMA, document))

    assert bool(found) is is_refused


@pytest.mark.parametrize(
    ("ceilings", "is_refused"),
    [
        pytest.param({"standard": 90, "batch": 75}, False, id="the usual ones"),
        pytest.param({"batch": 90}, False, id="as much as the usual one of the next more urgent"),
        pytest.param({"batch": 91}, True, id="more than the usual one of the next more urgent"),
        pytest.param({"interactive": 50}, False, id="a lower one: the less urgent follow it"),
        pytest.param({"interactive": 50, "standard": 60}, True, id="more than a named one"),
        pytest.param({"standard": 99, "interactive": 99, "critical": 99}, False, id="all raised alike"),
        pytest.param({"background": 100, "critical": 100}, True, id="more than those between"),
    ],
)
def test_no_class_fills_more_than_a_more_urgent_one(ceilings: dict[str, int], *, is_refused: bool) -> None:
    classes = [{"name": name, "ceilingPercent": percent} for name, percent in ceilings.items()]
    document = {**scene.body(), "spec": {**scene.MINIMAL_SPEC, "admission": {"classes": classes}}}

    found = schema.problems(SCHEMA, schema.with_defaults(SCHEMA, document))

    assert bool(found) is is_refused


def test_before_anything_is_measured_every_chunk_is_accepted() -> None:
    assert problems(slo(None), slo(8192), cost=None) == []


def test_a_malformed_duration_is_told_once() -> None:
    document = scene.body(slo(8192))
    document["spec"]["slo"]["interTokenLatency"] = "150"
    document["status"] = {"stepCost": COST}

    (problem,) = schema.problems(SCHEMA, document, scene.body(slo(100)))

    assert "must be a duration" in problem
