"""Resources that another version of the definition took, and statuses that another version of the operator wrote."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import operator_scene as scene
from sluice_operator.errors import InvalidSpec
from sluice_operator.rendering import render
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse, understood
from sluice_operator.status.situation import Situation
from sluice_operator.status.status import compute, condition

Json = dict[str, Any]
NOW = "2026-01-01T00:00:00Z"
FULL = scene.body(yaml.safe_load((scene.EXAMPLES / "full.yaml").read_text())["spec"])
# What is taken over as it is and judged by the API server: its types are Kubernetes' own.
KUBERNETES_OWN = {"podTemplate", "resources"}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if not path and key in KUBERNETES_OWN:
            continue
        yield (*path, key)
        yield from paths(child, (*path, key))


PLACES = list(paths(FULL["spec"]))


def changed(path: tuple[Any, ...], value: Any) -> Json:
    """The full resource with one value replaced, or removed where it is `...`."""
    body = copy.deepcopy(FULL)
    parent: Any = body["spec"]
    for key in path[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return body


@pytest.mark.parametrize(
    "junk", [..., None, 7, "a text", [], {}], ids=["absent", "null", "number", "text", "list", "object"]
)
def test_a_field_of_another_version_is_understood_or_named_and_never_a_traceback(junk: Any) -> None:
    assert len(PLACES) > 60

    for path in PLACES:
        refusal = refused(changed(path, junk))

        assert refusal is None or refusal.startswith("spec"), path


def refused(body: Json) -> str | None:
    """Why a resource is not understood; None where it is."""
    try:
        spec = parse(body)
        with understood():
            render.objects(spec, scene.IMAGES)
    except InvalidSpec as error:
        return str(error)
    return None


def test_a_field_that_is_not_known_yet_changes_nothing() -> None:
    newer = copy.deepcopy(FULL)
    newer["spec"]["future"] = {"level": 11}
    newer["spec"]["scheduling"]["future"] = True

    assert render.objects(parse(newer), scene.IMAGES) == render.objects(parse(FULL), scene.IMAGES)


def test_a_manifest_of_an_older_version_is_filled_in() -> None:
    body = manifest.check({**scene.body(), "spec": copy.deepcopy(scene.MINIMAL_SPEC)}, "test")

    assert parse(body) == scene.spec()


def statuses() -> Iterator[Json]:
    """What an older or newer operator may have left behind."""
    pod = scene.pod()
    written = compute(
        Situation(
            generation=1, spec=scene.spec(), observed=scene.observed(pod), gates={"chat-new-1": scene.gate_state()}
        ),
        {},
        NOW,
    )
    yield {}
    for key in written:
        yield {name: value for name, value in written.items() if name != key}
    older = copy.deepcopy(written)
    older["conditions"] = [{"type": "Ready", "status": "True", "reason": "Serving", "message": ""}]
    yield older
    newer = copy.deepcopy(written)
    newer["conditions"].append(
        {"type": "Future", "status": "True", "reason": "X", "message": "", "lastTransitionTime": NOW}
    )
    newer["future"] = 7
    yield newer


def test_a_status_of_another_version_is_replaced_whole() -> None:
    pod = scene.pod()
    seen = Situation(
        generation=1, spec=scene.spec(), observed=scene.observed(pod), gates={"chat-new-1": scene.gate_state()}
    )

    for before in statuses():
        after = compute(seen, before, "2026-01-01T00:01:00Z")

        assert condition(after, "Ready")["status"] == "True"
        assert condition(after, "Ready")["lastTransitionTime"]
        assert condition(after, "Future") == {}
        assert "future" not in after
