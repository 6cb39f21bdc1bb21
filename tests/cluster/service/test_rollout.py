"""New pods for old ones while clients stream."""

from __future__ import annotations

import asyncio

import pytest

from cluster.service.space import Space
from cluster.service.streams import Stream, once
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster


async def test_a_rolling_restart_under_load_loses_no_stream(space: Space) -> None:
    service = space.tiny("rolling", replicas=2)
    url = space.serve(service)
    before = {pod["metadata"]["uid"] for pod in space.pods("rolling")}
    ended: list[Stream] = []
    over = asyncio.Event()

    async def keep_streaming() -> None:
        while not over.is_set():
            # A new client each time, so that the node balances it anew; its retries come before the first byte only.
            ended.append(await once(url, "tiny", "once upon a time", max_tokens=300))

    async with asyncio.TaskGroup() as clients:
        for _ in range(4):
            clients.create_task(keep_streaming())
        await asyncio.to_thread(restart, space, service)
        over.set()

    after = {pod["metadata"]["uid"] for pod in space.pods("rolling")}
    assert before.isdisjoint(after)
    assert len(ended) >= 4
    assert {one.finish_reason for one in ended} == {"length"}


def restart(space: Space, service: Object) -> None:
    """Roll the pods by a change of their template, and return when the old ones are gone."""
    old = [pod["metadata"]["name"] for pod in space.pods("rolling")]
    service["spec"]["podTemplate"]["annotations"] = {"example.com/restart": "now"}
    space.apply(service)
    space.wait("rolling", "condition=Ready")
    for pod in old:
        space.wait_for(f"pod/{pod}", "delete")
