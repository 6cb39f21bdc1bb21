"""The definition on the real API server: what the measured cost refuses and lets pass, and what users see of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from cluster.service.space import KIND, Space, example
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

# The planning profile: 3,428 tokens fit into 150 ms, 2,000 into 100 ms.
COST = {"fixedMicroseconds": 20_000, "decodeMicroseconds": 10_000, "perPrefillTokenNanoseconds": 35_000}
REFUSED = "a step with scheduling.prefillChunkTokens takes longer than slo.interTokenLatency"


def service(chunk: int | None = None, latency: str = "150ms", **spec: Any) -> Object:
    """Without replicas: only the API server and the status matter here."""
    made = copy.deepcopy(example("minimal"))
    made["spec"] |= {
        "replicas": 0,
        "slo": {"interTokenLatency": latency},
        "scheduling": {} if chunk is None else {"prefillChunkTokens": chunk},
        **spec,
    }
    return made


def measure(space: Space, cost: dict[str, int] = COST) -> None:
    """Write a measured cost into the status, as the operator does once a pod has measured."""
    patch = json.dumps({"status": {"stepCost": cost}})
    space.kubectl("patch", KIND, "chat", "--subresource=status", "--type=merge", "-p", patch)


def test_the_measured_cost_refuses_what_the_promise_cannot_keep(space: Space) -> None:
    space.apply(service(8192))  # a first apply: nothing is measured yet
    measure(space)

    space.apply(service(8192))  # the same spec again
    assert REFUSED in space.refusal(service(8000))
    space.apply(service(3428))
    assert REFUSED in space.refusal(service(3429))
    assert REFUSED in space.refusal(service(3428, "100ms"))
    space.apply(service(2000, "100ms"))


def test_the_measured_cost_lets_everything_else_pass(space: Space) -> None:
    space.apply(service(8192))
    measure(space)

    measure(space, {**COST, "fixedMicroseconds": 140_000})  # a worse status
    space.kubectl("label", KIND, "chat", "team=assistants")
    space.kubectl("scale", KIND, "chat", "--replicas=0")
    space.apply(service(8192, resources={"limits": {"memory": "1Gi"}}))
    space.apply(service(8000, resources={"limits": {"memory": "2Gi"}}))  # judged by its own measurement, later
    space.apply(service(None, "1ms"))  # no chunk is set: the engine derives one
    space.apply(service(9000, slo={"interTokenLatency": "1ms", "enforcement": "Observe"}))
    assert REFUSED in space.refusal(service(9000, "1ms"))


# Every text that has to match a pattern and is read by a rule beside it, and every quantity.
MALFORMED: list[tuple[str, Object]] = [
    ("cache.capacity", {"cache": {"capacity": "0"}}),
    ("cache.hostSwapCapacity", {"cache": {"capacity": "1Gi", "hostSwapCapacity": "1.5Gi"}}),
    ("slo.interTokenLatency", {"slo": {"interTokenLatency": "150"}}),
    ("slo.timeToFirstToken", {"slo": {"timeToFirstToken": "soon"}}),
    ("scheduling.agingInterval", {"scheduling": {"agingInterval": "1d"}}),
    ("admission.maxWait", {"admission": {"maxWait": "-1s"}}),
    ("rollout.drainTimeout", {"rollout": {"drainTimeout": "2m30"}}),
    ("slo.targetPercent", {"slo": {"targetPercent": "100"}}),
]


def test_a_malformed_value_is_told_once_and_plainly(space: Space) -> None:
    space.apply(service(3000))
    measure(space)

    for field, spec in MALFORMED:
        refusal = space.refusal(service(3001, **spec))

        assert f"spec.{field}: Invalid value" in refusal, refusal
        assert f"{field} must be a " in refusal, "a sentence, and no pattern"
        assert "<nil>" not in refusal, refusal
        assert refusal.count("Invalid value") == 1, f"more than one message: {refusal}"


@pytest.mark.parametrize("nothing", [0, "0", "0Gi"])
def test_no_room_for_preempted_requests_is_accepted_as_none(space: Space, nothing: int | str) -> None:
    cache = {"capacity": "1Gi", "hostSwapCapacity": nothing}
    space.apply(service(cache=cache, scheduling={"preemption": {"resume": "Recompute"}}))

    refusal = space.refusal(service(cache=cache, scheduling={"preemption": {"resume": "Swap"}}))
    space.apply(service(cache={**cache, "hostSwapCapacity": "8Gi"}, scheduling={"preemption": {"resume": "Swap"}}))

    assert "cache.hostSwapCapacity must be set when scheduling.preemption.resume is Swap" in refusal


def test_explain_reads_well(space: Space) -> None:
    def explain(*words: str) -> str:
        return " ".join(space.kubectl("explain", *words).split())

    assert "A model, the latency promised for it, and the replicas that keep it." in explain("inferenceservices")
    slo = explain("sluice.spec.slo")
    assert "The promise. Chunk, token budget, batch and admission limits are derived from it." in slo
    assert "Promised time between two tokens of one stream. Units h, m, s, ms." in slo
    assert "enum: Enforce, Observe" in slo
    # kubectl leaves this in for a field without a word about it.
    assert "<no description>" not in explain("sluice.spec", "--recursive")


def test_get_shows_the_columns(space: Space) -> None:
    space.apply(service())
    space.wait("chat", "condition=Degraded=False")

    narrow, wide = (space.kubectl("get", "sluice", "chat", *how).splitlines() for how in ([], ["-o", "wide"]))

    columns = ["NAME", "READY", "DESIRED", "AVAILABLE", "ADMISSION", "MODEL", "CHUNK", "TTFT", "ITL", "AGE"]
    assert narrow[0].split() == columns
    assert narrow[1].split()[:6] == ["chat", "True", "0", "0", "NothingServes", "chat"]
    assert wide[0].split()[-6:] == ["KV", "PREEMPTIONS", "REASON", "VERSION", "NEWER", "URL"]
    assert wide[1].split()[-3::2] == ["ScaledToZero", f"http://chat.{space.name}.svc"]


def test_the_scale_subresource_is_the_services_own(space: Space) -> None:
    space.apply(service())
    space.wait("chat", "condition=Degraded=False")

    path = f"/apis/sluice.dev/v1alpha1/namespaces/{space.name}/inferenceservices/chat/scale"
    scale = json.loads(space.kubectl("get", "--raw", path))

    assert scale["spec"] == {}
    assert scale["status"] == {"replicas": 0, "selector": "sluice.dev/inferenceservice=chat"}
