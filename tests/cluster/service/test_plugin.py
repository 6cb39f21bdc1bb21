"""`kubectl sluice` as a user types it, against the real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.service.space import PATIENCE_S, Space
from cluster.service.streams import client, opened

pytestmark = pytest.mark.cluster

BIN = Path(sys.executable).parent


def sluice(space: Space, *words: str) -> tuple[int, str, str]:
    """`kubectl sluice WORDS` in the test's namespace: exit code and what it printed."""
    kubectl = shutil.which("kubectl")
    assert kubectl
    # kubectl finds its plugins in PATH.
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    done = subprocess.run(
        [kubectl, "sluice", *words, "-n", space.name],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_why_names_what_the_scheduler_says(space: Space) -> None:
    service = space.tiny("nowhere")
    service["spec"]["podTemplate"]["nodeSelector"] = {"no": "node"}
    space.apply(service)
    space.wait("nowhere", "jsonpath={.status.failure.reason}=Unschedulable")

    code, told, _ = sluice(space, "why", "nowhere")

    assert code == 1
    assert told.startswith(f"{space.name}/nowhere: is not Ready: Unschedulable: 0/1 nodes are available")
    assert "the scheduler says: 0/1 nodes are available" in told
    assert "FailedScheduling" in told
    code, told, _ = sluice(space, "status", "--json")
    assert (code, json.loads(told)[0]["reason"]) == (1, "Unschedulable")
    code, _, said = sluice(space, "why", "nobody")
    assert (code, said.count("\n")) == (2, 1)


def test_why_names_who_wrote_into_the_deployment(space: Space) -> None:
    space.apply(space.tiny("edited", replicas=0))
    space.wait("edited", "condition=Degraded=False")
    code, told, _ = sluice(space, "why", "edited")
    assert (code, "set by others" in told) == (0, False), told

    engine = {"name": "engine", "env": [{"name": "EXTRA", "value": "1"}]}
    patch = {"spec": {"template": {"spec": {"nodeSelector": {"disk": "fast"}, "containers": [engine]}}}}
    how = ("--type=strategic", "--field-manager=somebody", "-p", json.dumps(patch))
    space.kubectl("patch", "deployment", "edited", *how)

    _, told, _ = sluice(space, "why", "edited")
    assert re.search(
        r"deployment/edited: somebody \(\d+ s ago\) set spec.template.spec.containers\[engine\].env\[EXTRA\], "
        r"spec.template.spec.nodeSelector\n",
        told,
    ), told


async def test_a_pod_is_seen_by_its_service_and_drained_without_a_stream_cut(space: Space) -> None:
    url = await asyncio.to_thread(space.serve, space.tiny("seen"))
    (pod,) = [one["metadata"]["name"] for one in space.pods("seen")]

    code, told, _ = await asyncio.to_thread(sluice, space, "why", "seen", "--json")
    answer = json.loads(told)
    assert (code, answer["is_well"]) == (0, True), answer
    assert answer["headroom"][0].startswith(f"{pod}: open")
    code, told, _ = await asyncio.to_thread(sluice, space, "top", "seen", "--once", "--json")
    assert (code, json.loads(told)["state"]["ready"]) == (0, True)

    async with client(url) as who:
        answer = await opened(who, "tiny", "go on", max_tokens=400)
        await anext(aiter(answer))
        draining = asyncio.create_task(asyncio.to_thread(sluice, space, "drain", pod))
        chunks = [chunk async for chunk in answer]  # to its end: nothing is cut
        assert chunks[-1].choices[0].finish_reason == "length"
    code, told, said = await draining
    assert (code, f"{pod} is drained" in told) == (0, True), said
    await asyncio.to_thread(space.wait, "seen", "condition=Ready=False")
