"""The chart, installed by Helm as a user would: with the images that this node holds."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.kubectl import PATIENCE, Kubectl

CHART = Path(__file__).resolve().parents[3] / "charts/sluice"
IMAGES = [
    "--set=images.registry=sluice.test",
    *(f"--set=images.{part}.tag=dev" for part in ("operator", "engine", "gate")),
]


@dataclass(frozen=True, slots=True)
class Release:
    """One release of the chart."""

    name: str
    namespace: str

    def prepare(self) -> None:
        """Make its namespace, which enforces the restricted standard."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": self.namespace, "labels": labels}
        Kubectl("default").apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def install(self, *words: str) -> str:
        """Install it and wait for the operator; returns the notes."""
        return self._helm(
            "upgrade", "--install", self.name, str(CHART), *IMAGES, "--wait", f"--timeout={PATIENCE}", *words
        )

    def uninstall(self) -> str:
        """Uninstall it and wait until its objects are gone; returns what Helm says."""
        return self._helm("uninstall", self.name, "--wait", f"--timeout={PATIENCE}")

    def _helm(self, *words: str) -> str:
        argv = ["helm", "--namespace", self.namespace, *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"helm {words[0]}: {done.stderr}"
        return done.stdout
