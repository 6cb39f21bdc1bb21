"""Quantities that mean nothing, or are none: what is accepted, and the sentence that refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import operator_scene as scene
from sluice_operator.errors import InvalidManifest
from sluice_operator.resource import manifest
from sluice_operator.resource.spec import ServiceSpec


def read(changes: dict[str, Any], example: str = "minimal") -> ServiceSpec:
    document = yaml.safe_load((scene.EXAMPLES / f"{example}.yaml").read_text())
    for part, fields in changes.items():
        document["spec"][part] = {**document["spec"].get(part, {}), **fields}
    return manifest.read_spec(document, "file.yaml")


def problems(changes: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(InvalidManifest) as refused:
        read(changes)
    return refused.value.problems


@pytest.mark.parametrize("nothing", [0, "0", "0Gi", "0M"])
@pytest.mark.parametrize("resume", ["Auto", "Recompute"])
def test_no_room_for_preempted_requests_is_none_as_if_it_were_left_out(nothing: Any, resume: str) -> None:
    preemption = {"preemption": {"resume": resume}}

    spec = read({"cache": {"hostSwapCapacity": nothing}, "scheduling": preemption})

    assert spec == read({"scheduling": preemption})
    assert spec.cache.host_swap_bytes is None


def test_an_engine_that_keeps_nothing_on_the_host_is_told_so() -> None:
    assert read({"cache": {"hostSwapCapacity": "0"}}, "vllm").cache.host_swap_bytes is None


@pytest.mark.parametrize("nothing", [0, "0", "0Gi"])
def test_where_state_is_to_be_swapped_none_is_too_little(nothing: Any) -> None:
    found = problems({"cache": {"hostSwapCapacity": nothing}, "scheduling": {"preemption": {"resume": "Swap"}}})

    assert "cache.hostSwapCapacity must be set when scheduling.preemption.resume is Swap" in found[0]


@pytest.mark.parametrize("field", ["capacity", "hostSwapCapacity"])
@pytest.mark.parametrize("text", ["", "-1Gi", "1.5Gi", "1 Gi", "1GB", "two", "01Gi", "1e9"])
def test_what_is_no_size_is_refused_with_a_sentence(field: str, text: str) -> None:
    (problem,) = problems({"cache": {field: text}})

    assert problem.startswith(f"spec.cache.{field}: Invalid value: cache.{field} must be a whole number")


@pytest.mark.parametrize("kind", ["requests", "limits"])
@pytest.mark.parametrize("text", ["8GB", "500 m", "1,5Gi", "-1", "lots", ""])
def test_resources_that_are_no_quantity_are_refused_before_the_pods_are(kind: str, text: str) -> None:
    (problem,) = problems({"resources": {kind: {"memory": text}}})

    assert problem.startswith(f"spec.resources.{kind}.memory: Invalid value: {text!r}: must be a quantity")


@pytest.mark.parametrize("value", [2, "2", "1.5Gi", ".5", "500m", "100u", "1e3", "1E3", "5E", "+1", "3."])
def test_any_quantity_of_kubernetes_will_do_there(value: Any) -> None:
    assert read({"resources": {"limits": {"cpu": value}}}).resources["limits"] == {"cpu": value}
