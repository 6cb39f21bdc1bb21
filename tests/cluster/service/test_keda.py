"""KEDA scales a service: from the gates' demand through Prometheus, KEDA and its HPA to pods, and back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from charts.prometheus import Prometheus
from cluster.service.keda import keda
from cluster.service.release import Release
from cluster.service.space import KIND, Space
from cluster.service.streams import client, stream
from cluster.service.test_alerts import discovered, watching
from cluster.testnode.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.full]

BOUNDS = {"minReplicas": 1, "maxReplicas": 2}
# The HPA looks every 15 s, at what was asked for in the last two minutes; fewer after five minutes of less.
UP_WITHIN_S, DOWN_WITHIN_S = 240, 720
FOLLOWED_S = 3


@asynccontextmanager
async def load(url: str, clients: int) -> AsyncIterator[None]:
    """That many clients, each of which asks for a long answer to something new again and again."""

    async def go_on(who: openai.AsyncOpenAI, number: int) -> None:
        for count in itertools.count():
            with contextlib.suppress(openai.APIError):
                # The same words again would be the same piece of work, which counts once.
                await stream(who, "tiny", f"{number} asks {count} of {'many words ' * 5}", max_tokens=200)
            await asyncio.sleep(0.5)

    async with client(url) as who:
        tasks = [asyncio.create_task(go_on(who, number)) for number in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def told(space: Space, prometheus: Prometheus) -> Iterator[None]:
    """What HPA and Prometheus say at the end: pytest shows it when the test fails."""
    try:
        yield
    finally:
        print(space.kubectl("describe", "hpa"))
        for trigger in space.get("scaledobjects.keda.sh", "scaled")["spec"]["triggers"]:
            print(trigger["name"], prometheus.query(trigger["metadata"]["query"]))


@contextmanager
def following(node: Cluster, folder: Path) -> Iterator[None]:
    """Prometheus learns of pods that come and go."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(FOLLOWED_S):
            found = json.dumps([target for pod in node.list("pods") for target in discovered(pod)])
            (folder / "pods.new").write_text(found)
            (folder / "pods.new").rename(folder / "pods.json")

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def test_replicas_follow_the_demand_of_the_gates_and_none_goes_while_it_loads(
    release: Release, space: Space, tmp_path: Path
) -> None:
    def scaled() -> tuple[int, int]:
        """What KEDA asked for, and how many serve."""
        service = space.get(KIND, "scaled")
        return service["spec"]["replicas"], service["status"].get("readyReplicas", 0)

    def least() -> int:
        least: int = space.get("scaledobjects.keda.sh", "scaled")["spec"]["minReplicaCount"]
        return least

    def hpa() -> dict[str, Any]:
        return dict(space.get("hpa", "keda-hpa-scaled")["status"])

    def is_scaling() -> bool:
        return bool(space.condition("scaled", "Autoscaling")["reason"] == "Scaling")

    async def until(what: str, holds: Callable[[], object], within_s: float) -> None:
        await asyncio.to_thread(space.node.wait_for, what, holds, within_s)

    with (
        keda(space.node, tmp_path),
        watching(space.node, tmp_path) as prometheus,
        following(space.node, tmp_path),
        release.with_values(f"--set=autoscaling.prometheus={prometheus.url}"),
    ):
        # A pool that a few long answers fill: what is refused counts as much as what is let in.
        url = await asyncio.to_thread(
            space.serve, space.tiny("scaled", cache={"capacity": "192Ki"}, autoscaling=BOUNDS)
        )
        await until("KEDA to scale", is_scaling, 120)
        with told(space, prometheus):
            assert scaled() == (1, 1)
            assert least() == 1

            async with load(url, clients=16):
                await until("KEDA to ask for two", lambda: scaled()[0] == 2, UP_WITHIN_S)
                # It is the floor of a pod that loads.
                await until("the floor beside one that serves", lambda: (least(), scaled()[1]) == (2, 1), 60)
                await until("two that serve", lambda: scaled() == (2, 2), UP_WITHIN_S)
            await until("the floor to go", lambda: least() == 1, 60)

            await until("one again", lambda: scaled() == (1, 1), DOWN_WITHIN_S)
            assert is_scaling()
            # It looks every 15 s.
            await until("the HPA to see it", lambda: hpa()["currentReplicas"] == 1, 60)
        space.kubectl("delete", f"{KIND}/scaled")
        space.wait_for("scaledobjects.keda.sh/scaled", "delete")
