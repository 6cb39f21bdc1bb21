"""`sluice run`: serve a manifest on this machine, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import click

from sluice_operator.errors import InvalidManifest, InvalidSettings
from sluice_operator.local.environment import refusals, with_model, without_meaning
from sluice_operator.local.pod import LocalPod
from sluice_operator.rendering.foreign.runtime import command, is_foreign
from sluice_operator.resource import manifest
from sluice_operator.resource.spec import ServiceSpec

_HOST = "127.0.0.1"
# A terminal that is closed hangs up.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="any free port",
    help="Where requests go, on 127.0.0.1.",
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="any free port",
    help="Where /state and /metrics are, on 127.0.0.1.",
)
@click.option(
    "--model", metavar="PATH", help="A folder or GGUF file of this machine, in place of what model.source names."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document once it is ready, instead of sentences.")
def run(file: str, port: int, admin_port: int, model: str | None, *, as_json: bool) -> int:
    """Serve a manifest on this machine until Ctrl-C.

    FILE holds one InferenceService; "-" is standard input. The engine and the gate are local processes that get the
    very files that they would get in a pod. Variables of podTemplate.engine.env are set; volumes, envFrom and values
    that only a cluster has are refused by name; --model stands in for a model that is on a claim. Ctrl-C lets open
    streams end, for at most rollout.drainTimeout; a second one ends at once.

    Exit codes: 0 stopped after it served; 1 it failed, or was stopped before it was ready; 2 wrong usage, a file or
    rule that is broken, or a port in use.
    """
    specs = manifest.read_specs(file)
    if len(specs) > 1:
        raise InvalidManifest(file, [f"holds {len(specs)} InferenceServices: one can be run at a time"])
    spec = specs[0] if model is None else with_model(specs[0], str(Path(model).absolute()))
    if missing := [*refusals(spec), *_missing_program(spec)]:
        for problem in missing:
            click.echo(f"sluice: {' '.join(f'{file}: {spec.name}: {problem}'.split())}", err=True)
        return 2
    _require_free({"--port": port, "--admin-port": admin_port})
    if fields := without_meaning(spec):
        click.echo(f"{spec.name}: one engine and one gate run here; of no effect: {', '.join(fields)}", err=True)
    return asyncio.run(_serve(LocalPod(spec, port=port, admin_port=admin_port), as_json=as_json))


def _missing_program(spec: ServiceSpec) -> list[str]:
    """Why another engine cannot be started here; empty where it can, or where the engine is our own."""
    if not is_foreign(spec):
        return []
    if spec.runtime == "SGLang":
        return ["spec.runtime.type: SGLang is not started by this command: start it, and a gate before it, by hand"]
    program = command(spec)[0]
    if shutil.which(program):
        return []
    return [f"spec.runtime.type: the program {program} is not on the PATH: install vLLM, or leave runtime out"]


def _require_free(ports: Mapping[str, int]) -> None:
    """See that each chosen port can be listened on.

    Raises:
        InvalidSettings: one cannot.
    """
    with contextlib.ExitStack() as opened:
        for option, port in ports.items():
            if not port:
                continue
            probe = opened.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
                probe.listen()
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE
                problem = "is in use" if is_taken else f"cannot be listened on ({error.strerror})"
                raise InvalidSettings(f"port {port} on {_HOST} {problem}: choose another with {option}") from error


async def _serve(pod: LocalPod, *, as_json: bool) -> int:
    stopped = asyncio.Event()
    main = asyncio.current_task()
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        # The second signal does not wait for streams; one after it must not interrupt what ends the programs.
        if signals == 2 and main is not None:
            main.cancel()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            loop.add_signal_handler(number, stop)
    try:
        async with pod:
            if not await _until_ready(pod, stopped):
                await pod.stop(drain=False)
                _tell("stopped before it was ready")
                return 1
            await _greet(pod.spec, pod, as_json=as_json)
            failed = asyncio.create_task(pod.wait_failed())
            waiting = asyncio.create_task(stopped.wait())
            done, _ = await asyncio.wait([failed, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if failed in done:
                failed.result()
            failed.cancel()
            _tell("stopping: open streams may end first (Ctrl-C again: at once)")
    except asyncio.CancelledError:
        _tell("ended at once")
        return 1
    _tell("stopped")
    return 0


def _tell(text: str) -> None:
    """A line for whoever reads it. Where nobody does any more, as in a terminal that was closed, it goes on."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


async def _until_ready(pod: LocalPod, stopped: asyncio.Event) -> bool:
    """Wait until the pod is ready; False when it was told to stop before that."""
    ready = asyncio.create_task(pod.wait_ready(progress=lambda text: _tell(f"{pod.spec.name}: {text}")))
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait([ready, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not ready.done():
        ready.cancel()
        return False
    ready.result()
    return True


async def _greet(spec: ServiceSpec, pod: LocalPod, *, as_json: bool) -> None:
    name = spec.model.served_name
    state = await pod.state()
    limits = state.engine.derived if state and state.engine else None
    if limits and not limits.feasible:
        _tell(f"{spec.name}: this machine cannot keep the promise: {limits.reason}")
    if as_json:
        click.echo(json.dumps({"model": name, "url": pod.url, "admin_url": pod.admin_url}))
        return
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
    )
    click.echo(
        f"{name} is served at {pod.url}/v1 (state and metrics: {pod.admin_url}). Try:\n\n"
        f"  curl -N {pod.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
        "Ctrl-C ends it."
    )
