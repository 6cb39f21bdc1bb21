"""The objects that a service becomes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import operator_scene as scene
from sluice_engine import codec
from sluice_engine.config import EngineConfig
from sluice_engine.live_config import LiveConfig
from sluice_operator.cluster.kinds import OPTIONAL_KINDS
from sluice_operator.rendering.files import Paths, files
from sluice_operator.rendering.pod_template import grace_period_s
from sluice_operator.rendering.render import objects
from sluice_operator.rendering.surroundings import Surroundings
from sluice_operator.resource import manifest
from sluice_sidecar.config import GateConfig

HERE = Path(__file__).parent
GOLDEN = runpy.run_path(str(HERE / "golden.py"))["rendered"]()


def by_kind(spec: Any) -> dict[str, Any]:
    return {item["kind"]: item for item in objects(spec, scene.IMAGES)}


def pod_of(spec: Any) -> dict[str, Any]:
    pod: dict[str, Any] = by_kind(spec)["Deployment"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_golden_file_is_what_is_rendered(name: str) -> None:
    assert (HERE / "golden" / name).read_text() == GOLDEN[name], "`make golden` rewrites it; review reads the diff"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in (HERE / "golden").glob("*.yaml")} == set(GOLDEN)


def test_the_programs_read_the_very_files_that_are_rendered() -> None:
    spec = scene.example("full")
    maps = {item["metadata"]["name"]: item for item in objects(spec, scene.IMAGES) if item["kind"] == "ConfigMap"}
    data = {key: text for item in maps.values() for key, text in item["data"].items()}
    expected = files(spec, Paths())

    assert codec.from_json(EngineConfig, data["engine.json"], "engine") == expected.engine
    assert codec.from_json(GateConfig, data["gate.json"], "gate") == expected.gate
    assert codec.from_json(LiveConfig, data["live.json"], "live") == expected.live


@settings(deadline=None)
@given(
    chunk=st.none() | st.integers(16, 100_000),
    replicas=st.integers(0, 1000),
    capacity=st.integers(1, 10**12),
    count=st.integers(0, 8),
    drain_s=st.integers(1, 3600),
)
def test_the_same_spec_gives_the_same_bytes(
    chunk: int | None, replicas: int, capacity: int, count: int, drain_s: int
) -> None:
    changes: dict[str, Any] = {
        "replicas": replicas,
        "cache": {"capacity": capacity},
        "accelerator": {"count": count},
        "rollout": {"drainTimeout": f"{drain_s}s"},
        "scheduling": {} if chunk is None else {"prefillChunkTokens": chunk},
    }

    first, second = (objects(scene.spec(changes), scene.IMAGES) for _ in range(2))

    assert [codec.to_json(item) for item in first] == [codec.to_json(item) for item in second]


@pytest.mark.parametrize(
    ("changes", "config_moves", "live_moves"),
    [
        pytest.param({"admission": {"mode": "Observe"}}, False, True, id="the mode moves only the live file"),
        pytest.param({"admission": {"retryBudgetPercent": 5}}, False, True, id="retries move only the live file"),
        pytest.param(
            {"admission": {"tenants": [{"name": "a", "tokensPerSecond": 9}]}},
            False,
            True,
            id="a quota moves only the live file",
        ),
        pytest.param(
            {"admission": {"apiKeysSecretRef": {"name": "keys"}}},
            True,
            False,
            id="keys where none were move the gate's file",
        ),
        pytest.param({"slo": {"interTokenLatency": "100ms"}}, False, True, id="a promise moves only the live file"),
        pytest.param({"scheduling": {"prefillChunkTokens": 64}}, False, True, id="a chunk moves only the live file"),
        pytest.param({"scheduling": {"maxSequences": 8}}, True, False, id="the batch moves the engine's file"),
        pytest.param({"cache": {"memoryPercent": 50}}, True, False, id="the cache moves the engine's file"),
        pytest.param({"rollout": {"drainTimeout": "60s"}}, True, False, id="the drain moves the gate's file"),
        pytest.param({"replicas": 5}, False, False, id="scaling moves no file"),
        pytest.param({"podTemplate": {"labels": {"a": "b"}}}, False, False, id="a label moves no file"),
    ],
)
def test_a_change_moves_the_file_that_it_belongs_to(
    changes: dict[str, Any], *, config_moves: bool, live_moves: bool
) -> None:
    def maps(spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config, live = (item for item in objects(spec, scene.IMAGES) if item["kind"] == "ConfigMap")
        return config, live

    config, live = maps(scene.spec())
    new_config, new_live = maps(scene.spec(changes))

    assert (config != new_config, live != new_live) == (config_moves, live_moves)
    assert (config["metadata"]["name"] != new_config["metadata"]["name"]) == config_moves
    assert live["metadata"]["name"] == new_live["metadata"]["name"] == "chat-live"
    assert "immutable" not in live


def test_what_pods_follow_while_they_run_is_no_part_of_their_template() -> None:
    def template(changes: dict[str, Any]) -> Any:
        return by_kind(scene.spec(changes))["Deployment"]["spec"]["template"]

    changes = {
        "slo": {"interTokenLatency": "100ms"},
        "admission": {"maxWait": "2s"},
        "scheduling": {"agingInterval": "5s"},
    }
    assert template(changes) == template({})


def test_api_keys_are_mounted_into_the_gate_alone_and_may_come_later() -> None:
    pod = pod_of(scene.spec({"admission": {"apiKeysSecretRef": {"name": "keys"}}}))
    (volume,) = [one for one in pod["volumes"] if one["name"] == "sluice-keys"]
    (gate,), (engine,) = pod["initContainers"], pod["containers"]

    assert volume == {"name": "sluice-keys", "secret": {"secretName": "keys", "optional": True}}
    assert {"name": "sluice-keys", "mountPath": "/etc/sluice/keys", "readOnly": True} in gate["volumeMounts"]
    assert "sluice-keys" not in str(engine)
    assert "sluice-keys" not in str(pod_of(scene.spec()))


def claim(**path: str) -> dict[str, Any]:
    return {"model": {"source": {"persistentVolumeClaim": {"claimName": "models", **path}}}}


def test_a_claim_is_mounted_read_only_into_the_engine_alone() -> None:
    pod = pod_of(scene.spec(claim(path="llama")))
    (volume,) = [one for one in pod["volumes"] if one["name"] == "sluice-model"]
    (gate,), (engine,) = pod["initContainers"], pod["containers"]

    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert {"name": "sluice-model", "mountPath": "/var/lib/sluice/model", "readOnly": True} in engine["volumeMounts"]
    assert "sluice-model" not in str(gate)
    assert "sluice-model" not in str(pod_of(scene.spec()))


@pytest.mark.parametrize(
    ("path", "is_at"),
    [
        pytest.param({"path": "llama"}, "/var/lib/sluice/model/llama", id="a folder"),
        pytest.param({"path": "/a/b.gguf"}, "/var/lib/sluice/model/a/b.gguf", id="a path from the volume's root"),
        pytest.param({"path": "llama/"}, "/var/lib/sluice/model/llama", id="a folder with a slash"),
        pytest.param({}, "/var/lib/sluice/model", id="the volume itself"),
        pytest.param({"path": "/"}, "/var/lib/sluice/model", id="its root"),
    ],
)
def test_the_engine_finds_the_model_where_the_claim_is_mounted(path: dict[str, str], is_at: str) -> None:
    source = files(scene.spec(claim(**path)), Paths()).engine.model.source

    assert (source.path, source.claim) == (is_at, "models")


def hub(**fields: Any) -> dict[str, Any]:
    return {"model": {"source": {"huggingFace": {"repository": "acme/llama", **fields}}}}


def test_a_hubs_model_is_kept_as_long_as_the_pod_lives() -> None:
    pod = pod_of(scene.spec(hub()))
    (engine,) = pod["containers"]

    assert {"name": "sluice-hub", "emptyDir": {}} in pod["volumes"]
    assert {"name": "sluice-hub", "mountPath": "/var/lib/sluice/hub"} in engine["volumeMounts"]
    assert "HF_TOKEN" not in str(pod)
    source = files(scene.spec(hub()), Paths()).engine.model.source.hub
    assert source is not None
    assert (source.repository, source.revision, source.cache_dir) == ("acme/llama", "main", "/var/lib/sluice/hub")


def test_a_hubs_model_is_kept_on_the_volume_that_the_user_names() -> None:
    volumes = [{"name": "mine", "persistentVolumeClaim": {"claimName": "hub"}}]
    pod = pod_of(scene.spec({**hub(cacheVolume="mine"), "podTemplate": {"volumes": volumes}}))

    assert {"name": "mine", "mountPath": "/var/lib/sluice/hub"} in pod["containers"][0]["volumeMounts"]
    assert "sluice-hub" not in str(pod)


def test_the_token_goes_from_its_secret_to_the_engine_and_is_written_nowhere() -> None:
    spec = scene.spec(hub(tokenSecretRef={"name": "hf", "key": "token"}))
    pod = pod_of(spec)
    reference = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}

    assert reference in pod["containers"][0]["env"]
    assert "HF_TOKEN" not in str(pod["initContainers"])
    assert "hf" not in str([one["data"] for one in objects(spec, scene.IMAGES) if one["kind"] == "ConfigMap"])


def test_the_operators_collector_is_told_to_every_gate() -> None:
    def gate_file(endpoint: str) -> GateConfig:
        config, _ = (item for item in objects(scene.spec(), scene.IMAGES, endpoint) if item["kind"] == "ConfigMap")
        return codec.from_json(GateConfig, config["data"]["gate.json"], "gate")

    assert gate_file("http://collector:4318").otlp_endpoint == "http://collector:4318"
    assert gate_file("").otlp_endpoint == ""


def test_everything_is_owned_by_the_resource_and_blocks_nothing() -> None:
    for item in rendered(scene.spec()):
        (owner,) = item["metadata"]["ownerReferences"]
        assert owner["uid"] == scene.UID
        assert owner["controller"] is True
        assert "blockOwnerDeletion" not in owner


def test_a_scaled_service_has_the_same_template() -> None:
    one, two = (by_kind(scene.spec({"replicas": n}))["Deployment"]["spec"] for n in (1, 2))

    assert one["template"] == two["template"]
    assert (one["replicas"], two["replicas"]) == (1, 2)


@pytest.mark.parametrize(("strategy", "surge", "unavailable"), [("Auto", 1, 0), ("Surge", 1, 0), ("InPlace", 0, 1)])
def test_the_strategy_says_which_pod_goes_first(strategy: str, surge: int, unavailable: int) -> None:
    deployment = by_kind(scene.spec({"rollout": {"strategy": strategy}}))["Deployment"]

    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert (rolling["maxSurge"], rolling["maxUnavailable"]) == (surge, unavailable)


def test_the_grace_period_outlasts_drain_and_propagation() -> None:
    assert grace_period_s(scene.spec({"rollout": {"drainTimeout": "1500ms"}})) == 2 + 5 + 15


def test_a_node_can_always_be_drained_of_one_pod_at_a_time() -> None:
    for replicas in (0, 1, 3):
        budget = by_kind(scene.spec({"replicas": replicas}))["PodDisruptionBudget"]["spec"]

        assert budget["maxUnavailable"] == 1, "counted from below, one replica would block every drain"
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert budget["selector"]["matchLabels"] == {"sluice.dev/inferenceservice": "chat"}


def policy(surroundings: Surroundings) -> dict[str, Any]:
    (found,) = [one for one in rendered(scene.spec(), surroundings) if one["kind"] == "NetworkPolicy"]
    written: dict[str, Any] = found["spec"]
    return written


def rendered(spec: Any, surroundings: Surroundings = scene.EVERYTHING) -> tuple[dict[str, Any], ...]:
    return objects(spec, scene.IMAGES, surroundings=surroundings)


def test_everybody_reaches_the_gate_and_named_namespaces_its_admin_port() -> None:
    everybody, named = policy(Surroundings(admin_namespaces=("sluice-system", "monitoring", "monitoring")))["ingress"]

    assert everybody == {"ports": [{"protocol": "TCP", "port": 8080}]}
    assert named["ports"] == [{"protocol": "TCP", "port": 9090}]
    ((peer,),) = (named["from"],)
    (among,) = peer["namespaceSelector"]["matchExpressions"]
    assert among == {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": ["monitoring", "sluice-system"],
    }


def test_where_no_namespace_is_named_nobody_reaches_the_admin_port() -> None:
    ingress = policy(Surroundings(admin_namespaces=()))["ingress"]

    # A rule without peers would let everybody in.
    assert ingress == [{"ports": [{"protocol": "TCP", "port": 8080}]}]


def test_a_network_policy_can_be_turned_off_for_all() -> None:
    kinds = {one["kind"] for one in rendered(scene.spec(), Surroundings(network_policy=False))}

    assert "NetworkPolicy" not in kinds


@pytest.mark.parametrize(
    ("switch", "kinds", "is_made"),
    [
        pytest.param("Enabled", frozenset(OPTIONAL_KINDS), True, id="made where the cluster has the kind"),
        pytest.param("Enabled", frozenset(), False, id="not made where it lacks it"),
        pytest.param("Disabled", frozenset(OPTIONAL_KINDS), False, id="not made when it is not wanted"),
    ],
)
def test_a_pod_monitor_is(switch: str, kinds: frozenset[str], *, is_made: bool) -> None:
    spec = scene.spec({"monitoring": {"podMonitor": switch}})

    made = [one for one in rendered(spec, Surroundings(kinds=kinds)) if one["kind"] == "PodMonitor"]

    assert bool(made) is is_made


def test_a_pod_monitor_is_found_by_its_prometheus_and_scrapes_the_admin_port() -> None:
    surroundings = Surroundings(kinds=frozenset(OPTIONAL_KINDS), pod_monitor_labels={"release": "prometheus"})
    (monitor,) = [one for one in rendered(scene.spec(), surroundings) if one["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (gate,) = pod_of(scene.spec())["initContainers"]

    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["metadata"]["labels"]["sluice.dev/inferenceservice"] == "chat"
    assert {"name": endpoint["port"], "containerPort": 9090, "protocol": "TCP"} in gate["ports"]
    assert endpoint["relabelings"] == [
        {
            "sourceLabels": ["__meta_kubernetes_pod_label_sluice_dev_inferenceservice"],
            "targetLabel": "inferenceservice",
        }
    ]


def test_what_lies_around_the_pods_is_no_part_of_their_template() -> None:
    def template(surroundings: Surroundings) -> Any:
        (deployment,) = [one for one in rendered(scene.spec(), surroundings) if one["kind"] == "Deployment"]
        return deployment["spec"]["template"]

    other = Surroundings(network_policy=False, pod_monitor_labels={"a": "b"}, kinds=frozenset(), admin_namespaces=())
    assert template(scene.EVERYTHING) == template(other)


def test_pods_spread_over_nodes_and_zones_each_revision_by_itself() -> None:
    constraints = pod_of(scene.spec())["topologySpreadConstraints"]

    assert [one["topologyKey"] for one in constraints] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert {one["whenUnsatisfiable"] for one in constraints} == {"ScheduleAnyway"}
    assert all(one["matchLabelKeys"] == ["pod-template-hash"] for one in constraints)


@pytest.mark.parametrize("own", [[], [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]])
def test_a_spread_of_the_users_own_takes_its_place(own: list[dict[str, Any]]) -> None:
    assert pod_of(scene.spec({"podTemplate": {"topologySpreadConstraints": own}}))["topologySpreadConstraints"] == own


ALLOWED = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 3}],
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "mine",
}


def test_the_allow_list_of_the_schema_is_what_reaches_the_pod() -> None:
    schema = manifest.load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    allowed = schema["properties"]["spec"]["properties"]["podTemplate"]["properties"]
    assert set(allowed) == {"labels", "annotations", "volumes", "engine", *ALLOWED}

    pod = pod_of(scene.spec({"podTemplate": ALLOWED}))

    assert {name: pod[name] for name in ALLOWED} == ALLOWED


def test_what_is_added_to_the_engine_reaches_it_and_not_the_gate() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"}
    ca = {"name": "ca", "configMap": {"name": "company-ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ssl/company", "readOnly": True}
    source = {"secretRef": {"name": "hub-token", "optional": True}}
    added = {"env": [proxy], "envFrom": [source], "volumeMounts": [mount]}
    template = {"volumes": [ca], "engine": added, "labels": {"team": "a"}, "annotations": {"example.com/a": "b"}}

    deployment = by_kind(scene.spec({"podTemplate": template}))["Deployment"]["spec"]["template"]
    (gate,), (engine,) = deployment["spec"]["initContainers"], deployment["spec"]["containers"]

    assert proxy in engine["env"]
    assert engine["envFrom"] == [source]
    assert mount in engine["volumeMounts"]
    assert ca in deployment["spec"]["volumes"]
    assert deployment["metadata"]["labels"]["team"] == "a"
    assert deployment["metadata"]["annotations"]["example.com/a"] == "b"
    assert "proxy.example.com" not in str(gate)
    assert "envFrom" not in gate


def test_the_service_has_both_address_families_where_the_cluster_has() -> None:
    assert by_kind(scene.spec())["Service"]["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    gate = codec.from_json(GateConfig, maps_of(scene.spec())["gate.json"], "gate")
    assert gate.host == "::", "which takes IPv4 too"


def maps_of(spec: Any) -> dict[str, str]:
    maps = [item["data"] for item in objects(spec, scene.IMAGES) if item["kind"] == "ConfigMap"]
    return {name: text for data in maps for name, text in data.items()}


def test_no_token_is_mounted_and_no_secret_copied() -> None:
    spec = scene.example("full")
    pod = pod_of(spec)

    assert pod["automountServiceAccountToken"] is False
    assert not [volume for volume in pod["volumes"] if "projected" in volume]
    assert by_kind(scene.spec())["ServiceAccount"]["automountServiceAccountToken"] is False
    assert not [one for one in rendered(spec) if one["kind"] == "Secret"]


def test_every_container_is_restricted() -> None:
    pod = pod_of(scene.example("full"))

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_gate_is_a_native_sidecar_and_answers_the_engines_probes() -> None:
    pod = pod_of(scene.spec())
    (gate,), (engine,) = pod["initContainers"], pod["containers"]

    assert gate["restartPolicy"] == "Always"
    assert gate["startupProbe"]["httpGet"]["path"] == "/livez"
    assert engine["startupProbe"]["httpGet"] == {"path": "/engine/startupz", "port": 9090}
    assert engine["livenessProbe"]["httpGet"] == {"path": "/engine/livez", "port": 9090}
    assert "readinessProbe" not in engine
    assert all(engine[probe]["terminationGracePeriodSeconds"] == 5 for probe in ("startupProbe", "livenessProbe"))


def test_the_drain_is_asked_for_until_it_is_over() -> None:
    (gate,) = pod_of(scene.spec())["initContainers"]
    *_, script = gate["lifecycle"]["preStop"]["exec"]["command"]

    # A gate that is just restarting has no handler for the signal yet, or forgets it.
    assert script == "while [ ! -e /run/sluice/drained ]; do kill -USR1 1; sleep 0.2; done"


def test_a_device_is_asked_for_by_its_own_name() -> None:
    device = {"accelerator": {"count": 1, "resourceName": "example.com/npu"}}

    with_device = pod_of(scene.spec(device))["containers"][0]["resources"]
    without = pod_of(scene.spec({"accelerator": {"count": 0}, "cache": {"capacity": "1Gi"}}))["containers"][0][
        "resources"
    ]

    assert with_device["limits"] == {"example.com/npu": "1"}
    assert "limits" not in without


@pytest.mark.parametrize(("count", "ranks"), [(0, 1), (1, 1), (4, 4)])
def test_every_device_has_a_rank_of_its_own_in_one_container(count: int, ranks: int) -> None:
    spec = scene.spec({"accelerator": {"count": count}, "cache": {"capacity": "1Gi"}})
    pod = pod_of(spec)
    engine = next(container for container in pod["containers"] if container["name"] == "engine")
    config = files(spec, Paths()).engine

    assert (config.accelerator_count, config.tensor_parallel) == (count, ranks)
    assert engine["resources"].get("limits", {}).get("nvidia.com/gpu") == (str(count) if count else None)
    # NCCL's ranks meet in shared memory, of which a container has 64 MiB of its own.
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "sluice-shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {"name": "sluice-shm", "mountPath": "/dev/shm"} in engine["volumeMounts"]


def test_a_variable_of_the_users_own_wins() -> None:
    changes = {"podTemplate": {"engine": {"env": [{"name": "HOME", "value": "/mine"}]}}}

    env = pod_of(scene.spec(changes))["containers"][0]["env"]

    assert [one for one in env if one["name"] == "HOME"] == [{"name": "HOME", "value": "/mine"}]


def test_an_account_of_the_users_own_is_used_and_none_is_made() -> None:
    kinds = by_kind(scene.spec({"podTemplate": {"serviceAccountName": "mine"}}))

    assert "ServiceAccount" not in kinds
    assert kinds["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_the_service_does_not_show_the_admin_port() -> None:
    (port,) = by_kind(scene.spec())["Service"]["spec"]["ports"]

    assert (port["port"], port["targetPort"]) == (80, "http")
