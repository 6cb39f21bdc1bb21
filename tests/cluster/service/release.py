"""The chart, installed by Helm as a user would: with the images that this node holds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.testnode.cluster import Cluster

CHART = Path(__file__).resolve().parents[3] / "charts/sluice"
PARTS = ("operator", "engine", "gate")
IMAGES = ["--set=images.registry=sluice.test", *(f"--set=images.{part}.tag=dev" for part in PARTS)]
KINDS = "all,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings"
# As for services. An earlier chart ends an operator that has not started in a minute, as on busy cores it may not have.
PATIENCE_S = 300


@dataclass(frozen=True, slots=True)
class Release:
    """One release of the chart, in a namespace that enforces the restricted standard."""

    node: Cluster
    name: str
    namespace: str

    def install(self, *words: str) -> str:
        """Install it and wait for the operator; returns the notes."""
        return self.install_from(CHART, *words)

    def go_back_to(self, chart: Path, *words: str) -> str:
        """The same with an earlier chart, whose operator needs other rights than the one that acts until then."""
        with self._rights_taken():
            return self.install_from(chart, *words)

    @contextmanager
    def with_values(self, *words: str) -> Iterator[None]:
        """The release with other values, until the block ends."""
        self.install(*words)
        try:
            yield
        finally:
            self.install()

    def roll_back(self) -> str:
        """Go back to the revision before."""
        with self._rights_taken():
            return self._helm("rollback", self.name)

    def install_from(self, chart: Path, *words: str) -> str:
        """The same with another chart."""
        self.node.operators.add(self._account)
        return self._helm("upgrade", "--install", self.name, str(chart), *IMAGES, *words)

    def uninstall(self) -> str:
        """Uninstall it and wait until its objects are gone; returns what Helm says."""
        # Helm waits for what it made itself, and not for the pod that follows from it.
        with self._rights_taken():
            return self._helm("uninstall", self.name)

    @contextmanager
    def _rights_taken(self) -> Iterator[None]:
        """What takes roles away before the operators that need them are gone; waits for those."""
        pods = [f"pod/{one['metadata']['name']}" for one in self.node.list("pods", self.namespace, self._mine)]
        since = dt.datetime.now(dt.UTC)
        yield
        if pods:
            where = ("-n", self.namespace, "--for=delete", f"--timeout={PATIENCE_S}s")
            self.node.kubectl("wait", *pods, *where, timeout_s=PATIENCE_S + 30)
        self.node.without_rights.append((self._account, since, dt.datetime.now(dt.UTC)))

    def objects(self) -> list[str]:
        """Names of what it has now, in its namespace and cluster-wide; the definition apart."""
        return [one["metadata"]["name"] for one in self.node.list(KINDS, self.namespace, self._mine)]

    @property
    def operator_pods(self) -> str:
        """The selector of the operator's own."""
        return f"app.kubernetes.io/name=sluice-operator,app.kubernetes.io/instance={self.name}"

    @property
    def _account(self) -> str:
        return f"{self.namespace}:{self.name}-operator"

    @property
    def _mine(self) -> str:
        return f"app.kubernetes.io/instance={self.name},app.kubernetes.io/part-of=sluice"

    def _helm(self, verb: str, *words: str) -> str:
        how = ["--namespace", self.namespace, "--wait", f"--timeout={PATIENCE_S}s"]
        return self.node.helm(verb, *words, *how, timeout_s=PATIENCE_S + 30)
