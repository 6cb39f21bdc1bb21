"""The Kubernetes objects of an InferenceService.

Owns every object the operator writes. Equal specs give equal bytes, so a hash tells whether anything changed. Pure.
Next: `plan.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sluice_engine import codec
from sluice_operator.files import Paths, files
from sluice_operator.labels import selector
from sluice_operator.ownership import metadata
from sluice_operator.pod_template import Images, Object, pod_template
from sluice_operator.rollout import IN_PLACE
from sluice_operator.spec import ServiceSpec
from sluice_operator.surroundings import Surroundings, around

_NOTHING_SPECIAL = Surroundings()


def objects(
    spec: ServiceSpec, images: Images, otlp_endpoint: str = "", surroundings: Surroundings = _NOTHING_SPECIAL
) -> tuple[Object, ...]:
    """All objects of the service, in the order in which they are applied. `otlp_endpoint`: where gates send spans."""
    paths = Paths()
    contents = files(spec, paths, otlp_endpoint)
    config = _config_map(spec, contents.at_start())
    live = _live_map(spec, {"live.json": codec.to_json(contents.live)})
    rendered = [config, live, _service(spec), _deployment(spec, images, config, live)]
    if "serviceAccountName" not in spec.pod_template:
        rendered.insert(0, _service_account(spec))
    return (*rendered, *around(spec, surroundings))


def url(spec: ServiceSpec) -> str:
    """Where clients inside the cluster send requests."""
    return f"http://{spec.name}.{spec.namespace}.svc"


def _config_map(spec: ServiceSpec, data: Mapping[str, str]) -> Object:
    """What pods are started with: named for its content, so that another content is another revision of the pods."""
    content = codec.to_json(dict(data))
    name = f"{spec.name}-config-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(spec, name),
        "immutable": True,
        "data": dict(data),
    }


def _live_map(spec: ServiceSpec, data: Mapping[str, str]) -> Object:
    """What pods follow while they run: its name stays, its content changes under them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(spec, f"{spec.name}-live"),
        "data": dict(data),
    }


def _service_account(spec: ServiceSpec) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(spec, spec.name),
        "automountServiceAccountToken": False,
    }


def _service(spec: ServiceSpec) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(spec, spec.name),
        "spec": {
            "type": "ClusterIP",
            # Both families where the cluster has both; the gate listens on both.
            "ipFamilyPolicy": "PreferDualStack",
            "selector": selector(spec),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}],
        },
    }


def _deployment(spec: ServiceSpec, images: Images, config: Object, live: Object) -> Object:
    # Auto begins as a surge; `rollout.py` says when it is in place.
    surge, unavailable = (0, 1) if spec.strategy == IN_PLACE else (1, 0)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(spec, spec.name),
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
