"""Rights: which ones the chart grants to the operator, and which ones its requests used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.testnode.audit import Request

CREATED = 201

Right = str
"""`verb resource.group`, with the subresource after the resource: `patch inferenceservices/status.sluice.dev`."""

RECORD = Path(__file__).with_name("used.json")
"""What was used in a run of each tier, as the API server's audit log has it; SLUICE_GOLDEN=write writes it anew."""

NEVER_USED: Mapping[Right, str] = {}
"""Granted, and yet used in no run of the tests; each with its reason."""


def right(verb: str, group: str, resource: str) -> Right:
    """The right's name."""
    return f"{verb} {resource}.{group}" if group else f"{verb} {resource}"


def granted(objects: Iterable[Mapping[str, Any]], name: str) -> set[Right]:
    """What the roles of these objects grant that are the operator's: those named so, or so and with a suffix."""
    found = set()
    for one in objects:
        if one["kind"] not in {"Role", "ClusterRole"} or one["metadata"]["name"] not in {name, f"{name}-lease"}:
            continue
        for rule in one["rules"]:
            assert rule.keys() <= {"apiGroups", "resources", "verbs", "resourceNames"}
            found |= {
                right(verb, group, resource)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return found


def used(requests: Iterable[Request]) -> set[Right]:
    """What these requests needed; whoever is signed in may ask for what is no resource."""
    found = set()
    for one in requests:
        if one.resource:
            found.add(right(one.verb, one.group, one.resource))
            # An apply that makes the object needs both: the server asks for the second when it knows.
            if (one.verb, one.code) == ("patch", CREATED):
                found.add(right("create", one.group, one.resource))
    return found


def recorded() -> dict[str, Sequence[Right]]:
    """Rights by the tier in which they were used."""
    found: dict[str, Sequence[Right]] = json.loads(RECORD.read_text())
    return found
