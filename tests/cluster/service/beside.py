"""Programs that clusters run beside Sluice, as processes of a test: each with the rights of an account of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.testnode.cluster import Cluster, Object

LOG_TAIL = 4000


def program(name: str) -> str:
    """The path of one of the programs that `node.py run --beside` brings."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not there: python tests/cluster/node.py run --beside -- pytest …")
    return found


def free_port() -> int:
    """A port on which nobody listens now, for programs that must be told one."""
    with socket.socket() as door:
        door.bind(("", 0))
        port: int = door.getsockname()[1]
    return port


@contextmanager
def running(
    folder: Path, name: str, words: Sequence[object], environment: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Runs a program until the block ends; its log, which is printed then: pytest shows it when the test fails."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, words)), cwd=folder, stdout=out, stderr=out, env={**os.environ, **(environment or {})}
        )
    try:
        yield log
        assert process.poll() is None, f"{name} ended before the test: {process.returncode}"
    finally:
        process.terminate()
        process.wait()
        print(f"-- {log.name}\n{log.read_text(errors='replace')[-LOG_TAIL:]}")


def account(node: Cluster, namespace: str, name: str) -> list[Object]:
    """A ServiceAccount with the ClusterRole of its name everywhere."""
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{name}-{namespace}", "ownerReferences": [owner(node, namespace)]},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    ]


def owner(node: Cluster, namespace: str) -> Object:
    """The namespace as the owner of what is of the whole cluster: it takes that along when it goes."""
    uid = node.get("namespace", namespace)["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": "Namespace", "name": namespace, "uid": uid}


def kubeconfig(node: Cluster, folder: Path, namespace: str, account: str) -> Path:
    """A kubeconfig with which a process is that ServiceAccount, and nothing more."""
    words = json.loads((node.run / "kubeconfig").read_text())
    token = node.kubectl("-n", namespace, "create", "token", account, "--duration=2h").strip()
    words["users"] = [{"name": "admin", "user": {"token": token}}]
    path = folder / f"{account}.kubeconfig"
    path.write_text(json.dumps(words))
    return path


def certificate(folder: Path, *names: str) -> None:
    """`tls.crt` and `tls.key` for those names (`DNS:…`, `IP:…`), signed by themselves: `ca.crt` is the same."""
    how = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=beside"
    made = ["-keyout", "tls.key", "-out", "tls.crt", "-addext", f"subjectAltName={','.join(names)}"]
    subprocess.run(["openssl", *how.split(), *made], cwd=folder, check=True, capture_output=True)
    shutil.copy(folder / "tls.crt", folder / "ca.crt")
