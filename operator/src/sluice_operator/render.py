"""The Kubernetes objects of an InferenceService.

Owns every object the operator writes. Equal specs give equal bytes, so a hash tells whether anything changed. Pure.
Next: `plan.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sluice_engine import codec
from sluice_operator.files import Paths, files
from sluice_operator.labels import labels, selector
from sluice_operator.pod_template import Images, Object, pod_template
from sluice_operator.spec import ServiceSpec

API_VERSION = "sluice.dev/v1alpha1"
KIND = "InferenceService"


def objects(spec: ServiceSpec, images: Images, otlp_endpoint: str = "") -> tuple[Object, ...]:
    """All objects of the service, in the order in which they are applied. `otlp_endpoint`: where gates send spans."""
    paths = Paths()
    contents = files(spec, paths, otlp_endpoint)
    config = _config_map(
        spec, {"engine.json": codec.to_json(contents.engine), "gate.json": codec.to_json(contents.gate)}
    )
    live = _live_map(spec, {"live.json": codec.to_json(contents.live)})
    rendered = [config, live, _service(spec), _deployment(spec, images, config, live)]
    if "serviceAccountName" not in spec.pod_template:
        rendered.insert(0, _service_account(spec))
    return tuple(rendered)


def url(spec: ServiceSpec) -> str:
    """Where clients inside the cluster send requests."""
    return f"http://{spec.name}.{spec.namespace}.svc"


def _metadata(spec: ServiceSpec, name: str) -> Object:
    metadata: Object = {"name": name}
    if spec.namespace:
        metadata["namespace"] = spec.namespace
    metadata["labels"] = labels(spec)
    if spec.uid:
        # No blockOwnerDeletion: it would need rights on the owner's finalizers, and nothing waits for our objects.
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": spec.name, "uid": spec.uid, "controller": True}
        metadata["ownerReferences"] = [owner]
    return metadata


def _config_map(spec: ServiceSpec, data: Mapping[str, str]) -> Object:
    """What pods are started with: named for its content, so that another content is another revision of the pods."""
    content = codec.to_json(dict(data))
    name = f"{spec.name}-config-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, name),
        "immutable": True,
        "data": dict(data),
    }


def _live_map(spec: ServiceSpec, data: Mapping[str, str]) -> Object:
    """What pods follow while they run: its name stays, its content changes under them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, f"{spec.name}-live"),
        "data": dict(data),
    }


def _service_account(spec: ServiceSpec) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(spec, spec.name),
        "automountServiceAccountToken": False,
    }


def _service(spec: ServiceSpec) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, spec.name),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(spec),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}],
        },
    }


def _deployment(spec: ServiceSpec, images: Images, config: Object, live: Object) -> Object:
    surge, unavailable = (1, 0) if spec.strategy == "Surge" else (0, 1)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(spec, spec.name),
        "spec": {
            "replicas": spec.replicas,
            "revisionHistoryLimit": 2,
            # Loading a large model takes as long as the startup probe lets it.
            "progressDeadlineSeconds": 3900,
            "selector": {"matchLabels": selector(spec)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
            },
            "template": pod_template(spec, images, config, live),
        },
    }
