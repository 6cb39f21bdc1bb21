"""Streams while every pod is replaced, by a rolling restart and then by evictions, on the real Kubernetes node.

Three pods of the real gate before an engine that answers at a pace and computes nothing (`paced_engine.py`): two cores
do not carry three models. 50 clients stream answers of 30 to 60 s, each over a connection of its own, and come back
when a 429 or 503 tells them to. No stream may be lost, and no request fail otherwise. Run it beside the node:
`python tests/cluster/node.py run -- python benchmarks/rollout.py`; `--quick` is 10 clients with 5 to 10 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from report import Bar, Report, arguments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.service.release import Release  # noqa: E402  # found through the path above
from cluster.service.space import Space  # noqa: E402
from cluster.testnode.cluster import INSIDE, Cluster, Object, Refused  # noqa: E402

INTERVAL_S = 0.25
PACED_AT = "/paced"
# Python runs this before anything else; where it starts the engine, the paced one takes its place.
STAND_IN = f"""\
import os, signal, sys
if "sluice_engine" in sys.orig_argv:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sys.path.insert(0, "{PACED_AT}")
    import uvloop
    from paced_engine import serve
    uvloop.run(serve("/run/sluice/engine.sock", {int(INTERVAL_S * 1e6)}, 64, 0))
"""
GIVEN_UP_S = 120.0


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    completed: int = 0
    lost: list[str] = field(default_factory=list)
    """Streams that began and did not come to their end."""
    failed: list[str] = field(default_factory=list)
    """Requests that were answered by neither a stream nor a 429 or 503, or were told to wait for too long."""
    refused: dict[int, int] = field(default_factory=dict)
    """Of requests that streamed in the end: refusals by status."""
    longest_gap_s: float = 0.0
    longest_wait_s: float = 0.0
    """From a request's first attempt to its first byte."""
    open_now: int = 0
    all_open: asyncio.Event = field(default_factory=asyncio.Event)
    """As many streams at once as there are clients, or something failed already."""
    clients: int = 0

    def opened(self) -> None:
        """A stream began."""
        self.open_now += 1
        if self.open_now == self.clients:
            self.all_open.set()

    def fail(self, why: str) -> None:
        """A request came to nothing."""
        self.failed.append(why)
        self.all_open.set()


async def stream_once(url: str, tokens: int, seen: Seen) -> None:
    """One request, tried until it streams."""
    body = {"model": "paced", "max_tokens": tokens, "stream": True, "messages": [{"role": "user", "content": "go on"}]}
    began, attempt = time.monotonic(), 0
    while True:
        # A connection of its own, so that the node balances it anew.
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            headers = {"x-stainless-retry-count": str(attempt)}
            try:
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                    if answer.status == 200:
                        seen.longest_wait_s = max(seen.longest_wait_s, time.monotonic() - began)
                        await read(answer, tokens, seen)
                        return
                    text = await answer.text()
                    if answer.status not in {429, 503}:
                        seen.fail(f"{answer.status}: {text[:200]}")
                        return
                    seen.refused[answer.status] = seen.refused.get(answer.status, 0) + 1
                    pause_s = float(answer.headers.get("Retry-After", "1"))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                seen.fail(f"{type(error).__name__}: {error}")
                return
        if time.monotonic() - began > GIVEN_UP_S:
            seen.fail(f"refused for {GIVEN_UP_S:.0f} s: {text[:200]}")
            return
        attempt += 1
        await asyncio.sleep(pause_s)


async def read(answer: aiohttp.ClientResponse, tokens: int, seen: Seen) -> None:
    """The answer's stream to its end; whatever is short of it is a loss."""
    got, is_done, last = 0, False, time.monotonic()
    seen.opened()
    try:
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            seen.longest_gap_s, last = max(seen.longest_gap_s, now - last), now
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif b'"error"' in line:
                seen.lost.append(line.decode()[:200])
                return
            elif b'"delta"' in line:
                got += 1
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen.lost.append(f"after {got} of {tokens}: {type(error).__name__}: {error}")
        return
    finally:
        seen.open_now -= 1
    if is_done and got == tokens:
        seen.completed += 1
    else:
        seen.lost.append(f"ended after {got} of {tokens}")


async def client(url: str, lengths_s: tuple[float, float], rng: random.Random, seen: Seen, over: asyncio.Event) -> None:
    """Stream after stream until it is over."""
    while not over.is_set():
        await stream_once(url, int(rng.uniform(*lengths_s) / INTERVAL_S), seen)


def living(space: Space, name: str) -> dict[str, str]:
    """Pods that are not on their way out: name and uid."""
    pods = [pod["metadata"] for pod in space.pods(name) if "deletionTimestamp" not in pod["metadata"]]
    return {pod["name"]: pod["uid"] for pod in pods}


def gone(space: Space, name: str, uids: set[str]) -> bool:
    """Whether none of these pods is left."""
    return not uids & {pod["metadata"]["uid"] for pod in space.pods(name)}


def restart(space: Space, service: Object) -> float:
    """Roll the pods by a change of their template; returns how long it took until the last old one was gone."""
    began, name = time.monotonic(), service["metadata"]["name"]
    old = set(living(space, name).values())
    service["spec"]["podTemplate"]["annotations"] = {"example.com/restart": "now"}
    space.apply(service)
    space.wait(name, "condition=Ready")
    space.node.wait_for("the old pods to be gone", lambda: gone(space, name, old), timeout_s=400)
    return time.monotonic() - began


def evict_all(space: Space, name: str) -> tuple[float, int]:
    """Evict every pod as `kubectl drain` does; returns the time, and how often the budget said "not yet"."""
    began, put_off = time.monotonic(), 0
    old = living(space, name)
    for pod in old:
        asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": space.name}}
        path = f"/api/v1/namespaces/{space.name}/pods/{pod}/eviction"
        deadline = time.monotonic() + 300
        while True:
            try:
                space.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(asked))
                break
            except Refused as refused:
                if "disruption budget" not in str(refused) or time.monotonic() > deadline:
                    raise
                put_off += 1
                time.sleep(2)
    space.node.wait_for("the evicted pods to be gone", lambda: gone(space, name, set(old.values())), timeout_s=400)
    space.wait(name, "condition=Ready")
    return time.monotonic() - began, put_off


def paced_space(node: Cluster, namespace: str) -> Space:
    """A namespace whose engines are the paced one."""
    folder = node.run / "paced"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    shutil.copy(ROOT / "benchmarks/paced_engine.py", folder)
    (folder / "sitecustomize.py").write_text(STAND_IN)
    for file in folder.iterdir():
        file.chmod(0o644)  # pods run as somebody else
    return Space(node, namespace, (node.mount(namespace, "paced", folder, PACED_AT, env={"PYTHONPATH": PACED_AT}),))


async def measure(space: Space, *, clients: int, lengths_s: tuple[float, float], replicas: int) -> dict[str, Any]:
    """Both ways of replacing all pods, under load."""
    service = space.tiny("rolls", replicas=replicas, rollout={"drainTimeout": "120s"})
    service["spec"]["model"]["servedName"] = "paced"
    url = await asyncio.to_thread(space.serve, service)
    seen, over = Seen(clients=clients), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(url, lengths_s, random.Random(number), seen, over))
        await seen.all_open.wait()
        restart_s = await asyncio.to_thread(restart, space, service)
        evictions_s, put_off = await asyncio.to_thread(evict_all, space, "rolls")
        over.set()
    return {
        "completed": seen.completed,
        "lost": seen.lost,
        "failed": seen.failed,
        "refused_then_streamed": seen.refused,
        "longest_gap_s": round(seen.longest_gap_s, 3),
        "longest_wait_s": round(seen.longest_wait_s, 3),
        "restart_s": round(restart_s, 1),
        "evictions_s": round(evictions_s, 1),
        "evictions_put_off": put_off,
    }


def main() -> int:
    """Exit code 0 when nothing was lost."""
    quick = arguments(__doc__ or "").quick
    if INSIDE not in os.environ:
        print(
            "rollout: it runs beside a node: tests/cluster/node.py run -- python benchmarks/rollout.py", file=sys.stderr
        )
        return 2
    report, node = Report("rollout"), Cluster(Path(os.environ[INSIDE]))
    with node.namespace("sluice-system") as system, node.namespace("rollout") as namespace:
        Release(node, "sluice", system).install()
        space = paced_space(node, namespace)
        clients, lengths_s = (10, (5.0, 10.0)) if quick else (50, (30.0, 60.0))
        report.data = asyncio.run(measure(space, clients=clients, lengths_s=lengths_s, replicas=3))
    report.data |= {"clients": clients, "stream_s": lengths_s, "replicas": 3, "interval_s": INTERVAL_S}
    data = report.data
    report.bars = [
        Bar("streams lost", len(data["lost"]), "streams", 0, "lower"),
        Bar("requests failed other than by 429 or 503", len(data["failed"]), "requests", 0, "lower"),
        Bar("streams completed", data["completed"], "streams", clients, "higher"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
