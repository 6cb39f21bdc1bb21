"""What the operator signs in with inside a pod: the service account's token, which the kubelet replaces in its file.

Owns where it lies and how it is read. Both clients of the API server, `kube.py` and kopf, take it from here.
"""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

TOKEN_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
CA_PATH = TOKEN_PATH.with_name("ca.crt")


def in_cluster() -> bool:
    """Whether this process runs in a pod with a service account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and TOKEN_PATH.is_file()


def cluster_url() -> str:
    """The API server's address from inside a pod."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def token() -> str:
    """The token as it is now."""
    return TOKEN_PATH.read_text(encoding="utf-8").strip()


async def configuration() -> Configuration:
    """How `kubernetes.aio` reaches the API server: from inside a pod by its token, else by the kubeconfig."""
    chosen = Configuration()
    if not in_cluster():
        await kube_config.load_kube_config(client_configuration=chosen, persist_config=False)
        return chosen
    kube_config.load_incluster_config(client_configuration=chosen)
    # The library would go on for a minute with a token that has just been replaced. A read is cheap: it is no disk's.
    chosen.refresh_api_key_hook = _read_again
    return chosen


def _read_again(chosen: Configuration) -> None:
    chosen.api_key["BearerToken"] = f"Bearer {token()}"
