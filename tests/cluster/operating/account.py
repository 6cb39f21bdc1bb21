"""A service account with the rights that the chart grants, and its credentials as a kubelet puts them into a pod."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from cluster.service.release import CHART
from cluster.testnode.boot import NODE_IP
from cluster.testnode.cluster import Cluster, Object, Refused

NAME = "sluice-operator"
RIGHTS = {"ServiceAccount", "Role", "RoleBinding"}


class Account:
    """What an operator of one namespace signs in with."""

    environment: Mapping[str, str] = {"KUBERNETES_SERVICE_HOST": NODE_IP, "KUBERNETES_SERVICE_PORT": "6443"}

    def __init__(self, node: Cluster, namespace: str, folder: Path) -> None:
        self.folder = folder
        self._node, self._namespace = node, namespace
        values = (f"--set=watchNamespaces={{{namespace}}}", "--set=rbac.aggregate=false", "--set=crds.install=false")
        rendered = node.helm("template", "sluice", str(CHART), "--namespace", namespace, *values)
        objects: list[Object] = [one for one in yaml.safe_load_all(rendered) if one and one["kind"] in RIGHTS]
        node.apply(*objects, namespace=namespace)
        # An API server knows a moment late who may do what: of one that was asked too early, nothing is to be proved.
        rights = (("create", "leases.coordination.k8s.io"), ("list", "inferenceservices.sluice.dev"))
        node.wait_for("its rights to be known", lambda: all(self._may(*right) for right in rights))
        node.operators.add(f"{namespace}:{NAME}")
        folder.mkdir()
        (folder / "ca.crt").write_bytes((node.run / "certs/apiserver.crt").read_bytes())

    def _may(self, verb: str, resource: str) -> bool:
        who = f"--as=system:serviceaccount:{self._namespace}:{NAME}"
        try:
            return self._node.kubectl("-n", self._namespace, "auth", "can-i", verb, resource, who).strip() == "yes"
        except Refused:  # it says no by its exit code, too
            return False

    def give(self, name: str) -> str:
        """A new token, in place of the one before; valid until it is revoked by its name."""
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        self._node.apply(secret, namespace=self._namespace)
        bound = ("--bound-object-kind=Secret", f"--bound-object-name={name}")
        token = self._node.kubectl("-n", self._namespace, "create", "token", NAME, *bound).strip()
        written = self.folder / "written"
        written.write_text(token)
        written.rename(self.folder / "token")  # whole at once, as a kubelet does it
        return token

    def revoke(self, name: str, token: str) -> None:
        """Make the API server refuse a token, as it does one whose time is over; returns when it does."""
        self._node.kubectl("-n", self._namespace, "delete", "secret", name)
        # An API server believes for ten seconds what it checked.
        self._node.wait_for(f"{name} to be refused", lambda: not self._is_taken(token))

    def _is_taken(self, token: str) -> bool:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        said = self._node.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
        return bool(json.loads(said)["status"].get("authenticated"))
