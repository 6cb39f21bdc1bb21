"""The pod: engine container, gate as a native sidecar, their probes, hooks, security and volumes.

Owns the drain's order: the preStop hooks of both run at once, the gate's ends the drain, and the gate's SIGTERM comes
only after the engine has ended. Pure. Next: `render.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator.rendering.files import ENDPOINT_PROPAGATION_S, Paths, arguments
from sluice_operator.rendering.foreign.runtime import command, environment, is_foreign
from sluice_operator.rendering.labels import COST_BASIS_ANNOTATION, cost_basis, labels, selector
from sluice_operator.resource.model_source import model_environment, model_mounts, model_volumes
from sluice_operator.resource.spec import ServiceSpec

Object = dict[str, Any]

# After the drain the gate has to answer 503 until its SIGTERM, and both programs have to end.
_GRACE_MARGIN_S = 15
# The images' user: nobody's, and above every system account.
_USER = 65532


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images that the operator was installed with."""

    engine: str
    gate: str


def grace_period_s(spec: ServiceSpec) -> int:
    """Seconds between a pod's deletion and its end by force."""
    return -(-spec.drain_timeout_us // 1_000_000) + ENDPOINT_PROPAGATION_S + _GRACE_MARGIN_S


def pod_template(spec: ServiceSpec, images: Images, *, config_name: str, live_name: str) -> Object:
    """The Deployment's template, with the two ConfigMaps mounted, and the hash of the one that rolls the pods."""
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
            {"name": "sluice-config", "configMap": {"name": config_name}},
            {"name": "sluice-live", "configMap": {"name": live_name}},
            *_key_volumes(spec),
            {"name": "sluice-run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
            {"name": "sluice-tmp", "emptyDir": {}},
            {"name": "sluice-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            *([{"name": "sluice-cache", "emptyDir": {}}] if own_cache else []),
            *model_volumes(spec.model.source, spec.hub),
            *extra.get("volumes", ()),
        ],
    }
    if claims := spec.resources.get("claims"):
        template = "resourceClaimTemplateName"
        pod["resourceClaims"] = [{"name": claim["name"], template: claim[template]} for claim in claims]
    pod["topologySpreadConstraints"] = _spread(spec)
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
        "sluice.dev/config": config_name.rpartition("-")[2],
        COST_BASIS_ANNOTATION: cost_basis(spec),
    }
    return {
        "metadata": {"labels": {**extra.get("labels", {}), **labels(spec)}, "annotations": annotations},
        "spec": pod,
    }


def _spread(spec: ServiceSpec) -> list[Object]:
    """Over nodes and zones, as far as there is room; a list of the user's own takes its place."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(spec)},
            # Each revision by itself: pods that are about to go push no new pod to a worse place.
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]


def _is_cache(mount: Mapping[str, Any]) -> bool:
    return str(mount["mountPath"]).rstrip("/") == Paths().cache_dir


def _engine_container(spec: ServiceSpec, images: Images, *, own_cache: bool) -> Object:
    extra = spec.pod_template.get("engine", {})
    own_home: Object = {"name": "HOME", "value": "/tmp"}  # noqa: S108  # the pod's own emptyDir
    env = environment(spec, Paths().cache_dir) if is_foreign(spec) else [own_home]
    if spec.accelerator_count == 0:
        # A container sees all of the node's cores; compute threads beyond its limit only throttle each other.
        limit = {"containerName": "engine", "resource": "limits.cpu", "divisor": "1"}
        env.append({"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": limit}})
    env += model_environment(spec.hub)
    own = {variable["name"] for variable in extra.get("env", ())}
    container: Object = {
        "name": "engine",
        "image": spec.image or images.engine,
        "imagePullPolicy": spec.image_pull_policy,
        # Another engine's image may begin with anything: the command line is ours, whole.
        **({"command": _literally(command(spec))} if is_foreign(spec) else {"args": arguments("engine", Paths())}),
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
            *model_mounts(spec.model.source, spec.hub),
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
        # Again and again: a gate that restarts just now has no handler for the signal yet, or forgets it.
        "lifecycle": {"preStop": _shell(f"while [ ! -e {drained} ]; do kill -USR1 1; sleep 0.2; done")},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *_common_mounts(),
            *({"name": one["name"], "mountPath": Paths().keys_dir, "readOnly": True} for one in _key_volumes(spec)),
        ],
    }


def _key_volumes(spec: ServiceSpec) -> list[Object]:
    """The API keys, for the gate alone."""
    # Optional: a Secret that comes later is mounted then, and until then the gate lets nobody in, which its state says.
    # A pod that cannot start would say nothing, and load nothing meanwhile.
    if not spec.api_keys_secret:
        return []
    return [{"name": "sluice-keys", "secret": {"secretName": spec.api_keys_secret, "optional": True}}]


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


def _literally(words: list[str]) -> list[str]:
    """A command as it is written: Kubernetes would put a variable in place of `$(NAME)`."""
    return [word.replace("$", "$$") for word in words]


def _shell(script: str) -> Object:
    return {"exec": {"command": ["/bin/sh", "-c", script]}}
