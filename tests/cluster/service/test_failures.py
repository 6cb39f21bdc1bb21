"""An engine that is killed, and models that cannot be loaded."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import signal
from typing import Any

import openai
import pytest

from cluster.service.space import KIND, MODELS_AT, TINY, Space, models
from cluster.service.streams import client, once, opened
from cluster.testnode import processes
from cluster.testnode.cluster import Object

pytestmark = pytest.mark.cluster

UNICODE = "größe-模型-🦙"


async def test_a_killed_engine_ends_every_stream_in_an_error_event_and_comes_back(space: Space) -> None:
    url = space.serve(space.tiny("killed"))
    (pod,) = space.pods("killed")
    async with client(url) as who:
        answers = [await opened(who, "tiny", "go on", max_tokens=800) for _ in range(3)]
        for answer in answers:  # all three are in the middle of their output
            await anext(aiter(answer))

        processes.kill(processes.of_pod(pod["metadata"]["uid"], "sluice_engine"))

        for answer in answers:
            with pytest.raises(openai.APIError) as caught:
                async for _ in answer:
                    pass
            assert not isinstance(caught.value, openai.APIConnectionError), "cut without a word"
            assert caught.value.code == "engine_failed"

    restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    await asyncio.to_thread(space.wait_for, f"pod/{pod['metadata']['name']}", restarted)
    # The pod's own word first: the service's is a look later, and may still be the one from before.
    await asyncio.to_thread(space.wait_for, f"pod/{pod['metadata']['name']}", "condition=Ready")
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


def spoilt(space: Space, name: str, **spec: Any) -> Object:
    """A service of the tiny model with one thing wrong; what is said of its pods is added to what they mount."""
    service = copy.deepcopy(space.tiny(name, **{key: value for key, value in spec.items() if key != "podTemplate"}))
    template = service["spec"]["podTemplate"]
    for key, value in spec.get("podTemplate", {}).items():
        if key == "engine":
            for inner, more in value.items():
                template["engine"][inner] = [*template["engine"].get(inner, ()), *more]
        else:
            template[key] = [*template.get(key, ()), *value] if isinstance(value, list) else value
    return service


def broken_services(space: Space) -> dict[str, tuple[Object, str]]:
    """By reason: a service that the schema takes and that cannot work, and words that its message must have."""
    claim = {"name": "work", "persistentVolumeClaim": {"claimName": "nowhere"}}
    unbound = {"name": "work", "persistentVolumeClaim": {"claimName": "unbound"}}
    secret = {"name": "work", "secret": {"secretName": "no-secret"}}
    key = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "no-secret", "key": "token"}}}
    mount = {"name": "work", "mountPath": "/work"}
    model = {"servedName": UNICODE, "source": {"image": {"path": TINY}}}
    gpu = {"count": 1, "resourceName": "example.com/quota-of-none"}
    limits = {"requests": {"cpu": "10m"}, "limits": {"memory": "48Mi"}}
    template: dict[str, tuple[dict[str, Any], str]] = {
        "Unschedulable": ({"podTemplate": {"nodeSelector": {"no": "node"}}, "model": model}, "didn't match"),
        "ClaimMissing": ({"podTemplate": {"volumes": [claim]}}, 'persistentvolumeclaim "nowhere" not found'),
        "ClaimUnbound": ({"podTemplate": {"volumes": [unbound]}}, "unbound"),
        "ImagePullFailed": ({"runtime": {"image": "127.0.0.1:1/engine:none"}}, "127.0.0.1:1"),
        "SecretMissing": ({"podTemplate": {"engine": {"env": [key]}}}, 'secret "no-secret" not found'),
        "ConfigMapMissing": (
            {"podTemplate": {"engine": {"envFrom": [{"configMapRef": {"name": "no-map"}}]}}},
            'configmap "no-map" not found',
        ),
        "SecretMissing/volume": (
            {"podTemplate": {"volumes": [secret], "engine": {"volumeMounts": [mount]}}},
            'secret "no-secret" not found',
        ),
        "QuotaExceeded": ({"accelerator": gpu}, "exceeded quota: none"),
        "PolicyRefused": (
            {"podTemplate": {"volumes": [{"name": "work", "hostPath": {"path": "/"}}]}},
            'violates PodSecurity "restricted',
        ),
        "ServiceAccountMissing": ({"podTemplate": {"serviceAccountName": "nobody"}}, "nobody"),
        "OutOfMemory": ({"resources": limits}, "more memory than its limit"),
        "DeploymentRefused": ({"podTemplate": {"affinity": {"nodeAffinity": 7}}}, "nodeAffinity"),
    }
    return {
        reason: (spoilt(space, f"b-{number}", **spec), words)
        for number, (reason, (spec, words)) in enumerate(template.items())
    }


def test_every_trouble_that_the_schema_cannot_see_is_told_with_a_hint(space: Space) -> None:
    quota = {"hard": {"requests.example.com/quota-of-none": "0"}}
    space.node.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "unbound"},
            "spec": {
                "storageClassName": "",
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "9Ti"}},
            },
        },
        namespace=space.name,
    )
    broken = broken_services(space)
    for service, _ in broken.values():
        space.apply(service)

    for told, (service, words) in broken.items():
        name, reason = service["metadata"]["name"], told.partition("/")[0]
        try:
            space.wait(name, f"jsonpath={{.status.failure.reason}}={reason}")
        except Exception:
            print(told, json.dumps(space.get(KIND, name)["status"], indent=1))
            raise
        status = space.status(name)
        failure = status["failure"]
        assert words in failure["message"], told
        assert failure["hint"].endswith("."), told
        ready, degraded = space.condition(name, "Ready"), space.condition(name, "Degraded")
        assert (ready["status"], degraded["status"]) == ("False", "True"), told
        assert degraded["reason"] == reason

    assert space.status(broken["Unschedulable"][0]["metadata"]["name"])["model"] == UNICODE

    # What is mended is forgotten: the claim comes, the quota goes, and nothing of the old trouble stays.
    space.kubectl("delete", "quota", "none")
    for told in ("SecretMissing", "Unschedulable"):
        name = broken[told][0]["metadata"]["name"]
        space.kubectl("scale", KIND, name, "--replicas=0")
        space.wait(name, "condition=Degraded=False")
        assert "failure" not in space.status(name)


@pytest.mark.full
async def test_a_gate_that_answers_no_probe_is_told_as_such(space: Space) -> None:
    name = UNICODE
    model = {"servedName": name, "source": {"image": {"path": TINY}}}
    url = space.serve(space.tiny("stopped", model=model))
    assert space.status("stopped")["model"] == name
    assert (await once(url, name, "hello", max_tokens=2)).finish_reason
    (pod,) = space.pods("stopped")

    os.kill(processes.of_pod(pod["metadata"]["uid"], "sluice_sidecar"), signal.SIGSTOP)

    await asyncio.to_thread(space.wait, "stopped", "jsonpath={.status.failure.reason}=ProbeFailed")
    assert "gate: its liveness probe failed" in space.status("stopped")["failure"]["message"]
    await asyncio.to_thread(space.wait, "stopped", "condition=Ready")
    assert "failure" not in space.status("stopped")
