"""The node as a test sees it: its command-line tools, namespaces, waiting, and what to print when a test fails.

It lives inside the box and knows nothing of how the node was built or started.
"""

import datetime as dt
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.testnode.box import Plan

INSIDE = "SLUICE_TEST_NODE"  # set by the box for its command: the run folder
NODE = "node1"
POLL_S = 0.2
LOG_LINES = 40
NAMESPACE_LABEL = "sluice.test/namespace"

Object = dict[str, Any]


class Refused(Exception):
    """A tool ended with an error; its text is what the user would have read."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of this machine that a pod can mount through a claim, as `restricted` namespaces demand."""

    volume: Object
    volume_mount: Object
    env: tuple[Object, ...]

    def pod_template(self) -> Object:
        """The part of an InferenceService's `podTemplate` that gives the engine this folder."""
        engine = {"volumeMounts": [self.volume_mount], "env": list(self.env)}
        return {"volumes": [self.volume], "engine": engine if self.env else {"volumeMounts": [self.volume_mount]}}


class Cluster:
    """One running node. Every call is a real client program against the real API server."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.torch = Plan.read(run).torch
        self.operators: set[str] = set()
        """Service accounts of the operators so far, as `namespace:name`."""
        self.without_rights: list[tuple[str, dt.datetime, dt.datetime]] = []
        """When the rights of such an account were taken away on purpose, and since when it asks for nothing more.

        No account: when an API server started that had not read yet who may do what.
        """
        self.earlier_releases: list[tuple[dt.datetime, dt.datetime]] = []
        """When an operator of an earlier release ran: what it asks for is not what today's does."""
        self._namespaces: list[str] = []
        self._made = 0

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """What kubectl printed.

        Raises:
            Refused: with what it printed to stderr.
        """
        return self._tool(("kubectl", *words), stdin, timeout_s)

    def helm(self, *words: str, timeout_s: float = 120) -> str:
        """What helm printed.

        Raises:
            Refused: with what it printed to stderr.
        """
        return self._tool(("helm", *words), None, timeout_s)

    def get(self, kind: str, name: str, namespace: str = "") -> Object:
        """One object as the API server has it now."""
        where = ("-n", namespace) if namespace else ()
        found: Object = json.loads(self.kubectl("get", kind, name, *where, "-o", "json"))
        return found

    def list(self, kind: str, namespace: str = "", selector: str = "") -> Sequence[Object]:
        """The objects of a kind, in one namespace or of the whole cluster."""
        where = ("-n", namespace) if namespace else ("-A",)
        found: Object = json.loads(self.kubectl("get", kind, *where, "-l", selector, "-o", "json"))
        items: Sequence[Object] = found["items"]
        return items

    def apply(self, *objects: Object, namespace: str = "") -> str:
        """Applies objects as a user would, strict about unknown fields."""
        where = ("-n", namespace) if namespace else ()
        documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return self.kubectl("apply", "--validate=strict", *where, "-f", "-", stdin=documents)

    def wait_for(self, what: str, predicate: Callable[[], object], timeout_s: float = 60) -> None:
        """Returns once the predicate holds; an object that is not there yet counts as no.

        Raises:
            AssertionError: saying what did not come, and the last reason why not.
        """
        deadline = time.monotonic() + timeout_s
        reason = ""
        while True:
            try:
                if predicate():
                    return
            except (Refused, LookupError) as error:
                reason = f" ({error})"
            assert time.monotonic() < deadline, f"after {timeout_s:.0f} s still not: {what}{reason}"
            time.sleep(POLL_S)

    @contextmanager
    def namespace(self, name: str, enforce: str = "restricted") -> Iterator[str]:
        """A namespace under that Pod Security level, deleted afterwards with the volumes made for it."""
        self._made += 1
        unique = f"{name}-{self._made}"
        labels = {"pod-security.kubernetes.io/enforce": enforce}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": unique, "labels": labels}})
        self.wait_for("its default ServiceAccount", lambda: self.get("serviceaccount", "default", unique))
        self._namespaces.append(unique)
        try:
            yield unique
        finally:
            self._namespaces.remove(unique)
            self.kubectl("delete", "namespace", unique, "--wait=false")
            self.kubectl("delete", "persistentvolume", "-l", f"{NAMESPACE_LABEL}={unique}", "--wait=false")

    def mount(
        self,
        namespace: str,
        name: str,
        folder: Path,
        at: str,
        *,
        read_only: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Mount:
        """Offers a folder of this machine in a namespace: a static PersistentVolume and its claim.

        Args:
            at: where the container sees it.
            env: what else the container needs to use it.
        """
        mode = "ReadOnlyMany" if read_only else "ReadWriteMany"
        common = {"storageClassName": "", "accessModes": [mode]}
        size = {"storage": "1Gi"}  # a hostPath knows no size; the claim must name one
        volume = f"{namespace}-{name}"
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume, "labels": {NAMESPACE_LABEL: namespace}},
                "spec": {
                    **common,
                    "capacity": size,
                    "persistentVolumeReclaimPolicy": "Retain",
                    "claimRef": {"namespace": namespace, "name": name},
                    "hostPath": {"path": str(folder), "type": "Directory"},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**common, "volumeName": volume, "resources": {"requests": size}},
            },
        )
        return Mount(
            volume={"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": read_only}},
            volume_mount={"name": name, "mountPath": at, "readOnly": read_only},
            env=tuple({"name": key, "value": value} for key, value in (env or {}).items()),
        )

    def mount_torch(self, namespace: str) -> Mount:
        """Torch for the engine's pods of a namespace: its image is built without."""
        return self.mount(namespace, "torch", self.torch, "/torch", env={"PYTHONPATH": "/torch"})

    def offer_gpus(self, count: int) -> None:
        """Makes the node promise that many GPUs, which exist for the scheduler only."""
        patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
        self.kubectl("patch", "node", NODE, "--subresource=status", "--type=json", "-p", json.dumps(patch))
        self.wait_for(
            f"{count} allocatable GPUs",
            lambda: self.get("node", NODE)["status"]["allocatable"].get("nvidia.com/gpu") == str(count),
        )

    def diagnose(self) -> str:
        """Events, pods and the last words of every container in the namespaces that tests have open."""
        lines: list[str] = []
        for namespace in self._namespaces:
            where = ("-n", namespace)
            lines += [f"== {namespace}", self._try("get", "all", *where, "-o", "wide")]
            lines += [self._try("get", "events", *where, "--sort-by=.lastTimestamp", "--no-headers")]
            for pod in self._try("get", "pods", *where, "-o", "name").split():
                lines += [f"-- {pod}", self._try("describe", pod, *where)]
                words = ("--all-containers", "--prefix", "--ignore-errors", f"--tail={LOG_LINES}")
                lines += [self._try("logs", pod, *where, *words)]
                lines += [self._try("logs", pod, *where, *words, "--previous")]
        return "\n".join(lines)

    def _try(self, *words: str) -> str:
        try:
            return self.kubectl(*words)
        except Refused as error:
            return str(error)

    def _tool(self, words: Sequence[str], stdin: str | None, timeout_s: float) -> str:
        try:
            done = subprocess.run(
                words, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s, env=dict(os.environ)
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"{' '.join(words)}: no answer within {timeout_s:.0f} s") from None
        if done.returncode:
            raise Refused(done.stderr.strip() or done.stdout.strip())
        return done.stdout
