"""One namespace for one test: it enforces the restricted standard, holds services, and goes with everything in it.

Torch and the tiny model come in through static PersistentVolumes, since the restricted standard forbids hostPath
volumes in pods, and five gigabytes in an image would be copied on every run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from cluster.kubectl import Kubectl, Object

EXAMPLES = Path(__file__).resolve().parents[3] / "crds/examples"
KIND = "inferenceservices.sluice.dev"
TORCH_AT = "/opt/torch"
MODELS_AT = "/models"
TINY = f"{MODELS_AT}/tiny"


def node_folder() -> Path:
    """The run folder of the node that this process runs beside."""
    return Path(os.environ["SLUICE_TEST_NODE"])


@dataclass(frozen=True, slots=True)
class Space:
    """The namespace."""

    kubectl: Kubectl

    @property
    def name(self) -> str:
        """Its name."""
        return self.kubectl.namespace

    def serve(self, service: Object) -> str:
        """Apply an InferenceService, wait until it is Ready, and return where clients of the node reach it."""
        name = service["metadata"]["name"]
        self.kubectl.apply(service)
        self.wait(name, "condition=Ready")
        return self.url(name)

    def wait(self, name: str, until: str) -> None:
        """Wait for an InferenceService; the status is of its newest spec then."""
        generation = self.kubectl.get(KIND, name)["metadata"]["generation"]
        self.kubectl.wait(f"{KIND}/{name}", f"jsonpath={{.status.observedGeneration}}={generation}")
        self.kubectl.wait(f"{KIND}/{name}", until)

    def url(self, name: str) -> str:
        """The address of its Service: the node routes it, no name server is needed."""
        return f"http://{self.kubectl.get('service', name)['spec']['clusterIP']}"

    def status(self, name: str) -> Object:
        """Its status now."""
        status: Object = self.kubectl.get(KIND, name)["status"]
        return status

    def condition(self, name: str, kind: str) -> Object:
        """One condition of its status now."""
        (found,) = [one for one in self.status(name)["conditions"] if one["type"] == kind]
        return dict(found)

    def pods(self, name: str) -> list[Object]:
        """Its pods, the leaving ones too."""
        return self.kubectl.all_of("pods", "-l", f"sluice.dev/inferenceservice={name}")


@contextmanager
def open_space() -> Iterator[Space]:
    """A new namespace, gone afterwards together with its volumes."""
    name = f"test-{uuid4().hex[:8]}"
    kubectl = Kubectl(name)
    enforce = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": enforce}}
    folders = {"torch": Path(json.loads((node_folder() / "plan.json").read_text())["torch"]), "models": models()}
    kubectl.apply(namespace)
    try:
        kubectl.apply(*(item for role, folder in folders.items() for item in _volume(name, role, folder)))
        yield Space(kubectl)
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
        kubectl("delete", "persistentvolume", "--wait=false", *(f"{name}-{role}" for role in folders))


def models() -> Path:
    """The folder that pods see as /models; tests put models there."""
    folder = node_folder() / "models"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    return folder


def _volume(namespace: str, role: str, folder: Path) -> list[Object]:
    """A folder of this machine as a claim in the namespace."""
    spec = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = f"{namespace}-{role}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **spec,
                "capacity": {"storage": "10Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": role},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": role, "namespace": namespace},
            "spec": {**spec, "volumeName": volume, "resources": {"requests": {"storage": "10Gi"}}},
        },
    ]


def with_torch(service: Object) -> Object:
    """The same service with torch and the models mounted into its engine."""
    claims = {"torch": TORCH_AT, "models": MODELS_AT}
    template = {
        "volumes": [{"name": role, "persistentVolumeClaim": {"claimName": role, "readOnly": True}} for role in claims],
        "engine": {
            "env": [{"name": "PYTHONPATH", "value": TORCH_AT}],
            "volumeMounts": [{"name": role, "mountPath": path, "readOnly": True} for role, path in claims.items()],
        },
    }
    return {**service, "spec": {**service["spec"], "podTemplate": template}}


def example(name: str) -> Object:
    """One of the examples that ship with the definition."""
    loaded: Object = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return loaded


def tiny(name: str, path: str = TINY, **spec: Any) -> Object:
    """A service of the tiny random model, with a promise that two busy cores keep."""
    written = {
        "model": {"servedName": "tiny", "source": {"image": {"path": path}}},
        "slo": {"timeToFirstToken": "20s", "interTokenLatency": "2s"},
        "cache": {"capacity": "64Mi"},
        "accelerator": {"count": 0},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "rollout": {"drainTimeout": "60s"},
        **spec,
    }
    return with_torch(
        {"apiVersion": "sluice.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": name}, "spec": written}
    )
