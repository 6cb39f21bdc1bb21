"""What tools make of a status: kstatus (Flux, kpt) by its rules, and Argo CD by the script of its own page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import LuaRuntime

import operator_scene as scene
from sluice_engine.core.state import LoadingProgress
from sluice_operator.observed.failures import Failure
from sluice_operator.status.situation import Situation
from sluice_operator.status.status import compute

Json = dict[str, Any]

PAGE = Path(__file__).resolve().parents[2] / "docs/argo-cd.md"
NOW = "2026-01-01T00:00:00Z"
NO_NODE = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
NO_MODEL = {
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "ModelMissing: no such folder"}},
}
LOADING = LoadingProgress(stage="weights", bytes_done=1, bytes_total=4)


def seen(*pods: Json, replicas: int = 1, gates: Json | None = None, **more: Any) -> Situation:
    states = {pod["metadata"]["name"]: scene.gate_state() for pod in pods} if gates is None else gates
    spec = more.pop("spec", scene.spec({"replicas": replicas}))
    return Situation(**{"generation": 1, "spec": spec, "observed": scene.observed(*pods), "gates": states, **more})


def resource(situation: Situation) -> Json:
    """The resource as the API server has it after the operator wrote what it sees."""
    spec = {"replicas": situation.spec.replicas if situation.spec else 1}
    return {"metadata": {"generation": 1}, "spec": spec, "status": compute(situation, {}, NOW)}


def kstatus(item: Json) -> str:
    """The verdict on a custom resource.

    Source: kubernetes-sigs/cli-utils, pkg/kstatus/status/: checkGenericProperties, checkReadyCondition.
    """
    if item["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = item.get("status", {})
    if status.get("observedGeneration", item["metadata"]["generation"]) != item["metadata"]["generation"]:
        return "InProgress"
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return {"True": "Current", "False": "InProgress", "Unknown": "InProgress"}.get(
        conditions.get("Ready", ""), "Current"
    )


@pytest.fixture(scope="module")
def argo() -> Callable[[Json], tuple[str, str]]:
    """Argo CD's verdict by the script of docs/argo-cd.md, in a Lua as bare as Argo CD's."""
    (block,) = re.findall(r"```yaml\n(.*?resource\.customizations.*?)```", PAGE.read_text(), re.DOTALL)
    script = yaml.safe_load(block)["data"]["resource.customizations.health.sluice.dev_InferenceService"]

    def health(item: Json) -> tuple[str, str]:
        lua = LuaRuntime(unpack_returned_tuples=True)
        for name in ("os", "io", "debug", "package", "require", "python"):
            lua.execute(f"{name} = nil")
        lua.globals()["obj"] = lua.table_from(item, recursive=True)
        verdict = lua.execute(script)
        return str(verdict["status"]), str(verdict["message"])

    return health


SITUATIONS = [
    pytest.param(resource(seen(scene.pod())), "Current", "Healthy", id="serving"),
    pytest.param(resource(seen(replicas=0)), "Current", "Healthy", id="scaled to zero"),
    pytest.param(resource(Situation(generation=1, spec=scene.spec())), "InProgress", "Progressing", id="just made"),
    pytest.param(
        resource(
            seen(
                scene.pod(ready=False),
                gates={"chat-new-1": scene.gate_state(phase="loading", loading=LOADING)},
            )
        ),
        "InProgress",
        "Progressing",
        id="loading",
    ),
    pytest.param(
        resource(seen(scene.pod("a", revision="old"), scene.pod("b", ready=False), gates={})),
        "InProgress",
        "Progressing",
        id="rolling out",
    ),
    pytest.param(
        resource(seen(scene.pod("a", revision="old"), scene.pod("b"))),
        "InProgress",
        "Progressing",
        id="the new pods serve and the old ones still drain",
    ),
    pytest.param(
        resource(seen(scene.pod(ready=False, phase="Pending", conditions=[NO_NODE]), gates={})),
        "InProgress",
        "Degraded",
        id="no node fits, and one may come",
    ),
    pytest.param(
        resource(seen(scene.pod(ready=False, engine=NO_MODEL), gates={})), "Failed", "Degraded", id="no such model"
    ),
    pytest.param(
        resource(seen(scene.pod("a"), scene.pod("b", ready=False, engine=NO_MODEL), replicas=2)),
        "Failed",
        "Degraded",
        id="one of two crash-loops",
    ),
    pytest.param(
        resource(seen(scene.pod(), gates={"chat-new-1": scene.gate_state(feasible=False, reason="too tight")})),
        "Failed",
        "Degraded",
        id="a promise that this hardware cannot keep",
    ),
    pytest.param(
        resource(seen(scene.pod(), problem=Failure(reason="NameTaken", message="Service chat exists"))),
        "Failed",
        "Degraded",
        id="a name that is taken",
    ),
    pytest.param(
        resource(seen(spec=None, problem=Failure(reason="InvalidSpec", message="spec.slo: is missing"))),
        "Failed",
        "Degraded",
        id="a spec that is not understood",
    ),
    pytest.param(
        {**resource(seen(scene.pod())), "metadata": {"generation": 2}},
        "InProgress",
        "Progressing",
        id="a change that the operator has not seen",
    ),
    pytest.param(
        {"metadata": {"generation": 1}, "spec": {"replicas": 1}}, "Current", "Progressing", id="no status yet"
    ),
]


@pytest.mark.parametrize(("item", "by_kstatus", "by_argo"), SITUATIONS)
def test_tools_read_the_status_right(
    item: Json, by_kstatus: str, by_argo: str, argo: Callable[[Json], tuple[str, str]]
) -> None:
    health, message = argo(item)

    assert kstatus(item) == by_kstatus
    assert health == by_argo
    assert message.strip()
