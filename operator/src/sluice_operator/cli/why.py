"""`kubectl sluice why`: one answer from conditions, events, last words, headroom and the scheduler's reasons."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from sluice_engine import codec
from sluice_operator.cli.kubectl import SERVICES, Kubectl
from sluice_operator.cli.where import in_cluster
from sluice_operator.errors import OperatorError
from sluice_operator.records import source
from sluice_operator.rendering.labels import SERVICE_LABEL
from sluice_operator.status import diagnosis
from sluice_operator.status.diagnosis import Evidence, diagnose, tell
from sluice_sidecar.telemetry.state import GateState

# Each forward is a process and a connection; the pods of a service say much the same.
_MOST_GATES = 4
_LOG_LINES = 5
# What people edit by hand, and what other tools write into.
_CHILDREN = "deployments.apps,services,poddisruptionbudgets.policy"


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@in_cluster
def why(kubectl: Kubectl, name: str, *, as_json: bool) -> int:
    """Say why the service NAME is as it is, and what to do.

    Joins its conditions and failure, its pods and what the scheduler says of them, the headroom of their gates,
    fields of its objects that others set, warnings, and the last lines of containers that ended.

    Exit codes: 0 all is well; 1 it is not; 2 wrong usage, no such service, no cluster.
    """
    answer = diagnose(gather(kubectl, name))
    click.echo(json.dumps(codec.encode(answer), indent=2) if as_json else "\n".join(tell(answer)))
    return 0 if answer.is_well else 1


def gather(kubectl: Kubectl, name: str) -> Evidence:
    """All that can be found out about a service; what cannot be read is left out, but for the service itself.

    Raises:
        InvalidSettings, Unreachable: there is no such service, or no cluster.
    """
    service = kubectl.get(SERVICES, name)
    selector = f"{SERVICE_LABEL}={name}"
    pods: Sequence[dict[str, Any]] | None = None
    owners: Sequence[dict[str, Any]] = ()
    events: Sequence[dict[str, Any]] = ()
    with contextlib.suppress(OperatorError):
        pods = kubectl.list("pods", "-l", selector)
    with contextlib.suppress(OperatorError):
        owners = kubectl.list("replicasets", "-l", selector)
    children: Sequence[dict[str, Any]] = ()
    with contextlib.suppress(OperatorError):
        children = kubectl.list(_CHILDREN, "-l", selector, "--show-managed-fields")
    with contextlib.suppress(OperatorError):
        events = kubectl.list("events")
    about = {item["metadata"].get("uid") for item in (service, *(pods or ()), *owners)}
    return Evidence(
        service=service,
        pods=pods,
        children=children,
        events=[event for event in events if event["involvedObject"].get("uid") in about],
        gates=_gates(kubectl, pods or ()),
        logs=_logs(kubectl, pods or ()),
        now=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _gates(kubectl: Kubectl, pods: Sequence[Mapping[str, Any]]) -> dict[str, GateState]:
    running = [pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"][:_MOST_GATES]

    def ask(pod: str) -> GateState | None:
        with contextlib.suppress(OperatorError), kubectl.forwarded(pod) as url:
            return source.state_of(url)
        return None

    with ThreadPoolExecutor(max_workers=_MOST_GATES) as threads:
        states = dict(zip(running, threads.map(ask, running), strict=True))
    return {pod: state for pod, state in states.items() if state is not None}


def _logs(kubectl: Kubectl, pods: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    found = {}
    for pod, container, is_previous in diagnosis.ended_containers(pods):
        words = ["logs", pod, "-c", container, f"--tail={_LOG_LINES}", *(["--previous"] if is_previous else [])]
        with contextlib.suppress(OperatorError):
            lines = [line for line in kubectl.read(*words).splitlines() if line.strip()]
            found[f"{pod}/{container}"] = lines
    return found
