"""What the operator takes for one InferenceService and for a thousand, on a real API server.

Runs beside the node of the cluster tests, as a process of its own:
`python tests/cluster/node.py run -- .venv/bin/python benchmarks/operator_scale.py`. The services want no replicas, so
that the API server and the operator are measured and no kubelet. Times are what a watch sees.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from report import Bar, Report, arguments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.testnode.cluster import INSIDE, Cluster  # noqa: E402  # found through the path above
from cluster.testnode.operator_process import OperatorProcess  # noqa: E402

GROUP = "/apis/sluice.dev/v1alpha1"
APPLIES = 30
CHANGES = 20
QUIET_S = 60.0
GIVE_UP_S = 600.0
OBJECTS = 8

Json = dict[str, Any]


@dataclass
class Api:
    """A client of the API server, and when its watches saw what."""

    session: aiohttp.ClientSession
    server: str
    namespace: str
    seen: dict[tuple[str, str], float] = field(default_factory=dict)
    """Plural and name of an object → when its newest version came."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """One request's answer."""
        headers = {"Content-Type": kind}
        async with self.session.request(method, self.server + path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            found: Json = await answer.json()
            return found

    async def watch(self, prefix: str, plural: str) -> None:
        """Note every event of a kind in the namespace."""
        query = f"{prefix}/namespaces/{self.namespace}/{plural}?watch=true&timeoutSeconds=3000"
        async with self.session.get(self.server + query) as stream:
            async for line in stream.content:
                event = json.loads(line)
                self.seen[plural, event["object"]["metadata"]["name"]] = time.perf_counter()
                self.moved.set()

    async def until(self, plural: str, name: str, after: float) -> float:
        """Seconds from `after` until an event of this object came."""
        async with asyncio.timeout(GIVE_UP_S):
            while self.seen.get((plural, name), 0.0) <= after:
                self.moved.clear()
                await self.moved.wait()
        return self.seen[plural, name] - after

    async def create(self, name: str) -> None:
        spec = {"model": {"source": {"image": {"path": "/models/tiny"}}}, "replicas": 0}
        metadata = {"name": name}
        body = {"apiVersion": "sluice.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec}
        await self.call("POST", f"{GROUP}/namespaces/{self.namespace}/inferenceservices", body)

    async def told(self) -> int:
        """How many services have a status of their newest spec."""
        page = await self.call("GET", f"{GROUP}/namespaces/{self.namespace}/inferenceservices?resourceVersion=0")
        return sum(
            one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"] for one in page["items"]
        )


@asynccontextmanager
async def client(config: Json, namespace: str) -> AsyncIterator[Api]:
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(ssl=tls, limit=64)
    headers = {"Authorization": f"Bearer {user['token']}"}
    # A line of a watch is one object.
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        yield Api(session, cluster["server"], namespace)


def start(folder: Path, namespace: str, name: str) -> OperatorProcess:
    # With the defaults that a user runs: a line of log for each object is part of what is measured.
    return OperatorProcess(folder / f"{name}.log", {"SLUICE_WATCH_NAMESPACES": namespace})


async def measure(config: Json, namespace: str, count: int, report: Report) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        async with client(config, namespace) as api:
            watches = [
                asyncio.create_task(api.watch(prefix, plural))
                for prefix, plural in (("/apis/apps/v1", "deployments"), ("/api/v1", "configmaps"))
            ]
            try:
                await _measure(api, Path(scratch), count, report)
            finally:
                for task in watches:
                    task.cancel()


async def _measure(api: Api, scratch: Path, count: int, report: Report) -> None:
    operator = await asyncio.to_thread(start, scratch, api.namespace, "first")
    await asyncio.to_thread(ready, operator)
    applies = []
    for index in range(APPLIES):
        since = time.perf_counter()
        await api.create(f"first-{index}")
        applies.append(await api.until("deployments", f"first-{index}", since))
        await asyncio.sleep(0.5)
    await asyncio.to_thread(operator.end)
    print(f"apply to Deployment: median {statistics.median(applies) * 1000:.0f} ms")

    gate = asyncio.Semaphore(16)

    async def one(index: int) -> None:
        async with gate:
            await api.create(f"many-{index}")

    await asyncio.gather(*(one(index) for index in range(count - APPLIES)))
    print(f"{count} services are there")
    since = time.perf_counter()
    operator = await asyncio.to_thread(start, scratch, api.namespace, "second")
    async with asyncio.timeout(GIVE_UP_S):
        while (told := await api.told()) < count:
            print(f"{time.perf_counter() - since:.0f} s: {told} of {count}", flush=True)
            await asyncio.sleep(1)
    cold_s = time.perf_counter() - since
    print(f"reconciled from cold: {cold_s:.1f} s")

    await settled(operator)
    cpu_ms = 1000 * operator.cpu_s() / count
    requests = operator.metric("sluice_operator_api_requests_total") / count
    before = operator.metric("sluice_operator_api_writes_total")
    await asyncio.sleep(QUIET_S)
    writes = operator.metric("sluice_operator_api_writes_total") - before
    resident = operator.resident_bytes()
    changes = []
    for index in range(CHANGES):
        since = time.perf_counter()
        path = f"{GROUP}/namespaces/{api.namespace}/inferenceservices/first-{index}"
        change = {"spec": {"slo": {"timeToFirstToken": f"{index + 3}s"}}}
        await api.call("PATCH", path, change, "application/merge-patch+json")
        changes.append(await api.until("configmaps", f"first-{index}-live", since))
        await asyncio.sleep(0.5)
    resident = max(resident, operator.resident_bytes())
    await asyncio.to_thread(operator.end)

    report.bars += [
        Bar("apply to Deployment visible, median", statistics.median(applies) * 1000, "ms", 300, "lower"),
        Bar(f"{count} services reconciled from cold", cold_s, "s", 60, "lower"),
        # Two cores are the API server's and etcd's as well: what the operator itself costs shows on any machine.
        Bar("processor time of the operator for each of them", cpu_ms, "ms", 20, "lower"),
        Bar(
            f"requests for each: its {OBJECTS} objects, two statuses, an event, and the start",
            requests,
            "",
            11.5,
            "lower",
        ),
        Bar("mutating requests in a minute of rest", writes, "requests", 0, "lower"),
        Bar("resident memory", resident / 2**20, "MiB", 150, "lower"),
        Bar(f"one changed service among {count}, worst", max(changes) * 1000, "ms", 500, "lower"),
    ]
    report.data = {
        "services": count,
        "applies_ms": [round(value * 1000, 1) for value in applies],
        "changes_ms": [round(value * 1000, 1) for value in changes],
    }


def ready(operator: OperatorProcess) -> None:
    until = time.monotonic() + GIVE_UP_S
    while operator.get("/readyz")[0] != 200:
        if time.monotonic() > until:
            raise SystemExit("the operator does not get ready")
        time.sleep(0.2)


async def settled(operator: OperatorProcess) -> None:
    """Until it has written nothing for ten seconds."""
    last, since = -1.0, time.monotonic()
    async with asyncio.timeout(GIVE_UP_S):
        while time.monotonic() - since < 10:
            now = await asyncio.to_thread(operator.metric, "sluice_operator_api_writes_total")
            if now != last:
                last, since = now, time.monotonic()
            await asyncio.sleep(1)


def main() -> int:
    options = arguments(__doc__)
    folder = os.environ.get(INSIDE)
    if folder is None:
        how = f"python tests/cluster/node.py run -- {sys.executable} {__file__}"
        print(f"this runs beside a node: {how}", file=sys.stderr)
        return 2
    node = Cluster(Path(folder))
    node.kubectl("apply", "--server-side", "-f", str(ROOT / "crds/inferenceservices.sluice.dev.yaml"))
    node.kubectl("wait", "crd/inferenceservices.sluice.dev", "--for=condition=Established", "--timeout=60s")
    report, config = Report("operator"), json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    with node.namespace("scale") as namespace:
        asyncio.run(measure(config, namespace, 100 if options.quick else 1000, report))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
