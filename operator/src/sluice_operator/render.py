"""What an InferenceService becomes: the two programs' files, and the Kubernetes objects around them.

Owns every object the operator writes. The same `Files` serve a pod and local processes; only `Paths` differ. Equal
specs give equal bytes, so a hash tells whether anything changed. Pure. Next: `plan.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_engine import codec
from sluice_engine.config import EngineConfig, LiveConfig
from sluice_operator.spec import ServiceSpec
from sluice_sidecar.config import GateConfig

API_VERSION = "sluice.dev/v1alpha1"
KIND = "InferenceService"
SERVICE_LABEL = "sluice.dev/inferenceservice"
MANAGED_BY = {"app.kubernetes.io/managed-by": "sluice-operator"}
COST_BASIS_ANNOTATION = "sluice.dev/cost-basis"

Object = dict[str, Any]

_ENDPOINT_PROPAGATION_S = 5
# After the drain the gate has to answer 503 until its SIGTERM, and both programs have to end.
_GRACE_MARGIN_S = 15
# The image's user: nobody's, and above every system account.
_USER = 65532


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the two programs find their files. The defaults are a pod's; local processes use folders of their own."""

    run_dir: str = "/run/sluice"
    config_dir: str = "/etc/sluice/config"
    live_dir: str = "/etc/sluice/live"
    cache_dir: str = "/var/cache/sluice"
    termination_log: str = "/dev/termination-log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images that the operator was installed with."""

    engine: str
    gate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The contents of `engine.json`, `gate.json` and `live.json`."""

    engine: EngineConfig
    gate: GateConfig
    live: LiveConfig


def files(spec: ServiceSpec, paths: Paths) -> Files:
    """What engine and gate are told."""
    socket = f"{paths.run_dir}/engine.sock"
    live_path = f"{paths.live_dir}/live.json"
    return Files(
        engine=EngineConfig(
            model=spec.model,
            cache=spec.cache,
            scheduling=spec.scheduling,
            accelerator_count=spec.accelerator_count,
            socket_path=socket,
            live_path=live_path,
            table_dir=paths.cache_dir,
            termination_message_path=paths.termination_log,
        ),
        gate=GateConfig(
            served_name=spec.model.served_name,
            engine_socket=socket,
            live_path=live_path,
            run_dir=paths.run_dir,
            drain_timeout_us=spec.drain_timeout_us,
            endpoint_propagation_us=_ENDPOINT_PROPAGATION_S * 1_000_000,
        ),
        live=spec.live,
    )


def arguments(program: str, paths: Paths) -> list[str]:
    """Arguments of `engine` or `gate`, after the program's name."""
    return ["--config", f"{paths.config_dir}/{program}.json"]


def objects(spec: ServiceSpec, images: Images) -> tuple[Object, ...]:
    """All objects of the service, in the order in which they are applied."""
    paths = Paths()
    contents = files(spec, paths)
    config = _config_map(
        spec, "config", {"engine.json": codec.to_json(contents.engine), "gate.json": codec.to_json(contents.gate)}
    )
    live = _config_map(spec, "live", {"live.json": codec.to_json(contents.live)})
    rendered = [config, live, _service(spec), _deployment(spec, images, config, live)]
    if "serviceAccountName" not in spec.pod_template:
        rendered.insert(0, _service_account(spec))
    return tuple(rendered)


def labels(spec: ServiceSpec) -> dict[str, str]:
    """The labels on everything that belongs to the service."""
    return {
        "app.kubernetes.io/name": "sluice",
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/component": "engine",
        **MANAGED_BY,
        SERVICE_LABEL: spec.name,
    }


def selector(spec: ServiceSpec) -> dict[str, str]:
    """The labels by which the service's pods are found; they never change, since a Deployment's selector cannot."""
    return {SERVICE_LABEL: spec.name}


def url(spec: ServiceSpec) -> str:
    """Where clients inside the cluster send requests."""
    return f"http://{spec.name}.{spec.namespace}.svc"


def cost_basis(spec: ServiceSpec) -> str:
    """A hash of what decides the cost of a step; a cost measured on another basis says nothing about this spec."""
    return codec.digest(spec.cost_basis)


def grace_period_s(spec: ServiceSpec) -> int:
    """Seconds between a pod's deletion and its end by force."""
    return -(-spec.drain_timeout_us // 1_000_000) + _ENDPOINT_PROPAGATION_S + _GRACE_MARGIN_S


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


def _config_map(spec: ServiceSpec, role: str, data: Mapping[str, str]) -> Object:
    content = codec.to_json(dict(data))
    name = f"{spec.name}-{role}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, name),
        "immutable": True,
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
            "template": _pod_template(spec, images, config, live),
        },
    }


def _pod_template(spec: ServiceSpec, images: Images, config: Object, live: Object) -> Object:
    extra = spec.pod_template
    own_cache = not any(_is_cache(mount) for mount in extra.get("engine", {}).get("volumeMounts", ()))
    pod: Object = {
        "serviceAccountName": extra.get("serviceAccountName", spec.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_period_s(spec),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_gate_container(spec, images)],
        "containers": [_engine_container(spec, images, own_cache=own_cache)],
        "volumes": [
            {"name": "sluice-config", "configMap": {"name": config["metadata"]["name"]}},
            {"name": "sluice-live", "configMap": {"name": live["metadata"]["name"]}},
            {"name": "sluice-run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
            {"name": "sluice-tmp", "emptyDir": {}},
            {"name": "sluice-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            *([{"name": "sluice-cache", "emptyDir": {}}] if own_cache else []),
            *extra.get("volumes", ()),
        ],
    }
    if claims := spec.resources.get("claims"):
        template = "resourceClaimTemplateName"
        pod["resourceClaims"] = [{"name": claim["name"], template: claim[template]} for claim in claims]
    for field in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "priorityClassName",
        "runtimeClassName",
        "imagePullSecrets",
    ):
        if field in extra:
            pod[field] = extra[field]
    annotations = {
        "kubectl.kubernetes.io/default-container": "engine",
        **extra.get("annotations", {}),
        "sluice.dev/config": config["metadata"]["name"].rpartition("-")[2],
        "sluice.dev/live": live["metadata"]["name"].rpartition("-")[2],
        COST_BASIS_ANNOTATION: cost_basis(spec),
    }
    return {
        "metadata": {"labels": {**extra.get("labels", {}), **labels(spec)}, "annotations": annotations},
        "spec": pod,
    }


def _is_cache(mount: Mapping[str, Any]) -> bool:
    return str(mount["mountPath"]).rstrip("/") == Paths().cache_dir


def _engine_container(spec: ServiceSpec, images: Images, *, own_cache: bool) -> Object:
    extra = spec.pod_template.get("engine", {})
    env: list[Object] = [{"name": "HOME", "value": "/tmp"}]  # noqa: S108  # the pod's own emptyDir
    if spec.accelerator_count == 0:
        # A container sees all of the node's cores; compute threads beyond its limit only throttle each other.
        limit = {"containerName": "engine", "resource": "limits.cpu", "divisor": "1"}
        env.append({"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": limit}})
    own = {variable["name"] for variable in extra.get("env", ())}
    container: Object = {
        "name": "engine",
        "image": spec.image or images.engine,
        "imagePullPolicy": spec.image_pull_policy,
        "args": arguments("engine", Paths()),
        "env": [variable for variable in env if variable["name"] not in own] + list(extra.get("env", ())),
        "resources": _resources(spec),
        "securityContext": _container_security(),
        # The gate answers these: the engine listens on a socket only. They fail on positive evidence alone, so a slow
        # load is given its hour, and a kill does not wait for streams that no engine serves any more.
        "startupProbe": _probe("/engine/startupz", 9090, period_s=5, failures=720, grace_s=5),
        "livenessProbe": _probe("/engine/livez", 9090, period_s=5, failures=3, grace_s=5),
        "lifecycle": {"preStop": _shell(f"while [ ! -e {Paths().run_dir}/drained ]; do sleep 0.2; done")},
        "terminationMessagePath": Paths().termination_log,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *_common_mounts(),
            {"name": "sluice-shm", "mountPath": "/dev/shm"},  # noqa: S108  # the pod's own emptyDir
            *([{"name": "sluice-cache", "mountPath": Paths().cache_dir}] if own_cache else []),
            *extra.get("volumeMounts", ()),
        ],
    }
    if "envFrom" in extra:
        container["envFrom"] = extra["envFrom"]
    return container


def _gate_container(spec: ServiceSpec, images: Images) -> Object:
    drained = f"{Paths().run_dir}/drained"
    return {
        "name": "gate",
        "image": images.gate,
        "imagePullPolicy": spec.image_pull_policy,
        # A native sidecar: it starts before the engine and gets its SIGTERM only after the engine has ended.
        "restartPolicy": "Always",
        "args": arguments("gate", Paths()),
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108  # the pod's own emptyDir
        "ports": [
            {"name": "http", "containerPort": 8080, "protocol": "TCP"},
            {"name": "admin", "containerPort": 9090, "protocol": "TCP"},
        ],
        # 512 MiB: 256 MiB of request bodies held at most, and the program itself.
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _container_security(),
        "startupProbe": _probe("/livez", 9090, period_s=1, failures=60, grace_s=5),
        "livenessProbe": _probe("/livez", 9090, period_s=5, failures=3, grace_s=5),
        "readinessProbe": _probe("/readyz", 8080, period_s=2, failures=1),
        "lifecycle": {"preStop": _shell(f"kill -USR1 1; while [ ! -e {drained} ]; do sleep 0.2; done")},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _common_mounts(),
    }


def _common_mounts() -> list[Object]:
    paths = Paths()
    return [
        {"name": "sluice-config", "mountPath": paths.config_dir, "readOnly": True},
        {"name": "sluice-live", "mountPath": paths.live_dir, "readOnly": True},
        {"name": "sluice-run", "mountPath": paths.run_dir},
        {"name": "sluice-tmp", "mountPath": "/tmp"},  # noqa: S108  # the pod's own emptyDir
    ]


def _container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _resources(spec: ServiceSpec) -> Object:
    written = spec.resources
    result: Object = {kind: dict(written[kind]) for kind in ("requests", "limits") if kind in written}
    if spec.accelerator_count:
        result.setdefault("limits", {})[spec.accelerator_resource] = str(spec.accelerator_count)
    if claims := written.get("claims"):
        result["claims"] = [{key: claim[key] for key in ("name", "request") if key in claim} for claim in claims]
    return result


def _probe(path: str, port: int, *, period_s: int, failures: int, grace_s: int | None = None) -> Object:
    # 5 s: on a machine whose cores all compute, an answer may wait for a time slice.
    probe: Object = {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
    if grace_s is not None:
        probe["terminationGracePeriodSeconds"] = grace_s
    return probe


def _shell(script: str) -> Object:
    return {"exec": {"command": ["/bin/sh", "-c", script]}}
