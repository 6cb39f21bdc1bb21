"""The services of one test, in its own namespace: applied, waited for, looked at, as a user would with kubectl.

Torch and the tiny model are mounted: the image of the engine has neither here.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.testnode.cluster import Cluster, Mount, Object, Refused

EXAMPLES = Path(__file__).resolve().parents[3] / "crds/examples"
KIND = "inferenceservices.sluice.dev"
LABEL = "sluice.dev/inferenceservice"
MODELS_AT = "/models"
TINY = f"{MODELS_AT}/tiny"

# Two cores run a whole node, the programs under test and the tests: nothing here is timed, and nothing hangs for ever.
PATIENCE_S = 300


def models(node: Cluster) -> Path:
    """The folder that engines see as /models; tests put models there."""
    folder = node.run / "models"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    return folder


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace with what engines need mounted from it."""

    node: Cluster
    name: str
    mounts: tuple[Mount, ...]

    @classmethod
    def prepare(cls, node: Cluster, namespace: str) -> Space:
        """The claims of torch and the models in a namespace."""
        mounts = (node.mount_torch(namespace), node.mount(namespace, "models", models(node), MODELS_AT))
        return cls(node, namespace, mounts)

    def tiny(self, name: str, path: str = TINY, **spec: Any) -> Object:
        """A service of the tiny random model, with a promise that two busy cores keep."""
        written = {
            "model": {"servedName": "tiny", "source": {"image": {"path": path}}},
            "slo": {"timeToFirstToken": "60s", "interTokenLatency": "2s"},
            "scheduling": {"maxSequences": 8},  # few cells of the step-time table to measure
            "cache": {"capacity": "4Mi"},
            "accelerator": {"count": 0},
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
            "rollout": {"drainTimeout": "60s"},
            **spec,
        }
        service = {"apiVersion": "sluice.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": name}}
        return self.mounted({**service, "spec": written})

    def mounted(self, service: Object) -> Object:
        """The same service with torch and the models in its engine."""
        # Threads that wait for each other in every layer starve on cores that a whole node keeps busy.
        one_thread = {"name": "OMP_NUM_THREADS", "value": "1"}
        engine = {
            "env": [one_thread, *(variable for mount in self.mounts for variable in mount.env)],
            "volumeMounts": [mount.volume_mount for mount in self.mounts],
        }
        template = {"volumes": [mount.volume for mount in self.mounts], "engine": engine}
        return {**service, "spec": {**service["spec"], "podTemplate": template}}

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """What kubectl prints, in this namespace."""
        return self.node.kubectl("-n", self.name, *words, stdin=stdin, timeout_s=PATIENCE_S + 30)

    def apply(self, service: Object) -> None:
        """Apply an InferenceService."""
        self.node.apply(service, namespace=self.name)

    def refusal(self, service: Object) -> str:
        """What `kubectl apply` says when the API server refuses."""
        try:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(service))
        except Refused as refused:
            return str(refused)
        raise AssertionError(f"{service['metadata']['name']} was accepted")

    def serve(self, service: Object) -> str:
        """Apply an InferenceService, wait until it is Ready, and return where clients beside the node reach it."""
        name = service["metadata"]["name"]
        self.apply(service)
        self.wait(name, "condition=Ready")
        url = self.url(name)
        # kube-proxy learns of a ready pod up to a second after its conditions say so; until then the node refuses.
        self.node.wait_for(f"the node to route {url}", lambda: answers(url))
        return url

    def wait(self, name: str, until: str) -> None:
        """Wait for an InferenceService, in `kubectl wait`'s words; the status is of its newest spec then."""
        generation = self.get(KIND, name)["metadata"]["generation"]
        self.wait_for(f"{KIND}/{name}", f"jsonpath={{.status.observedGeneration}}={generation}")
        self.wait_for(f"{KIND}/{name}", until)

    def wait_for(self, what: str, until: str) -> None:
        """Wait for any object, in `kubectl wait`'s words, such as condition=Ready or delete."""
        self.kubectl("wait", what, f"--for={until}", f"--timeout={PATIENCE_S}s")

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        return self.node.get(kind, name, self.name)

    def url(self, name: str) -> str:
        """The address of its Service: the node routes it, no name server is needed."""
        return f"http://{self.get('service', name)['spec']['clusterIP']}"

    def status(self, name: str) -> Object:
        """Its status now."""
        status: Object = self.get(KIND, name)["status"]
        return status

    def condition(self, name: str, kind: str) -> Object:
        """One condition of its status now."""
        (found,) = [one for one in self.status(name)["conditions"] if one["type"] == kind]
        return dict(found)

    def pods(self, name: str) -> list[Object]:
        """Its pods, the leaving ones too."""
        return self.owned("pods", name)

    def tells_nobody(self, name: str, secret: str) -> bool:
        """Whether a secret is in no object but its own, and in no log of the service or of whoever operates it."""
        kinds = ("configmaps", "events", "controllerrevisions", "deployments", "pods", KIND)
        told = [self.kubectl("get", kind, "-o", "yaml") for kind in kinds]
        told += [self.kubectl("logs", "-l", f"{LABEL}={name}", "--all-containers", "--tail=-1")]
        for pod in self.node.list("pods", selector="app.kubernetes.io/part-of=sluice"):
            where = ("-n", pod["metadata"]["namespace"], pod["metadata"]["name"])
            told.append(self.node.kubectl("logs", *where, "--all-containers", "--tail=-1"))
        return not [text for text in told if secret in text]

    def owned(self, kind: str, name: str) -> list[Object]:
        """The objects of a kind that belong to it."""
        return list(self.node.list(kind, self.name, f"{LABEL}={name}"))


def answers(url: str) -> bool:
    """Whether a gate answers there that it is ready."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return True
    except OSError:
        return False


def example(name: str) -> Object:
    """One of the examples that ship with the definition."""
    loaded: Object = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return loaded
