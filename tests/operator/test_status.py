"""Conditions from situations: honest, dated, and gone when they are not true any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import operator_scene as scene
from sluice_engine import codec
from sluice_engine.core.state import LoadingProgress, StepCost
from sluice_operator.observed.failures import Failure
from sluice_operator.status.status import Situation, compute, condition
from sluice_sidecar.telemetry.state import Measured

Json = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
TRAFFIC = Measured(
    time_to_first_token_us=840_000,
    inter_token_latency_us=61_000,
    requests=200,
    good_requests=199,
    good_requests_per_minute=39.8,
    preemptions_per_minute=0.4,
    kv_usage_percent=41.6,
)


def situation(*pods: Json, replicas: int = 1, gates: dict[str, Any] | None = None, **more: Any) -> Situation:
    slo = more.pop("slo", {})
    seen = more.pop("observed", None) or scene.observed(*pods)
    states = {pod["metadata"]["name"]: scene.gate_state() for pod in pods} if gates is None else gates
    spec = scene.spec({"replicas": replicas, "slo": slo})
    return Situation(**{"generation": 1, "spec": spec, "observed": seen, "gates": states, **more})


SERVING = situation(scene.pod())
LOADING = LoadingProgress(stage="weights", bytes_done=42, bytes_total=100)
INFEASIBLE = scene.gate_state(feasible=False, reason="a step takes 317 ms, the least that would work is 317 ms")
EVICTED = scene.pod("corpse", ready=False, phase="Failed", reason="Evicted", message="The node was low on memory.")
OLD_CORPSE = scene.pod("corpse", revision="old", ready=False, phase="Failed", reason="Evicted")
NOT_UNDERSTOOD = Failure(reason="InvalidSpec", message="spec: slo: is missing")
NOT_SCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
LEAVING = scene.pod("leaving", revision="old", deleting=True)
NO_QUOTA = scene.replica_set("new", 2)
NO_QUOTA["status"] = {
    "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "is forbidden: exceeded quota: gpus"}]
}
OOM = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2025-12-31T23:55:00Z"}
RELAPSED = scene.pod(engine={"restartCount": 7, "lastState": {"terminated": OOM}})
CRASHED = {
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "ModelMissing: no such folder"}},
}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(
            SERVING,
            {
                "Ready": "True/Serving",
                "Available": "True/Serving",
                "Progressing": "False/Settled",
                "ModelLoaded": "True/Loaded",
                "AdmissionOpen": "True/Open",
                "SLOFeasible": "True/Feasible",
                "SLOMet": "Unknown/NoTraffic",
                "Degraded": "False/AsExpected",
            },
            id="one replica that serves without traffic",
        ),
        pytest.param(
            Situation(generation=1, spec=scene.spec()),
            {
                "Ready": "False/Applying",
                "Available": "False/Applying",
                "Progressing": "True/Applying",
                "ModelLoaded": "Unknown/NoPods",
                "AdmissionOpen": "False/NothingServes",
                "SLOFeasible": "Unknown/NotMeasured",
                "Degraded": "False/AsExpected",
            },
            id="a resource that was just made has a status",
        ),
        pytest.param(
            situation(scene.pod(ready=False), gates={"chat-new-1": scene.gate_state(phase="loading", loading=LOADING)}),
            {
                "Ready": "False/ModelLoading",
                "Available": "False/ModelLoading",
                "Progressing": "True/ModelLoading",
                "ModelLoaded": "False/ModelLoading",
                "Degraded": "False/AsExpected",
            },
            id="a pod that loads",
        ),
        pytest.param(
            situation(scene.pod(ready=False), gates={}),
            {"Ready": "False/PodsStarting", "ModelLoaded": "Unknown/PodsStarting"},
            id="a pod that starts and cannot be asked yet",
        ),
        pytest.param(
            situation(scene.pod(), observed=scene.observed(scene.pod(), of=scene.deployment(generation=2, observed=1))),
            {"Ready": "False/Applying", "Available": "True/Serving", "Progressing": "True/Applying"},
            id="old pods do not make a new spec ready",
        ),
        pytest.param(
            situation(scene.pod("a", revision="old"), scene.pod("b", ready=False), gates={}),
            {"Ready": "False/RollingOut", "Available": "True/Serving", "Progressing": "True/RollingOut"},
            id="a rolling update that has not got there",
        ),
        pytest.param(
            situation(scene.pod("a", revision="old"), scene.pod("b")),
            {"Ready": "True/Serving", "Progressing": "True/RollingOut"},
            id="the old pod still runs beside the new one",
        ),
        pytest.param(
            situation(scene.pod("a"), scene.pod("b", ready=False), replicas=2),
            {"Ready": "False/PodsStarting", "Available": "True/Serving", "Progressing": "True/PodsStarting"},
            id="one of two replicas serves",
        ),
        pytest.param(
            situation(scene.pod(ready=False, engine=CRASHED), gates={}),
            {
                "Ready": "False/ModelMissing",
                "Available": "False/ModelMissing",
                "Progressing": "False/ModelMissing",
                "ModelLoaded": "False/ModelMissing",
                "Degraded": "True/ModelMissing",
            },
            id="a model that is not there",
        ),
        pytest.param(
            situation(scene.pod("a"), scene.pod("b", ready=False, engine=CRASHED), replicas=2),
            {"Ready": "False/ModelMissing", "Available": "True/Serving", "Degraded": "True/ModelMissing"},
            id="one of two crash-loops",
        ),
        pytest.param(
            situation(scene.pod(ready=False, phase="Pending", conditions=[NOT_SCHEDULED]), gates={}),
            {"Ready": "False/Unschedulable", "Progressing": "False/Unschedulable", "Degraded": "True/Unschedulable"},
            id="no node fits",
        ),
        pytest.param(
            situation(LEAVING, scene.pod(ready=False, phase="Pending", conditions=[NOT_SCHEDULED]), gates={}),
            {
                "Ready": "False/WaitingForDrain",
                "Progressing": "True/WaitingForDrain",
                "ModelLoaded": "Unknown/PodsStarting",
                "Degraded": "False/AsExpected",
            },
            id="what a pod waits for is held by one that drains",
        ),
        pytest.param(
            situation(observed=scene.observed(LEAVING, replica_sets=(NO_QUOTA,)), gates={}),
            {"Ready": "False/WaitingForDrain", "Degraded": "False/AsExpected"},
            id="the quota is held by a pod that drains",
        ),
        pytest.param(
            situation(observed=scene.observed(replica_sets=(NO_QUOTA,)), gates={}),
            {"Ready": "False/QuotaExceeded", "Progressing": "False/QuotaExceeded", "Degraded": "True/QuotaExceeded"},
            id="a quota leaves no room",
        ),
        pytest.param(
            situation(RELAPSED),
            {"Ready": "True/Serving", "Progressing": "False/Settled", "Degraded": "True/OutOfMemory"},
            id="a pod that serves between two crashes",
        ),
        pytest.param(
            situation(scene.pod(), gates={"chat-new-1": INFEASIBLE}),
            {
                "Ready": "False/PromiseInfeasible",
                "Available": "True/Serving",
                "SLOFeasible": "False/PromiseInfeasible",
                "Degraded": "False/AsExpected",
            },
            id="an infeasible promise serves and is not ready",
        ),
        pytest.param(
            situation(scene.pod(), gates={"chat-new-1": INFEASIBLE}, slo={"enforcement": "Observe"}),
            {"Ready": "True/Serving", "SLOFeasible": "False/PromiseInfeasible"},
            id="an infeasible promise that is only observed",
        ),
        pytest.param(
            situation(
                scene.pod("a", revision="old"),
                scene.pod("b", ready=False),
                gates={"a": INFEASIBLE, "b": scene.gate_state()},
            ),
            {"SLOFeasible": "True/Feasible"},
            id="the newest pods judge the promise",
        ),
        pytest.param(
            situation(scene.pod(), gates={"chat-new-1": scene.gate_state(is_open=False)}),
            {"Ready": "True/Serving", "AdmissionOpen": "False/Busy"},
            id="a busy pod is ready all the same",
        ),
        pytest.param(
            situation(scene.pod(), gates={"chat-new-1": scene.gate_state(is_open=False, mode="Observe")}),
            {"AdmissionOpen": "True/Observing"},
            id="a busy pod that only observes lets in all the same",
        ),
        pytest.param(
            situation(
                scene.pod(),
                gates={"chat-new-1": scene.gate_state(is_open=False, mode="Observe", why_shut="engine_dead")},
            ),
            {"AdmissionOpen": "False/Busy"},
            id="one that only observes lets nobody in where no engine is",
        ),
        pytest.param(
            situation(
                scene.pod("a"),
                scene.pod("b"),
                replicas=2,
                gates={"a": scene.gate_state(is_open=False), "b": scene.gate_state()},
            ),
            {"AdmissionOpen": "True/Open"},
            id="one open door is enough",
        ),
        pytest.param(
            situation(scene.pod(), gates={}),
            {
                "Ready": "True/Serving",
                "AdmissionOpen": "Unknown/NotObserved",
                "SLOFeasible": "Unknown/NotMeasured",
                "ModelLoaded": "True/Loaded",
            },
            id="a pod that cannot be asked is not accused",
        ),
        pytest.param(
            situation(scene.pod(), gates={"chat-new-1": scene.gate_state(measured=TRAFFIC)}),
            {"SLOMet": "True/PromiseKept"},
            id="traffic within the promise",
        ),
        pytest.param(
            situation(
                scene.pod(), gates={"chat-new-1": scene.gate_state(measured=replace(TRAFFIC, good_requests=197))}
            ),
            {"SLOMet": "False/PromiseMissed", "Ready": "True/Serving"},
            id="traffic that misses the promise",
        ),
        pytest.param(
            situation(scene.pod(ready=False), gates={"chat-new-1": scene.gate_state(hung=True)}),
            {"Ready": "False/EngineHung", "Degraded": "True/EngineHung"},
            id="a step that never ends",
        ),
        pytest.param(
            situation(
                scene.pod(ready=False), gates={"chat-new-1": scene.gate_state(phase="failed", failure="device lost")}
            ),
            {"Ready": "False/EngineFailed", "Degraded": "True/EngineFailed"},
            id="an engine that says it failed",
        ),
        pytest.param(
            situation(replicas=0, gates={}),
            {
                "Ready": "True/ScaledToZero",
                "Available": "False/ScaledToZero",
                "Progressing": "False/Settled",
                "Degraded": "False/AsExpected",
            },
            id="scaled to zero",
        ),
        pytest.param(
            situation(scene.pod("a"), scene.pod("b"), replicas=1),
            {"Ready": "True/Serving", "Progressing": "True/RollingOut"},
            id="scaling down is not over yet",
        ),
        pytest.param(
            situation(scene.pod(), problem=Failure(reason="NameTaken", message="Service chat exists")),
            {"Ready": "False/NameTaken", "Available": "True/Serving", "Degraded": "True/NameTaken"},
            id="a name that somebody else has",
        ),
        pytest.param(
            Situation(generation=3, spec=None, problem=NOT_UNDERSTOOD),
            {
                "Ready": "False/InvalidSpec",
                "Available": "False/InvalidSpec",
                "Progressing": "False/InvalidSpec",
                "SLOMet": "Unknown/NoTraffic",
                "Degraded": "True/InvalidSpec",
            },
            id="a spec that cannot be understood",
        ),
        pytest.param(
            situation(
                scene.pod(), spec=None, problem=NOT_UNDERSTOOD, gates={"chat-new-1": scene.gate_state(measured=TRAFFIC)}
            ),
            {"Ready": "False/InvalidSpec", "Available": "True/Serving", "SLOMet": "Unknown/InvalidSpec"},
            id="a spec that cannot be understood while pods serve",
        ),
        pytest.param(
            situation(EVICTED, scene.pod()),
            {
                "Ready": "True/Serving",
                "Progressing": "False/Settled",
                "ModelLoaded": "True/Loaded",
                "Degraded": "False/AsExpected",
            },
            id="an evicted pod whose replacement serves",
        ),
        pytest.param(
            situation(EVICTED, gates={}),
            {"Ready": "False/Evicted", "ModelLoaded": "Unknown/NoPods", "Degraded": "True/Evicted"},
            id="an evicted pod without a replacement",
        ),
        pytest.param(
            situation(EVICTED, scene.pod(ready=False, engine=CRASHED), gates={}),
            {"Ready": "False/ModelMissing", "Degraded": "True/ModelMissing"},
            id="what a living pod says comes before an evicted one",
        ),
        pytest.param(
            situation(OLD_CORPSE, scene.pod(ready=False), gates={}),
            {"Ready": "False/PodsStarting", "Degraded": "False/AsExpected"},
            id="an evicted pod of an older revision explains nothing",
        ),
        pytest.param(
            situation(scene.pod(ready=False), gates={"chat-new-1": replace(scene.gate_state(), draining=True)}),
            {"Ready": "False/Drained", "Available": "False/Drained", "Degraded": "False/AsExpected"},
            id="a pod that was drained by hand and stands there",
        ),
    ],
)
def test_conditions_tell_what_is_seen(seen: Situation, expected: dict[str, str]) -> None:
    status = compute(seen, {}, NOW)

    told = {one["type"]: f"{one['status']}/{one['reason']}" for one in status["conditions"]}
    assert {kind: told[kind] for kind in expected} == expected
    always = [kind for kind in told if kind not in {"Reconciling", "Stalled"}]
    assert always == [
        "Ready", "Available", "Progressing", "ModelLoaded", "AdmissionOpen", "SLOFeasible", "SLOMet",
        "MonitoringReady", "Degraded",
    ]  # fmt: skip
    assert ("Reconciling" in told) == told["Progressing"].startswith("True")
    assert not {"Reconciling", "Stalled"} <= told.keys()
    assert all(one["observedGeneration"] == seen.generation for one in status["conditions"])
    assert all(one["message"].strip() for one in status["conditions"])
    assert ("failure" in status) == (told["Degraded"].startswith("True"))


def test_a_roll_that_auto_took_in_place_says_why() -> None:
    deployment = scene.deployment()
    deployment["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    rolling = scene.observed(scene.pod(ready=False), scene.pod("chat-old-1", revision="old"), of=deployment)

    def told(strategy: str) -> str:
        spec = scene.spec({"replicas": 2, "rollout": {"strategy": strategy}})
        status = compute(Situation(generation=1, spec=spec, observed=rolling), {}, NOW)
        return str(condition(status, "Progressing")["message"])

    assert "in place, since there was no room" in told("Auto")
    assert "in place" not in told("InPlace")


LIVE = codec.digest(scene.spec().live)
OLD_LIVE = "0123456789"
PENDING, SETTLED = "True/ConfigPending", "False/Settled"


@pytest.mark.parametrize(
    ("gates", "progressing"),
    [
        pytest.param([{"live_hash": LIVE}, {"live_hash": LIVE}], SETTLED, id="both pods obey the newest"),
        pytest.param([{"live_hash": LIVE}, {"live_hash": OLD_LIVE}], PENDING, id="one pod has not heard of it"),
        pytest.param(
            [{"live_hash": LIVE}, {"live_hash": LIVE, "engine_live_hash": OLD_LIVE}], PENDING, id="one engine has not"
        ),
        pytest.param([{"live_hash": LIVE}, None], PENDING, id="one pod does not answer"),
        pytest.param(
            [{"live_hash": LIVE}, {"live_hash": LIVE, "engine_live_hash": ""}], SETTLED, id="another engine reads none"
        ),
        pytest.param(
            [{"live_hash": LIVE}, {"live_hash": OLD_LIVE, "refused": "slo: is missing"}], "False/ConfigRefused",
            id="one pod refuses it",
        ),
    ],
)  # fmt: skip
def test_it_progresses_until_every_pod_obeys_the_newest_promise_and_goes_on_serving(
    gates: list[Any], progressing: str
) -> None:
    names = ("chat-a", "chat-b")
    pods = [scene.pod(name) for name in names]
    states = {name: scene.gate_state(**told) for name, told in zip(names, gates, strict=True) if told is not None}

    status = compute(situation(*pods, replicas=2, gates=states, generation=2), {"observedGeneration": 1}, NOW)

    told = condition(status, "Progressing")
    assert f"{told['status']}/{told['reason']}" == progressing
    assert condition(status, "Ready")["status"] == "True"


def test_a_pod_that_does_not_answer_for_once_is_what_it_was() -> None:
    pods, states = [scene.pod()], {"chat-a": scene.gate_state(live_hash=LIVE)}
    (name,) = [pod["metadata"]["name"] for pod in pods]
    old, new = {name: scene.gate_state(live_hash=OLD_LIVE)}, {name: states["chat-a"]}

    first = compute(situation(*pods, gates=old, generation=2), {"observedGeneration": 1}, NOW)
    silent = compute(situation(*pods, gates={}, generation=2), first, NOW)
    settled = compute(situation(*pods, gates=new, generation=2), silent, NOW)
    silent_again = compute(situation(*pods, gates={}, generation=2), settled, NOW)

    reasons = [condition(status, "Progressing")["reason"] for status in (first, silent, settled, silent_again)]
    assert reasons == ["ConfigPending", "ConfigPending", "Settled", "Settled"]


def test_the_promise_is_judged_by_pods_that_have_it_already() -> None:
    pods = [scene.pod("chat-a"), scene.pod("chat-b")]
    old = scene.gate_state(live_hash=OLD_LIVE, feasible=False, reason="too tight")
    new = scene.gate_state(live_hash=LIVE)

    status = compute(situation(*pods, replicas=2, gates={"chat-a": old, "chat-b": new}, generation=2), {}, NOW)

    assert condition(status, "SLOFeasible")["status"] == "True"


def test_a_refused_file_is_told_in_the_words_of_who_refused_it() -> None:
    told = scene.gate_state(live_hash=OLD_LIVE, refused="live.json.slo: is missing")
    (pod,) = [scene.pod()]

    failure = compute(situation(pod, gates={pod["metadata"]["name"]: told}), {}, NOW)["failure"]

    assert failure["reason"] == "ConfigRefused"
    assert "the gate refuses live.json, and goes by the one before: live.json.slo: is missing" in failure["message"]
    assert failure["pod"] == pod["metadata"]["name"]
    assert failure["hint"]


def test_a_secret_without_keys_is_told_as_a_shut_door() -> None:
    (pod,) = [scene.pod()]
    gates = {pod["metadata"]["name"]: scene.gate_state(api_keys=0)}

    keyed = scene.spec({"admission": {**scene.body()["spec"]["admission"], "apiKeysSecretRef": {"name": "team-keys"}}})

    door = condition(compute(situation(pod, gates=gates, spec=keyed), {}, NOW), "AdmissionOpen")

    assert (door["status"], door["reason"]) == ("False", "NoApiKeys")
    assert "every request is refused with 401: the Secret team-keys (admission.apiKeysSecretRef) is" in door["message"]


NO_KEY = (
    "No API key is in force, so every request is refused with 401: the Secret of admission.apiKeysSecretRef is missing "
    "or has none."
)


def test_ready_says_that_every_request_is_refused_for_want_of_keys_and_nothing_of_a_busy_door() -> None:
    def told(**gate: Any) -> tuple[str, str]:
        ready = condition(
            compute(situation(scene.pod(), gates={"chat-new-1": scene.gate_state(**gate)}), {}, NOW), "Ready"
        )
        return ready["status"], ready["message"]

    assert told(api_keys=0) == (
        "True",
        f"1 of 1 replicas serve. {NO_KEY}",
    )
    assert told(api_keys=1) == told(is_open=False) == ("True", "1 of 1 replicas serve.")


def test_whoever_a_trusted_peer_names_needs_no_key() -> None:
    admission = {**scene.body()["spec"]["admission"], "apiKeysSecretRef": {"name": "k"}, "trustedPeers": ["10.0.0.0/8"]}
    gates = {"chat-new-1": scene.gate_state(api_keys=0)}

    seen = compute(situation(scene.pod(), gates=gates, spec=scene.spec({"admission": admission})), {}, NOW)

    assert "every request that no trusted peer names a tenant for is refused" in condition(seen, "Ready")["message"]


def test_a_condition_keeps_its_date_until_its_status_changes() -> None:
    loading = situation(scene.pod(ready=False), gates={})
    first = compute(loading, {}, NOW)
    crashed = compute(situation(scene.pod(ready=False, engine=CRASHED), gates={}), first, LATER)
    ready = compute(SERVING, crashed, LATER)

    assert condition(crashed, "Ready")["lastTransitionTime"] == NOW, "False for another reason is still False"
    assert condition(crashed, "Degraded")["lastTransitionTime"] == LATER
    assert condition(ready, "Ready")["lastTransitionTime"] == LATER


def test_a_loading_pod_tells_its_bytes_and_a_guess_of_the_rest() -> None:
    pod = scene.pod(ready=False, engine={"state": {"running": {"startedAt": "2025-12-31T23:59:00Z"}}})
    loading = LoadingProgress(stage="weights", bytes_done=5_000_000_000, bytes_total=20_000_000_000)
    gates = {"chat-new-1": scene.gate_state(phase="loading", loading=loading)}

    told = condition(compute(situation(pod, gates=gates), {}, NOW), "ModelLoaded")

    assert told["message"] == (
        "Pod chat-new-1 is loading the model (20 % of the weights: 4.0 GB of 20.0 GB, about 3 min to go)."
    )


@pytest.mark.parametrize(
    ("volumes", "now", "reason", "words"),
    [
        pytest.param([], "2026-01-01T00:00:29Z", "PodsStarting", "pods are starting", id="it may still be at it"),
        pytest.param([], "2026-01-01T00:00:30Z", "SchedulerSilent", "no scheduler", id="no scheduler runs"),
        pytest.param(
            [{"name": "w", "persistentVolumeClaim": {"claimName": "weights"}}],
            "2026-01-01T00:00:30Z",
            "ClaimUnbound",
            "waits for a volume of weights",
            id="a volume that is being made",
        ),
    ],
)
def test_a_scheduler_that_is_silent_is_told_after_half_a_minute(
    volumes: list[Json], now: str, reason: str, words: str
) -> None:
    pod = scene.pod(ready=False, phase="Pending")
    pod["metadata"]["creationTimestamp"] = NOW
    pod["spec"] = {"volumes": volumes}

    ready = condition(compute(situation(pod, gates={}), {}, now), "Ready")

    assert ready["reason"] == reason
    assert words in ready["message"]


def test_a_relapse_is_forgotten_after_ten_minutes() -> None:
    sick = compute(situation(RELAPSED), {}, "2026-01-01T00:04:59Z")
    well = compute(situation(RELAPSED), sick, "2026-01-01T00:05:00Z")

    assert sick["failure"]["reason"] == "OutOfMemory"
    assert "has been restarted 7 times" in sick["failure"]["message"]
    assert "failure" not in well
    assert condition(well, "Degraded")["status"] == "False"


def test_what_stalls_now_is_told_and_not_what_a_pod_recovered_from() -> None:
    gates = {"chat-new-1": scene.gate_state(feasible=False, reason="too tight")}

    stalled = condition(compute(situation(RELAPSED, gates=gates), {}, "2026-01-01T00:04:59Z"), "Stalled")

    assert stalled["reason"] == "PromiseInfeasible"
    assert "too tight" in stalled["message"]


@pytest.mark.parametrize("gates", [{}, {"a": scene.gate_state(phase="failed"), "b": scene.gate_state(phase="loading")}])
def test_what_was_mended_is_not_held_against_the_pods_that_have_the_change(gates: dict[str, Any]) -> None:
    old = scene.pod("a", revision="old", ready=False, engine=CRASHED if not gates else None)

    before = compute(situation(old, gates=gates), {}, NOW)
    mended = compute(situation(old, scene.pod("b", ready=False), gates=gates), before, LATER)

    assert before["failure"]["pod"] == "a"
    assert "failure" not in mended
    told = {one["type"]: one["status"] for one in mended["conditions"]}
    assert (told["Progressing"], "Stalled" in told, told["Degraded"]) == ("True", False, "False")


def test_a_failure_is_cleared_on_recovery() -> None:
    crashed = compute(situation(scene.pod(ready=False, engine=CRASHED), gates={}), {}, NOW)
    recovered = compute(SERVING, crashed, LATER)

    assert crashed["failure"] == {
        "reason": "ModelMissing",
        "message": "engine: no such folder",
        "hint": "Check spec.model.source: the path must exist in the image or on a volume mounted into the engine.",
        "pod": "chat-new-1",
    }
    assert "failure" not in recovered


def test_a_status_says_where_and_how_many() -> None:
    status = compute(situation(scene.pod("a"), scene.pod("b", ready=False), replicas=2), {}, NOW)

    assert (status["replicas"], status["readyReplicas"]) == (2, 1)
    assert status["url"] == "http://chat.llm.svc"
    assert status["selector"] == "sluice.dev/inferenceservice=chat"
    assert status["model"] == "chat"
    assert status["observedGeneration"] == 1


def test_an_evicted_pod_is_no_replica() -> None:
    status = compute(situation(EVICTED, scene.pod()), {}, NOW)

    assert (status["replicas"], status["readyReplicas"]) == (1, 1)


def test_a_spec_that_cannot_be_understood_takes_nothing_from_the_status() -> None:
    before = compute(SERVING, {}, NOW)
    after = compute(situation(scene.pod(), spec=None, generation=2, problem=NOT_UNDERSTOOD), before, LATER)
    restarting = compute(
        situation(scene.pod(ready=False), spec=None, generation=2, problem=NOT_UNDERSTOOD, gates={}), before, LATER
    )

    for kept in ("model", "selector", "url", "stepCost", "derived"):
        assert after[kept] == restarting[kept] == before[kept]
    assert after["measured"] == before["measured"]
    assert after["observedGeneration"] == 2


def test_numbers_are_the_pods_own() -> None:
    status = compute(situation(scene.pod(), gates={"chat-new-1": scene.gate_state(measured=TRAFFIC)}), {}, NOW)

    assert status["stepCost"] == {
        "fixedMicroseconds": 20_000,
        "decodeMicroseconds": 10_000,
        "perPrefillTokenNanoseconds": 35_000,
    }
    assert status["derived"] == {
        "chunkCeilingTokens": 3428,
        "tokenBudget": 3492,
        "maxSequences": 64,
        "kvCapacityTokens": 1600,
    }
    assert status["measured"] == {
        "kvUsagePercent": 42,
        "preemptionsPerMinute": 0.4,
        "goodRequestsPerMinute": 39.8,
        "timeToFirstToken": "840ms",
        "interTokenLatency": "61ms",
    }


def test_a_cost_measured_on_other_hardware_is_forgotten() -> None:
    before = compute(SERVING, {}, NOW)
    moved = compute(situation(scene.pod(basis="another")), before, LATER)

    assert "stepCost" in before
    assert "stepCost" not in moved


def test_a_cost_outlives_the_pods_that_measured_it() -> None:
    before = compute(SERVING, {}, NOW)
    restarting = compute(situation(scene.pod(ready=False), gates={}), before, LATER)

    assert restarting["stepCost"] == before["stepCost"]


def test_the_ready_pod_with_the_smallest_ceiling_gives_the_cost() -> None:
    slow = scene.gate_state(cost=StepCost(fixed_us=30_000, decode_us=10_000, per_prefill_token_ns=70_001), ceiling=1571)
    status = compute(
        situation(scene.pod("a"), scene.pod("b"), replicas=2, gates={"a": scene.gate_state(), "b": slow}), {}, NOW
    )

    assert status["stepCost"]["perPrefillTokenNanoseconds"] == 70_100, "rounded up"
    assert status["derived"]["chunkCeilingTokens"] == 1571


def test_long_messages_fit_the_schema() -> None:
    status = compute(situation(problem=Failure(reason="DeploymentRefused", message="x" * 5000), gates={}), {}, NOW)

    assert all(len(one["message"]) <= 2048 for one in status["conditions"])
    assert len(status["failure"]["message"]) <= 2048
