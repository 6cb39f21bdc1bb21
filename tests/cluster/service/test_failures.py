"""An engine that is killed, and models that cannot be loaded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import openai
import pytest

from cluster.service.space import MODELS_AT, Space, models
from cluster.service.streams import client, once, opened

pytestmark = pytest.mark.cluster


def engine_process(pod_uid: str) -> int:
    """The engine of that pod, as the node's process tree has it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            groups = (process / "cgroup").read_text()
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if pod_uid in groups.replace("_", "-") and b"sluice_engine" in words:
            return int(process.name)
    raise AssertionError(f"no engine runs in pod {pod_uid}")


async def test_a_killed_engine_ends_every_stream_in_an_error_event_and_comes_back(space: Space) -> None:
    url = space.serve(space.tiny("killed"))
    (pod,) = space.pods("killed")
    async with client(url) as who:
        answers = [await opened(who, "tiny", "go on", max_tokens=800) for _ in range(3)]
        for answer in answers:  # all three are in the middle of their output
            await anext(aiter(answer))

        os.kill(engine_process(pod["metadata"]["uid"]), signal.SIGKILL)

        for answer in answers:
            with pytest.raises(openai.APIError) as caught:
                async for _ in answer:
                    pass
            assert not isinstance(caught.value, openai.APIConnectionError), "cut without a word"
            assert caught.value.code == "engine_failed"

    restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    await asyncio.to_thread(space.wait_for, f"pod/{pod['metadata']['name']}", restarted)
    await asyncio.to_thread(space.wait, "killed", "condition=Ready")
    assert (await once(url, "tiny", "again", max_tokens=4)).finish_reason
    told = space.kubectl("get", "events", "--field-selector=involvedObject.kind=InferenceService,reason=EngineKilled")
    assert "was killed (exit code 137)" in told


def test_a_missing_model_is_told_by_condition_and_failure(space: Space) -> None:
    space.apply(space.tiny("missing", path=f"{MODELS_AT}/nowhere"))

    space.wait("missing", "jsonpath={.status.failure.reason}=ModelMissing")

    failure = space.status("missing")["failure"]
    assert f"{MODELS_AT}/nowhere" in failure["message"]
    assert failure["hint"]
    assert failure["pod"] == space.pods("missing")[0]["metadata"]["name"]
    ready = space.condition("missing", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ModelMissing")
    assert space.condition("missing", "Available")["status"] == "False"


def test_a_corrupt_model_is_told_and_forgotten_when_it_is_mended(space: Space) -> None:
    broken = shutil.copytree(models(space.node) / "tiny", models(space.node) / space.name)
    (broken / "config.json").write_text("{ this is not JSON")
    space.apply(space.tiny("broken", path=f"{MODELS_AT}/{space.name}"))
    space.wait("broken", "jsonpath={.status.failure.reason}=ModelCorrupt")
    assert "config.json" in space.status("broken")["failure"]["message"]

    space.serve(space.tiny("broken"))

    assert "failure" not in space.status("broken")
    assert space.condition("broken", "Degraded")["status"] == "False"
