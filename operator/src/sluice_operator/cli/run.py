"""`sluice run`: serve a manifest on this machine, without a cluster."""

from __future__ import annotations

import asyncio
import json
import signal

import click

from sluice_operator import manifest
from sluice_operator.errors import InvalidManifest
from sluice_operator.local import LocalPod
from sluice_operator.spec import ServiceSpec


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Where to listen on 127.0.0.1. 0: any free port."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document once it is ready, instead of sentences.")
def run(file: str, port: int, *, as_json: bool) -> int:
    """Serve the InferenceService in FILE with local processes until Ctrl-C.

    The engine and the gate get the very files that they would get in a pod. Ctrl-C lets open streams end, for at most
    rollout.drainTimeout; a second one ends at once.
    """
    specs = manifest.read_specs(file)
    if len(specs) > 1:
        raise InvalidManifest(file, [f"holds {len(specs)} InferenceServices: one can be run at a time"])
    return asyncio.run(_serve(specs[0], port, as_json=as_json))


async def _serve(spec: ServiceSpec, port: int, *, as_json: bool) -> int:
    stopped = asyncio.Event()
    main = asyncio.current_task()

    def stop() -> None:
        # The second signal does not wait for streams.
        if stopped.is_set() and main is not None:
            main.cancel()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        async with LocalPod(spec, port=port) as pod:
            if not await _until_ready(pod, stopped):
                return 0
            await _greet(spec, pod, as_json=as_json)
            failed = asyncio.create_task(pod.wait_failed())
            waiting = asyncio.create_task(stopped.wait())
            done, _ = await asyncio.wait([failed, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if failed in done:
                failed.result()
            failed.cancel()
            click.echo("stopping: open streams may end first (Ctrl-C again: at once)", err=True)
    except asyncio.CancelledError:
        click.echo("ended at once", err=True)
        return 1
    click.echo("stopped", err=True)
    return 0


async def _until_ready(pod: LocalPod, stopped: asyncio.Event) -> bool:
    """Wait until the pod is ready; False when it was told to stop before that."""
    ready = asyncio.create_task(pod.wait_ready(progress=lambda text: click.echo(f"{pod.spec.name}: {text}", err=True)))
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
        click.echo(f"{spec.name}: this machine cannot keep the promise: {limits.reason}", err=True)
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
