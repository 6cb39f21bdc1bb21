"""Another engine behind the gate, in a pod: probes, admission and drain are the gate's, its image knows none of it.

The program called `vllm` is the tests' scripted server, in an image that has Python: what of vLLM is real here are its
routes and its metrics page.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.service.space import MODELS_AT, Space, models
from cluster.service.streams import client, opened

pytestmark = pytest.mark.cluster

SCRIPTED = Path(__file__).resolve().parents[2] / "sidecar"
PROGRAM = """#!/opt/sluice/bin/python3
import asyncio, os, signal, sys
sys.path.insert(0, os.path.dirname(__file__))
from sidecar.foreign_server import ForeignServer
port = int(next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2])
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with ForeignServer(port=port, tokens=200, gap_s=0.03).running():
        await stop.wait()
asyncio.run(main())
"""


def service(space: Space, name: str) -> Any:
    folder = models(space.node) / "bin"
    if not folder.exists():
        (folder / "sidecar").mkdir(parents=True)
        for file in ("foreign_server.py", "killable.py"):
            shutil.copy(SCRIPTED / file, folder / "sidecar" / file)
        (folder / "vllm").write_text(PROGRAM)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    made = space.tiny(name, runtime={"type": "VLLM", "image": "sluice.test/sluice-engine:dev"})
    made["spec"]["cache"] = {"capacity": "64Mi"}
    programs = f"{MODELS_AT}/bin:/opt/sluice/bin:/usr/bin:/bin"
    made["spec"]["podTemplate"]["engine"]["env"].append({"name": "PATH", "value": programs})
    return made


@pytest.mark.full
async def test_a_pod_of_another_engine_serves_and_lets_its_streams_end(space: Space) -> None:
    url = space.serve(service(space, "other"))
    (pod,) = space.pods("other")
    assert [one["ready"] for one in pod["status"]["containerStatuses"]] == [True]

    async with client(url) as who:
        answer = await opened(who, "tiny", "go on", max_tokens=200)  # six seconds of tokens
        chunks = aiter(answer)
        await anext(chunks)
        gone = asyncio.create_task(
            asyncio.to_thread(space.kubectl, "delete", "pod", pod["metadata"]["name"], "--wait=true")
        )
        rest = "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])
    await gone

    assert rest == "tok" * 199, "the engine got its SIGTERM when the gate had no stream left"
    space.wait("other", "condition=Ready")
    state = space.status("other")
    assert state["readyReplicas"] == 1
    assert {one["type"]: one["status"] for one in state["conditions"]}["ModelLoaded"] == "True"


def test_what_the_engine_cannot_do_is_a_condition_with_the_fields_name(space: Space) -> None:
    asked = service(space, "asks-too-much")
    asked["spec"]["scheduling"] = {"agingInterval": "5s"}
    space.apply(asked)

    space.wait("asks-too-much", "jsonpath={.status.failure.reason}=InvalidSpec")

    assert "spec.scheduling.agingInterval: vLLM ages no request" in space.status("asks-too-much")["failure"]["message"]
