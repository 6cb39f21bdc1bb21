"""`make demo-cluster`: the same on a real Kubernetes node. Install, apply, stream, be refused, delete.

Runs beside a node that `tests/cluster/node.py` started; every step prints the command that a user would type.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from drive import run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.service.release import Release  # noqa: E402  # found through the path above
from cluster.service.space import KIND, Space, example  # noqa: E402
from cluster.testnode.cluster import INSIDE, Cluster, Object, Refused  # noqa: E402

ADMIN_PORT = 9090


def main() -> int:
    """0 when every step did what it should."""
    folder = os.environ.get(INSIDE)
    if folder is None:
        print("demo: this runs beside a node: make demo-cluster", file=sys.stderr)
        return 2
    node = Cluster(Path(folder))
    with node.namespace("sluice-system") as system, node.namespace("demo") as namespace:
        release = Release(node, "sluice", system)
        say(f"helm install sluice charts/sluice --namespace {system}     # with the images of this node")
        print(release.install())
        kept = serve(Space.prepare(node, namespace))
        say(f"helm uninstall sluice --namespace {system}")
        print(release.uninstall())
        say(f"kubectl get crd {KIND}     # kept: your resources outlive a reinstall")
        print(node.kubectl("get", "crd", KIND))
    return 0 if kept else 1


def serve(space: Space) -> bool:
    """The life of one service; whether its promise was kept and it left nothing behind."""
    service = space.mounted(example("demo-cpu"))  # torch is mounted: the node's engine image leaves it out
    name = service["metadata"]["name"]
    say("kubectl apply -f crds/examples/demo-cpu.yaml      # and a volume with torch, which this node's image lacks")
    space.apply(service)
    say("kubectl wait sluice/demo --for=condition=Available      # it loads, then measures its step times")
    space.wait(name, "condition=Available")
    say("kubectl get sluice -o wide")
    print(space.kubectl("get", "sluice", "-o", "wide"))
    slo, (pod,) = service["spec"]["slo"], space.pods(name)
    admin_url = f"http://{pod['status']['podIP']}:{ADMIN_PORT}"
    kept = asyncio.run(run(space.url(name), admin_url, service["spec"]["model"]["servedName"], *promise_s(slo)))
    refuse_a_chunk(space, service)
    say("kubectl describe sluice demo")
    print(space.kubectl("describe", "sluice", name))
    say("kubectl delete sluice demo")
    print(space.kubectl("delete", "sluice", name))
    space.wait_for(f"deployment/{name}", "delete")
    for gone in space.pods(name):
        space.wait_for(f"pod/{gone['metadata']['name']}", "delete")
    return kept


def promise_s(slo: Object) -> tuple[float, float]:
    """Time to first token and inter-token latency of the example, in seconds."""
    return float(slo["timeToFirstToken"].removesuffix("s")), float(slo["interTokenLatency"].removesuffix("ms")) / 1000


def refuse_a_chunk(space: Space, service: Object) -> None:
    """The API server refuses a chunk that the measured cost cannot keep."""
    name = service["metadata"]["name"]
    space.wait_for(f"{KIND}/{name}", "jsonpath={.status.stepCost}")
    say("kubectl apply -f -      # the same with scheduling.prefillChunkTokens: 8192")
    greedy = {**service, "spec": {**service["spec"], "scheduling": {"prefillChunkTokens": 8192}}}
    try:
        space.apply(greedy)
    except Refused as refused:
        print(refused)
    else:
        print("accepted: this machine is fast enough for that chunk")


def say(command: str) -> None:
    """Show the command that this step stands for."""
    print(f"\n$ {command}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
