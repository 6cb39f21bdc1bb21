"""The Kubernetes objects of an InferenceService.

Owns every object the operator writes. Equal specs give equal bytes, so a hash tells whether anything changed. Pure.
Next: `plan.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sluice_engine import codec
from sluice_operator.rendering.files import Paths, files
from sluice_operator.rendering.kept import Kept, Rendering, known_part, noted, revision_object
from sluice_operator.rendering.labels import selector
from sluice_operator.rendering.ownership import metadata
from sluice_operator.rendering.pod_template import Images, Object, pod_template
from sluice_operator.rendering.rollout import IN_PLACE
from sluice_operator.rendering.surroundings import Surroundings, around
from sluice_operator.resource.spec import ServiceSpec

_NOTHING_SPECIAL = Surroundings()


def objects(
    spec: ServiceSpec,
    images: Images,
    otlp_endpoint: str = "",
    surroundings: Surroundings = _NOTHING_SPECIAL,
    kept: Kept | None = None,
) -> tuple[Object, ...]:
    """All objects of the service, in the order in which they are applied. `otlp_endpoint`: where gates send spans.

    Pods run by the rendering that is kept for them; None: by a new one, which nothing keeps.
    """
    used = kept.rendering if kept else rendering(spec, images, otlp_endpoint)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(spec, used.config_name),
        "immutable": True,
        "data": dict(used.config),
    }
    live = _live_map(spec, {"live.json": codec.to_json(live_document(spec, kept))})
    rendered = [config, live, _service(spec), _deployment(spec, used.template, kept)]
    if kept:
        rendered.insert(0, revision_object(spec, kept))
    if "serviceAccountName" not in spec.pod_template:
        rendered.insert(0, _service_account(spec))
    return (*rendered, *around(spec, surroundings))


def rendering(spec: ServiceSpec, images: Images, otlp_endpoint: str) -> Rendering:
    """What decides how pods run and changes only with a restart, as this release has it."""
    config = files(spec, Paths(), otlp_endpoint).at_start()
    # Named for its content, so that another content is another revision of the pods.
    name = f"{spec.name}-config-{hashlib.sha256(codec.to_json(config).encode()).hexdigest()[:10]}"
    return Rendering(
        template=pod_template(spec, images, config_name=name, live_name=_live_name(spec)),
        config_name=name,
        config=config,
    )


def live_document(spec: ServiceSpec, kept: Kept | None) -> Object:
    """What pods follow while they run, without the keys that the programs of their release do not know."""
    document = codec.encode(spec.live)
    written: Object = known_part(document, kept.live_shape) if kept else document
    return written


def url(spec: ServiceSpec) -> str:
    """Where clients inside the cluster send requests."""
    return f"http://{spec.name}.{spec.namespace}.svc"


def _live_name(spec: ServiceSpec) -> str:
    return f"{spec.name}-live"


def _live_map(spec: ServiceSpec, data: Mapping[str, str]) -> Object:
    """What pods follow while they run: its name stays, its content changes under them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(spec, _live_name(spec)),
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


def _deployment(spec: ServiceSpec, template: Object, kept: Kept | None) -> Object:
    # Auto begins as a surge; `rollout.py` says when it is in place.
    surge, unavailable = (0, 1) if spec.strategy == IN_PLACE else (1, 0)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**metadata(spec, spec.name), **({"annotations": noted(spec, kept)} if kept else {})},
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
            "template": template,
        },
    }
