"""No default of the definition is one for which an operator of before restarts pods.

An upgrade brings the definition first. The API server fills its defaults into what is stored, as it is read, and the
operator of before looks a moment longer: from 07c09eb to 4c4b9eb it took `model`, `runtime`, `accelerator` and
`resources` as a whole for what a step costs, parts of `podTemplate` word for word, and what it reads elsewhere for
somebody's wish. (Those of today go by the generation, docs/decisions/0017.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice_operator.resource import manifest

# What 07c09eb's definition had under `spec`, the first whose pods are to outlive every upgrade.
WRITTEN = [line.split() for line in (Path(__file__).parent / "first_fields.txt").read_text().splitlines()]
FIRST = {path for path, *_ in WRITTEN}
FILLED_IN = {path for path, *how in WRITTEN if how}
TAKEN_WHOLE = ("model", "runtime", "accelerator", "resources", "podTemplate")

SPEC: dict[str, Any] = manifest.load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below this one, with its path."""
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield f"{path}[]", node["items"]
        yield from nodes(node["items"], f"{path}[]")


def taken_for_changes(spec: dict[str, Any]) -> list[str]:
    """The fields whose default an operator of before takes for a change."""
    there = {path.removeprefix("."): node for path, node in nodes(spec)}
    later = {path for path, node in there.items() if path not in FIRST and "default" not in node}

    def is_taken(path: str) -> bool:
        # Nobody has the object in a resource of then, unless it is filled in itself.
        if any(path.startswith((f"{above}.", f"{above}[]")) for above in later):
            return False
        return path in FIRST or path.partition(".")[0] in TAKEN_WHOLE

    return [path for path, node in there.items() if "default" in node and path not in FILLED_IN and is_taken(path)]


def with_default(path: str, default: Any) -> dict[str, Any]:
    """Today's schema, with one more default."""
    changed = copy.deepcopy(SPEC)
    *above, name = path.split(".")
    node = changed
    for step in above:
        node = node["properties"].setdefault(step.removesuffix("[]"), {"type": "object", "properties": {}})
        node = node["items"] if step.endswith("[]") else node
    node["properties"].setdefault(name, {"type": "string"})["default"] = default
    return changed


def test_no_default_is_taken_for_a_change_by_an_operator_of_before() -> None:
    assert taken_for_changes(SPEC) == [], (
        "an upgrade would restart every pod of an earlier release: leave the default out, say in the description what "
        "the field is where it is left out, and give it that meaning in resource/parsing.py, as model.quantization has"
    )


@pytest.mark.parametrize(
    ("path", "is_taken"),
    [
        pytest.param("model.later", True, id="new-in-what-is-taken-whole"),
        pytest.param("model.source.image.later", True, id="new-deep-in-it"),
        pytest.param("runtime.type", True, id="as-it-was-once"),
        pytest.param("podTemplate.volumes[].later", True, id="new-in-what-goes-into-pods-word-for-word"),
        pytest.param("model.adapterLoading", True, id="an-object-that-brings-its-own-defaults"),
        pytest.param("scheduling.maxSequences", True, id="known-and-left-out-until-now"),
        pytest.param("admission.apiKeysSecretRef", True, id="a-known-object"),
        pytest.param("scheduling.later", False, id="new-where-only-what-is-known-is-read"),
        pytest.param("later", False, id="new-beside-everything"),
        pytest.param("model.adapterLoading.later", False, id="in-an-object-that-nobody-had"),
        pytest.param("model.adapters[].later", False, id="in-the-items-of-a-list-that-nobody-had"),
        pytest.param("autoscaling.later", False, id="in-another-such-object"),
        pytest.param("cache.blockTokens", False, id="another-value-of-what-was-always-filled-in"),
    ],
)
def test_which_defaults_are(path: str, *, is_taken: bool) -> None:
    assert (path in taken_for_changes(with_default(path, "any"))) is is_taken
