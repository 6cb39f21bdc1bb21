"""`kubectl sluice drain`: a pod takes no new request and its streams run to their end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import monotonic, sleep

import click

from sluice_operator.cli.kubectl import Kubectl, checked_name
from sluice_operator.cli.where import in_cluster
from sluice_operator.errors import Unreachable
from sluice_operator.records import source
from sluice_sidecar.telemetry.state import GateState

_EVERY_S = 1.0
# A forward that breaks this often in a row is a pod that has gone.
_MISSED = 5


@click.command()
@click.argument("pod", metavar="POD")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1, 7200),
    default=900,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the streams.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
@in_cluster
def drain(kubectl: Kubectl, pod: str, timeout_s: int, *, as_json: bool) -> int:
    """Shut the gate of POD and wait until its streams have ended.

    New requests go to other pods; what still comes is answered 503. Streams run on for at most rollout.drainTimeout, as
    on a deletion. The pod stays, and takes nothing any more: delete it then, and its Deployment makes another.

    Exit codes: 0 nothing runs there any more; 1 streams still run; 2 wrong usage, no such pod, no cluster.
    """
    # The gate's own signal, as its preStop hook sends it: whoever may exec into a pod may drain it, nobody else.
    kubectl.read("exec", checked_name(pod), "-c", "gate", "--", "/bin/sh", "-c", "kill -USR1 1")
    inside, is_drained = -1, False
    with kubectl.forwarded(pod) as url:
        for state in _states(url, timeout_s):
            left = state.admission.ledger_requests + state.admission.waiting_at_door
            if left != inside and not as_json:
                click.echo(f"{pod}: {left:,} request{'' if left == 1 else 's'} inside", err=True)
            inside = left
            if is_drained := state.draining and not left:
                break
    if as_json:
        click.echo(json.dumps({"pod": pod, "drained": is_drained, "inside": max(0, inside)}))
    elif is_drained:
        click.echo(f"{pod} is drained. `kubectl delete pod {pod}` has its Deployment make another.")
    elif inside:
        click.echo(f"sluice: {pod} still has {inside:,} requests after {timeout_s} s; it goes on draining", err=True)
    else:
        click.echo(f"sluice: the gate of {pod} has not begun to drain after {timeout_s} s: see its log", err=True)
    return 0 if is_drained else 1


def _states(url: str, timeout_s: float) -> Iterator[GateState]:
    """What the gate says, once a second until the time is over.

    Raises:
        Unreachable: it says nothing several times in a row.
    """
    deadline, missed = monotonic() + timeout_s, 0
    while True:
        try:
            state = source.state_of(url)
        except Unreachable:
            missed += 1
            if missed >= _MISSED:
                raise
        else:
            missed = 0
            yield state
        if monotonic() >= deadline:
            return
        sleep(_EVERY_S)
