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
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from report import Bar, Report, arguments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.service.load import MODEL, PACE_S, Load  # noqa: E402  # found through the path above
from cluster.service.release import Release  # noqa: E402
from cluster.service.space import Space  # noqa: E402
from cluster.testnode.cluster import INSIDE, Cluster, Object, Refused  # noqa: E402

PACED_AT = "/paced"
# Python runs this before anything else; where it starts the engine, the paced one takes its place.
STAND_IN = f"""\
import os, signal, sys
if "sluice_engine" in sys.orig_argv:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sys.path.insert(0, "{PACED_AT}")
    import uvloop
    from paced_engine import serve
    uvloop.run(serve("/run/sluice/engine.sock", {int(PACE_S * 1e6)}, 64, 0))
"""


def lost(load: Load) -> list[str]:
    """Streams that began and did not come to their end."""
    told = [f"{count} ended in an error event, {code}" for code, count in load.errors.items()]
    return [*load.silent, *told, *([f"{load.cut} were cut"] if load.cut else [])]


def failed(load: Load) -> list[str]:
    """Requests that were answered by neither a stream nor a 429 or 503 which says that a retry may go well."""
    told = [f"{count} refused with {status}" for status, count in load.refused.items() if status not in {429, 503}]
    return [*load.failed, *told, *([f"{load.unanswered} without an answer"] if load.unanswered else [])]


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
    service["spec"]["model"]["servedName"] = MODEL
    load = Load(await asyncio.to_thread(space.serve, service), lengths_s)
    async with load.by(clients):
        restart_s = await asyncio.to_thread(restart, space, service)
        evictions_s, put_off = await asyncio.to_thread(evict_all, space, "rolls")
    return {
        "completed": load.whole,
        "lost": lost(load),
        "failed": failed(load),
        "refused_then_streamed": dict(load.refused),
        "longest_gap_s": round(load.longest_gap_s, 3),
        "longest_wait_s": round(load.longest_wait_s, 3),
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
    report.data |= {"clients": clients, "stream_s": lengths_s, "replicas": 3, "interval_s": PACE_S}
    data = report.data
    report.bars = [
        Bar("streams lost", len(data["lost"]), "streams", 0, "lower"),
        Bar("requests failed other than by 429 or 503", len(data["failed"]), "requests", 0, "lower"),
        Bar("streams completed", data["completed"], "streams", clients, "higher"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
