"""`sluice top`: the live batch, budgets, KV blocks and queue of a pod in a terminal."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.live import Live

from sluice_engine import codec
from sluice_operator.cli.kubectl import Kubectl
from sluice_operator.cli.numbers import Number
from sluice_operator.cli.where import in_cluster
from sluice_operator.errors import InvalidSettings, Unreachable
from sluice_operator.records import source
from sluice_operator.records.frame import frame
from sluice_operator.records.steps import Step
from sluice_operator.rendering.labels import SERVICE_LABEL
from sluice_operator.status import diagnosis
from sluice_sidecar.telemetry.state import GateState

# A pod that misses so many looks in a row has gone; fewer may be a busy machine.
_MISSED = 3
_TIMEOUT = aiohttp.ClientTimeout(total=2)
# Rows of a frame that are no requests.
_OTHER_ROWS = 20
_ONCE_REQUESTS = 20
_IS_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

Show = Callable[[GateState, Step | None, str], None]


@click.command()
@click.argument("where", metavar="URL|NAME")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--every",
    "every_s",
    type=Number(0.1, 60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two frames.",
)
@click.option("--pod", default="", metavar="POD", help="Which pod of NAME. Left out, the first that serves.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document a frame, one a line.")
@in_cluster
def top(kubectl: Kubectl, where: str, every_s: float, pod: str, *, once: bool, as_json: bool) -> int:
    """Show what a pod does now, until Ctrl-C.

    URL is a gate's admin port (9090). NAME is an InferenceService, whose pod is reached through a forwarded port.

    Exit codes: 0 ended by Ctrl-C, or one frame shown; 1 the pod has gone; 2 wrong usage, or nobody answers.
    """
    console = Console()
    if not (once or as_json or console.is_terminal):
        raise InvalidSettings("standard output is no terminal: --once prints one frame, --json a document a line")
    with _address(kubectl, where, pod) as url:
        try:
            return asyncio.run(_watch(url, every_s, console, once=once, as_json=as_json))
        except KeyboardInterrupt:
            return 0


def _address(kubectl: Kubectl, where: str, pod: str) -> AbstractContextManager[str]:
    """The admin port that a URL names, or of a service's pod."""
    if source.is_url(where) or not _IS_NAME.fullmatch(where):
        if pod or kubectl != Kubectl():
            raise InvalidSettings("--pod, --namespace, --context and --kubeconfig belong to a NAME, not to a URL")
        return nullcontext(source.base_url(where))
    pods = kubectl.list("pods", "-l", f"{SERVICE_LABEL}={where}")
    running = [one for one in pods if one.get("status", {}).get("phase") == "Running"]
    # Those that serve first.
    running.sort(key=lambda one: (not diagnosis.is_ready(one), one["metadata"]["name"]))
    names = [one["metadata"]["name"] for one in running]
    if pod and pod not in names:
        raise InvalidSettings(f"--pod {pod} is no running pod of {where}; there are {', '.join(names) or 'none'}")
    if not names:
        raise InvalidSettings(f"no pod of {where} runs: `kubectl sluice why {where}` says why")
    return kubectl.forwarded(pod or names[0])


async def _watch(url: str, every_s: float, console: Console, *, once: bool, as_json: bool) -> int:
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        # Before the screen is taken: whoever gives a wrong address reads one line.
        state, step = await _look(session, url)
        holder, show = _screen(console, once=once, as_json=as_json)
        with holder:
            show(state, step, "")
            missed = 0
            while not once:
                await asyncio.sleep(every_s)
                try:
                    state, step = await _look(session, url)
                except Unreachable as error:
                    missed += 1
                    if missed >= _MISSED:
                        break
                    if not as_json:
                        show(state, step, str(error))
                    continue
                missed = 0
                show(state, step, "")
    if once:
        return 0
    click.echo(f"sluice: {url} has gone", err=True)
    return 1


def _screen(console: Console, *, once: bool, as_json: bool) -> tuple[AbstractContextManager[Any], Show]:
    """What holds the screen meanwhile, and how a frame is shown."""
    if as_json:
        return nullcontext(), lambda state, step, _: click.echo(json.dumps(document(state, step)))
    if once:
        return nullcontext(), lambda state, step, note: console.print(
            frame(state, step, most_requests=_ONCE_REQUESTS, width=console.width, note=note)
        )
    live = Live(console=console, screen=True, auto_refresh=False)

    def show(state: GateState, step: Step | None, note: str) -> None:
        rows = max(1, console.size.height - _OTHER_ROWS)
        live.update(frame(state, step, most_requests=rows, width=console.width, note=note), refresh=True)

    return live, show


async def _look(session: aiohttp.ClientSession, url: str) -> tuple[GateState, Step | None]:
    state = await source.fetch_state(session, url)
    steps = await source.fetch_steps(session, url, 1)
    return state, steps[-1] if steps else None


def document(state: GateState, step: Step | None) -> dict[str, Any]:
    """A frame as JSON: the gate's state, and the last step."""
    return {"state": codec.encode(state), "step": codec.encode(step)}
