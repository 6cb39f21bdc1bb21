"""`kubectl sluice status`: how the services of a namespace, or one of them, are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from sluice_operator.cli.kubectl import SERVICES, Kubectl
from sluice_operator.cli.where import in_cluster
from sluice_operator.errors import InvalidSettings
from sluice_operator.status.conditions.view import condition

_COLUMNS = ("NAME", "READY", "PODS", "OPEN", "TTFT", "ITL", "KV", "SAYS")


@click.command()
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--all-namespaces", "-A", is_flag=True, help="Of every namespace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@in_cluster
def status(kubectl: Kubectl, name: str | None, *, all_namespaces: bool, as_json: bool) -> int:
    """Show how services are, or one with its conditions.

    Exit codes: 0 all are Ready; 1 one is not, or there is none; 2 wrong usage, no such service, no cluster.
    """
    if name and all_namespaces:
        raise InvalidSettings("--all-namespaces shows all services: leave NAME out, or give its --namespace")
    if name:
        services = [kubectl.get(SERVICES, name)]
    else:
        services = kubectl.list(SERVICES, *(["--all-namespaces"] if all_namespaces else []))
    told = [summary(service) for service in services]
    if as_json:
        click.echo(json.dumps(told, indent=2))
    elif not told:
        click.echo("sluice: there is no InferenceService there", err=True)
    else:
        click.echo("\n".join(table([row(one, with_namespace=all_namespaces) for one in told])))
        if name:
            click.echo("\n" + "\n".join(table([conditions_row(one) for one in told[0]["conditions"]], ())))
    return 0 if told and all(one["ready"] for one in told) else 1


def summary(service: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a service: a selection of its status, as it stands there."""
    seen = service.get("status") or {}
    metadata = service["metadata"]
    ready = condition(seen, "Ready")
    is_newest = seen.get("observedGeneration") == metadata.get("generation")
    return {
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        # What is told of an older spec says nothing about this one.
        "ready": is_newest and ready.get("status") == "True",
        "reason": ready.get("reason", "") if is_newest else "NotObserved",
        "message": ready.get("message", "") if is_newest else "the operator has not seen the newest change yet",
        "replicas": (service.get("spec") or {}).get("replicas", 1),
        "readyReplicas": seen.get("readyReplicas", 0),
        "admissionOpen": condition(seen, "AdmissionOpen").get("status") == "True",
        "door": condition(seen, "AdmissionOpen").get("message", ""),
        "measured": seen.get("measured", {}),
        "failure": seen.get("failure"),
        "conditions": list(seen.get("conditions") or ()),
    }


def row(told: Mapping[str, Any], *, with_namespace: bool) -> tuple[str, ...]:
    """A service as a line of the table."""
    measured = told["measured"]
    says = "" if told["ready"] and not told["failure"] else _said(told["reason"], told["message"])
    if told["ready"] and told["failure"]:
        says = _said(told["failure"]["reason"], told["failure"]["message"])
    elif told["ready"] and not told["admissionOpen"]:
        says = told["door"]
    kv = measured.get("kvUsagePercent")
    return (
        f"{told['namespace']}/{told['name']}" if with_namespace else told["name"],
        "yes" if told["ready"] else "no",
        f"{told['readyReplicas']}/{told['replicas']}",
        "yes" if told["admissionOpen"] else "no",
        measured.get("timeToFirstToken", "-"),
        measured.get("interTokenLatency", "-"),
        "-" if kv is None else f"{kv} %",
        " ".join(says.split()) or "-",
    )


def _said(reason: str, message: str) -> str:
    """The message, with the reason where it does not have it already."""
    return message if reason in message else f"{reason}: {message}"


def conditions_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    """A condition as a line."""
    return one["type"], one["status"], one["reason"], " ".join(one["message"].split())


def table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...] = _COLUMNS) -> list[str]:
    """Lines with aligned columns; the last column is as long as it is."""
    all_rows = [head, *rows] if head else list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*all_rows, strict=True)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(one[:-1], widths, strict=False)), one[-1]])
        for one in all_rows
    ]
