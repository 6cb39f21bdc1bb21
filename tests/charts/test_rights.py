"""What the chart lets the operator and the cluster's users do: no more than they need."""

from __future__ import annotations

from typing import Any

from charts.helm import Helm
from cluster.rights import rights
from sluice_operator.cluster.kinds import LEASE_RIGHTS, RIGHTS


def granted(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Verbs by group and resource."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def named(objects: list[dict[str, Any]], kind: str) -> dict[tuple[str | None, str], dict[str, Any]]:
    return {(one["metadata"].get("namespace"), one["metadata"]["name"]): one for one in objects if one["kind"] == kind}


def test_the_operator_of_a_whole_cluster_may_do_what_the_table_says(helm: Helm) -> None:
    objects = helm.objects()

    role = named(objects, "ClusterRole")[None, "sluice-operator"]
    binding = named(objects, "ClusterRoleBinding")[None, "sluice-operator"]
    assert granted(role) == RIGHTS
    assert binding["roleRef"]["name"] == "sluice-operator"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "sluice-operator", "namespace": "sluice-system"}]


def test_no_right_is_granted_that_no_run_on_a_real_node_has_used(helm: Helm) -> None:
    used = set().union(*rights.recorded().values())

    assert rights.granted(helm.objects(), "sluice-operator") == used | rights.NEVER_USED.keys()
    assert not used & rights.NEVER_USED.keys()


def test_the_operator_of_two_namespaces_may_do_that_there_and_nothing_cluster_wide(helm: Helm) -> None:
    objects = helm.objects("--set=watchNamespaces={team-a,team-b}")

    roles, bindings = named(objects, "Role"), named(objects, "RoleBinding")
    for namespace in ("team-a", "team-b"):
        assert granted(roles[namespace, "sluice-operator"]) == RIGHTS
        assert bindings[namespace, "sluice-operator"]["subjects"][0]["namespace"] == "sluice-system"
    assert set(named(objects, "ClusterRole")) == {(None, "sluice-operator-view"), (None, "sluice-operator-edit")}
    assert named(objects, "ClusterRoleBinding") == {}


def test_the_lease_is_one_object_of_the_releases_own_namespace(helm: Helm) -> None:
    for values in ((), ("--set=watchNamespaces={team-a,sluice-system}",)):
        roles = named(helm.objects(*values), "Role")

        role = roles["sluice-system", "sluice-operator-lease"]
        assert granted(role) == LEASE_RIGHTS
        # A new name cannot be granted to be created by name.
        assert [rule.get("resourceNames") for rule in role["rules"]] == [None, ["sluice-operator"]]


def test_without_aggregation_a_namespaced_install_creates_nothing_cluster_wide(helm: Helm) -> None:
    objects = helm.objects("--set=watchNamespaces={team-a}", "--set=rbac.aggregate=false", "--set=crds.install=false")

    assert all("namespace" in one["metadata"] for one in objects)


def test_no_role_holds_a_wildcard_or_may_read_secrets(helm: Helm) -> None:
    objects = helm.objects()

    for role in [one for one in objects if one["kind"] in {"Role", "ClusterRole"}]:
        assert "*" not in str(role["rules"])
        assert "secrets" not in str(role["rules"])


def test_who_may_view_or_edit_a_namespace_may_do_so_with_its_inference_services(helm: Helm) -> None:
    roles = named(helm.objects(), "ClusterRole")

    view, edit = roles[None, "sluice-operator-view"], roles[None, "sluice-operator-edit"]
    assert aggregated_to(view) == {"view", "edit", "admin"}
    assert aggregated_to(edit) == {"edit", "admin"}
    assert set().union(*granted(view).values()) == {"get", "list", "watch"}
    assert ("sluice.dev", "inferenceservices/status") not in granted(edit)


def aggregated_to(role: dict[str, Any]) -> set[str]:
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    return {label.removeprefix(prefix) for label in role["metadata"]["labels"] if label.startswith(prefix)}
