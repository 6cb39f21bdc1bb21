"""An operator from the repository's history, then today's with other images: no pod ends, and no stream is cut."""

from __future__ import annotations

import asyncio
import copy
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster.operating.conftest import CRD, ROOT, Start, idle_service
from cluster.service.space import KIND, Space, models
from cluster.service.streams import once
from cluster.testnode.cluster import Cluster
from tiny_model import make_tiny_llama

pytestmark = pytest.mark.cluster

# The last release line that kept no template.
BEFORE = "07c09eb"
NEXT_IMAGES = {
    "SLUICE_ENGINE_IMAGE": "sluice.test/sluice-engine:next",  # nobody has it: a pod that asked for it would not start
    "SLUICE_GATE_IMAGE": "sluice.test/sluice-sidecar:next",
    "SLUICE_OTLP_ENDPOINT": "http://collector.observability:4318",
}


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as it was then."""
    folders = ("operator", "engine_image", "sidecar", "crds")
    done = subprocess.run(["git", "archive", BEFORE, *folders], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"the commit {BEFORE} is not in this checkout: {done.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("history")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def of(history: Path) -> dict[str, str]:
    """What makes a process run the operator of then."""
    return {"PYTHONPATH": ":".join(str(history / part / "src") for part in ("operator", "engine_image", "sidecar"))}


def template(node: Cluster, namespace: str, name: str) -> Any:
    return copy.deepcopy(node.get("deployment", name, namespace)["spec"]["template"])


def runtime(node: Cluster, namespace: str, name: str) -> dict[str, str]:
    found: dict[str, str] = node.get(KIND, name, namespace)["status"].get("runtime", {})
    return found


async def test_an_upgrade_from_an_operator_that_kept_nothing_ends_no_pod_and_no_stream(
    alone: Cluster, namespace: str, start: Start, history: Path
) -> None:
    for file in make_tiny_llama(models(alone) / "tiny").iterdir():
        file.chmod(0o644)  # pods run as somebody else
    space = Space.prepare(alone, namespace)
    alone.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(history / "crds" / CRD.name))
    old = start("old", of(history))
    url = await asyncio.to_thread(space.serve, space.tiny("chat"))
    before, (pod,) = template(alone, namespace, "chat"), space.pods("chat")
    running = [asyncio.create_task(once(url, "tiny", f"stream {index}", max_tokens=100)) for index in range(4)]

    alone.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    assert await asyncio.to_thread(old.end) == 0
    start("new", NEXT_IMAGES)
    await asyncio.to_thread(alone.wait_for, "it to be adopted", lambda: runtime(alone, namespace, "chat"))
    running += [asyncio.create_task(once(url, "tiny", f"later {index}", max_tokens=100)) for index in range(4)]
    for told in await asyncio.gather(*running):
        assert told.finish_reason in {"stop", "length"}

    assert template(alone, namespace, "chat") == before
    (same,) = space.pods("chat")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert all(one["restartCount"] == 0 for one in same["status"]["containerStatuses"])
    assert runtime(alone, namespace, "chat")["version"] == "unknown"
    # The old pod goes on obeying: what needs no restart is carried out under the new operator.
    patch = '{"spec":{"slo":{"timeToFirstToken":"50s"}}}'
    space.kubectl("patch", KIND, "chat", "--type=merge", "-p", patch)
    await asyncio.to_thread(space.wait, "chat", "condition=Ready")
    assert template(alone, namespace, "chat") == before


def test_between_two_that_keep_templates_nothing_moves_until_the_newer_is_taken(
    alone: Cluster, namespace: str, start: Start
) -> None:
    first = start("first")
    alone.kubectl("-n", namespace, "apply", "-f", "-", stdin=idle_service("chat"))
    alone.wait_for("its status", lambda: runtime(alone, namespace, "chat"))
    before = template(alone, namespace, "chat")
    assert first.end() == 0

    second = start("second", NEXT_IMAGES)
    alone.wait_for("the newer one to be named", lambda: runtime(alone, namespace, "chat")["newer"])
    assert template(alone, namespace, "chat") == before
    newer = runtime(alone, namespace, "chat")["newer"]

    taken = '{"spec":{"runtime":{"version":"' + newer + '"}}}'
    alone.kubectl("-n", namespace, "patch", KIND, "chat", "--type=merge", "-p", taken)
    alone.wait_for("it to be taken", lambda: runtime(alone, namespace, "chat") == {"version": newer})
    pod = template(alone, namespace, "chat")["spec"]
    assert pod["containers"][0]["image"] == NEXT_IMAGES["SLUICE_ENGINE_IMAGE"]
    assert len(alone.list("controllerrevisions", namespace)) == 2

    alone.kubectl("-n", namespace, "patch", KIND, "chat", "--type=json", "-p", '[{"op":"remove","path":"/spec/runtime/version"}]')  # fmt: skip  # noqa: E501
    alone.wait_for("its spec to be seen", lambda: seen(alone, namespace, "chat"))
    assert template(alone, namespace, "chat")["spec"] == pod
    assert second.metric("sluice_operator_reconciles_total") > 0


def seen(node: Cluster, namespace: str, name: str) -> bool:
    found = node.get(KIND, name, namespace)
    return bool(found["status"]["observedGeneration"] == found["metadata"]["generation"])
