"""What changes under running pods: the promise and the keys, and no stream and no restart with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from cluster.service.space import KIND, PATIENCE_S, Space
from cluster.service.streams import Stream, once, stream

pytestmark = pytest.mark.cluster

OLD, NEW = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef"


def client(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=5, timeout=300)


def started(space: Space, name: str) -> list[tuple[str, int]]:
    """Each pod with the restarts of its containers: equal lists mean that nothing was started anew."""
    return [
        (pod["metadata"]["uid"], sum(one["restartCount"] for one in (
            *pod["status"]["containerStatuses"], *pod["status"]["initContainerStatuses"])))
        for pod in space.pods(name)
    ]  # fmt: skip


def gate_state(space: Space, name: str) -> dict[str, Any]:
    (pod,) = space.pods(name)
    path = f"/api/v1/namespaces/{space.name}/pods/{pod['metadata']['name']}:9090/proxy/state"
    state: dict[str, Any] = json.loads(space.kubectl("get", "--raw", path))
    return state


def settle(space: Space, name: str) -> None:
    """Wait until the status is of the newest spec, and every pod obeys it."""
    generation = space.get(KIND, name)["metadata"]["generation"]
    space.wait_for(f"{KIND}/{name}", f"jsonpath={{.status.observedGeneration}}={generation}")
    space.wait_for(f"{KIND}/{name}", "condition=Progressing=False")


async def test_a_changed_promise_reaches_gate_and_engine_under_running_streams_without_a_restart(space: Space) -> None:
    service = space.tiny("hot")
    url = space.serve(service)
    before, pods = gate_state(space, "hot"), started(space, "hot")
    ended: list[Stream] = []
    over = asyncio.Event()

    async def keep_streaming() -> None:
        while not over.is_set():
            ended.append(await once(url, "tiny", "once upon a time", max_tokens=300))

    def change() -> None:
        service["spec"]["slo"]["interTokenLatency"] = "1s"
        service["spec"]["scheduling"]["prefillChunkTokens"] = 32
        service["spec"]["admission"] = {"maxWait": "3s", "tenants": [{"name": "team-a", "tokensPerSecond": 5000}]}
        space.apply(service)
        settle(space, "hot")

    async with asyncio.TaskGroup() as clients:
        for _ in range(2):
            clients.create_task(keep_streaming())
        await asyncio.to_thread(change)
        over.set()

    after = gate_state(space, "hot")
    assert started(space, "hot") == pods
    assert after["live_config_hash"] == after["engine"]["live_config_hash"] != before["live_config_hash"]
    assert after["engine"]["boot_id"] == before["engine"]["boot_id"]
    assert after["promise"]["inter_token_latency_us"] == 1_000_000
    assert after["engine"]["derived"]["chunk_ceiling_tokens"] == 32
    assert space.status("hot")["derived"]["chunkCeilingTokens"] == 32
    assert space.condition("hot", "Ready")["status"] == "True"
    assert ended
    assert {one.finish_reason for one in ended} == {"length"}


@pytest.mark.full
async def test_keys_come_after_the_pod_and_rotate_without_a_restart(space: Space) -> None:
    def keys(text: str) -> None:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"team-a": text}}
        space.node.apply(secret, namespace=space.name)

    def until(what: str, holds: Callable[[], object]) -> None:
        space.node.wait_for(what, holds, PATIENCE_S)  # a kubelet looks at a volume about once a minute

    async def let_in(key: str) -> bool:
        async with client(url, key) as who:
            try:
                return bool((await stream(who, "tiny", "hello", 4)).finish_reason)
            except openai.AuthenticationError:
                return False

    service = space.tiny("keyed")
    service["spec"]["admission"] = {"apiKeysSecretRef": {"name": "keys"}}
    url = space.serve(service)
    pods = started(space, "keyed")
    until("nobody is let in", lambda: space.condition("keyed", "AdmissionOpen")["reason"] == "NoApiKeys")
    assert not await let_in(OLD)

    keys(OLD)
    until("the first key is in force", lambda: gate_state(space, "keyed")["api_keys"] == 1)
    assert (await let_in(OLD), await let_in(NEW)) == (True, False)

    keys("too short")
    space.wait_for(f"{KIND}/keyed", "jsonpath={.status.failure.reason}=ConfigRefused")
    assert await let_in(OLD), "what was in force stays"

    keys(NEW)
    until("the new key is in force", lambda: not gate_state(space, "keyed")["api_keys_refused"])
    assert (await let_in(OLD), await let_in(NEW)) == (False, True)
    assert started(space, "keyed") == pods
    assert space.tells_nobody("keyed", OLD)
    assert space.tells_nobody("keyed", NEW)
