"""The node itself: what the tests of Sluice take for granted about it."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cluster.testnode.cluster import NODE, Cluster, Mount, Refused

pytestmark = pytest.mark.cluster

IMAGE = "sluice.test/sluice-engine:dev"  # any image with a Python and a shell
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def container(name: str, *command: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": IMAGE, "command": list(command), "securityContext": RESTRICTED, **more}


def pod(name: str, *containers: dict[str, Any], mounts: tuple[Mount, ...] = (), **more: Any) -> dict[str, Any]:
    for one in containers:
        one["volumeMounts"] = [mount.volume_mount for mount in mounts]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": list(containers),
            "volumes": [mount.volume for mount in mounts],
            "restartPolicy": "Never",
            **more,
        },
    }


def phase(node: Cluster, name: str, namespace: str) -> str:
    found: str = node.get("pod", name, namespace)["status"]["phase"]
    return found


def finished(node: Cluster, name: str, namespace: str) -> dict[str, Any]:
    """How the pod's only container ended."""
    node.wait_for(f"pod {name} has ended", lambda: phase(node, name, namespace) in {"Succeeded", "Failed"}, 120)
    ended: dict[str, Any] = node.get("pod", name, namespace)["status"]["containerStatuses"][0]["state"]["terminated"]
    return ended


def test_the_node_is_ready_and_takes_pods(node: Cluster) -> None:
    found = node.get("node", NODE)
    assert {c["type"]: c["status"] for c in found["status"]["conditions"]}["Ready"] == "True"
    assert "taints" not in found["spec"]
    assert found["status"]["nodeInfo"]["kubeletVersion"].startswith("v1.36.")


def test_the_images_of_the_product_are_there_without_a_registry(node: Cluster) -> None:
    names = {name for image in node.get("node", NODE)["status"]["images"] for name in image["names"]}
    assert {f"sluice.test/sluice-{part}:dev" for part in ("engine", "sidecar", "operator")} <= names


def test_a_restricted_namespace_refuses_a_pod_that_asks_for_more(node: Cluster, namespace: str) -> None:
    greedy = pod("greedy", container("main", "true"))
    greedy["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(Refused, match="violates PodSecurity"):
        node.apply(greedy, namespace=namespace)


def test_on_deletion_both_hooks_start_and_the_native_sidecar_is_told_last(
    node: Cluster, namespace: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)  # the pod writes as somebody else
    diary = node.mount(namespace, "diary", tmp_path, "/diary", read_only=False)
    life = "trap 'echo {0} was told to stop >> /diary/all; exit 0' TERM; touch /diary/{0}; while :; do sleep 0.05; done"
    engine_hook = "echo engine hook >> /diary/all; while [ ! -e /diary/drained ]; do sleep 0.05; done"
    gate_hook = "while [ ! -e /diary/all ]; do sleep 0.05; done; echo gate hook >> /diary/all; touch /diary/drained"
    hook = {name: {"preStop": {"exec": {"command": ["sh", "-c", text]}}} for name, text in
            (("engine", engine_hook), ("gate", gate_hook))}  # fmt: skip
    gate = container("gate", "sh", "-c", life.format("gate"), lifecycle=hook["gate"], restartPolicy="Always")
    gate["volumeMounts"] = [diary.volume_mount]
    engine = container("engine", "sh", "-c", life.format("engine"), lifecycle=hook["engine"])
    node.apply(pod("pair", engine, mounts=(diary,), initContainers=[gate]), namespace=namespace)
    node.kubectl("wait", "pod/pair", "-n", namespace, "--for=condition=Ready", "--timeout=60s")
    node.wait_for("both run", lambda: (tmp_path / "engine").exists() and (tmp_path / "gate").exists())
    node.kubectl("delete", "pod", "pair", "-n", namespace, "--timeout=60s")
    assert (tmp_path / "all").read_text().splitlines() == [
        "engine hook",
        "gate hook",
        "engine was told to stop",
        "gate was told to stop",
    ]


def test_a_service_address_reaches_a_pod_from_beside_the_node(node: Cluster, namespace: str) -> None:
    serve = container("main", "python3", "-m", "http.server", "8080", "-d", "/opt/sluice/requirements")
    serve["readinessProbe"] = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    node.apply(pod("web", serve), service, namespace=namespace)
    node.kubectl("wait", "pod/web", "-n", namespace, "--for=condition=Ready", "--timeout=60s")
    address = node.get("service", "web", namespace)["spec"]["clusterIP"]

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/engine.txt", timeout=2) as answer:
                return b"aiohttp" in answer.read()
        except OSError:  # kube-proxy learns of the endpoint a moment after the pod is Ready
            return False

    node.wait_for("the service answers", answers, 20)
    assert "GET /engine.txt" in node.kubectl("logs", "web", "-n", namespace)
    assert node.kubectl("exec", "web", "-n", namespace, "--", "id", "-u").strip() == "65532"


def test_a_container_above_its_memory_limit_is_killed(node: Cluster, namespace: str) -> None:
    hungry = container("main", "python3", "-c", "b'x' * (256 << 20)", resources={"limits": {"memory": "64Mi"}})
    node.apply(pod("hungry", hungry), namespace=namespace)
    assert finished(node, "hungry", namespace)["reason"] == "OOMKilled"


def test_there_is_no_dns_and_a_name_is_refused_at_once(node: Cluster, namespace: str) -> None:
    # So everything in the node finds the API server by KUBERNETES_SERVICE_HOST, which is an address.
    look = "import socket, time; t = time.time()\ntry: socket.getaddrinfo('kubernetes.default.svc', 443)\n"
    look += "except OSError: raise SystemExit(7 if time.time() - t < 3 else 8)"
    node.apply(pod("asks", container("main", "python3", "-c", look)), namespace=namespace)
    assert finished(node, "asks", namespace)["exitCode"] == 7


def test_a_pod_that_asks_for_a_gpu_waits_until_the_node_offers_one(node: Cluster, namespace: str) -> None:
    wants = container("main", "true", resources={"limits": {"nvidia.com/gpu": "1"}})
    node.offer_gpus(0)
    node.apply(pod("wants", wants), namespace=namespace)

    def scheduled() -> dict[str, Any]:
        conditions = {c["type"]: c for c in node.get("pod", "wants", namespace)["status"]["conditions"]}
        found: dict[str, Any] = conditions["PodScheduled"]
        return found

    node.wait_for("it cannot be scheduled", lambda: scheduled()["status"] == "False")
    assert "Insufficient nvidia.com/gpu" in scheduled()["message"]
    node.offer_gpus(1)
    assert finished(node, "wants", namespace)["exitCode"] == 0


@pytest.mark.slow
def test_a_restricted_pod_computes_with_the_mounted_torch(node: Cluster, namespace: str) -> None:
    torch = node.mount_torch(namespace)
    code = "import torch, json; print(json.dumps([torch.__file__, (torch.ones(3) * 2).sum().item()]))"
    main = container("main", "python3", "-c", code, env=list(torch.env))
    node.apply(pod("computes", main, mounts=(torch,)), namespace=namespace)
    assert finished(node, "computes", namespace)["exitCode"] == 0
    where, total = json.loads(node.kubectl("logs", "computes", "-n", namespace).splitlines()[-1])
    assert where.startswith("/torch/")
    assert total == 6
