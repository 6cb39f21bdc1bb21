"""`python -m sluice_operator.installed NAMESPACE DEPLOYMENT`: what `helm test` runs in a pod. It changes nothing.

Owns two questions to the API server: is the CustomResourceDefinition served, and is the operator ready?
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from sluice_operator import kube

Json = dict[str, Any]

_TIMEOUT_S = 10
_USAGE = "usage: python -m sluice_operator.installed NAMESPACE DEPLOYMENT"


class Unanswered(Exception):
    """The API server did not answer a question; the text says why."""


def findings(read: Callable[[str], Json], namespace: str, deployment: str) -> list[tuple[bool, str]]:
    """Whether each part of the installation is as it should be, and a line about it."""
    found = []
    try:
        kinds = {one["kind"] for one in read("/apis/sluice.dev/v1alpha1")["resources"]}
        served = "InferenceService" in kinds
        found.append((served, f"inferenceservices.sluice.dev is {'served' if served else 'not served'}"))
    except Unanswered as error:
        found.append((False, f"inferenceservices.sluice.dev is not served: {error}"))
    try:
        body = read(f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}")
        wanted, ready = body["spec"]["replicas"], body.get("status", {}).get("readyReplicas", 0)
        text = f"operator {namespace}/{deployment}: {ready} of {wanted} replicas ready"
        found.append((0 < wanted <= ready, text))
    except Unanswered as error:
        found.append((False, f"operator {namespace}/{deployment}: {error}"))
    return found


def read_in_cluster(path: str) -> Json:
    """The API server's answer, by the pod's own account.

    Raises:
        Unanswered: it refused, or cannot be reached.
    """
    token = kube.TOKEN_PATH.read_text(encoding="utf-8").strip()
    request = urllib.request.Request(kube.cluster_url() + path, headers={"Authorization": f"Bearer {token}"})  # noqa: S310  # https, from the pod's environment
    trust = ssl.create_default_context(cafile=str(kube.CA_PATH))
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trust) as answer:  # noqa: S310  # likewise
            body: Json = json.load(answer)
            return body
    except urllib.error.HTTPError as error:
        raise Unanswered(f"the API server said {error.code} {error.reason}") from None
    except OSError as error:
        raise Unanswered(f"the API server cannot be reached: {error}") from None


def main() -> int:
    """Exit 0 where all is well, 1 where something is not, 2 for wrong arguments."""
    if len(sys.argv) != 3:
        print(_USAGE, file=sys.stderr)  # noqa: T201  # a command's words
        return 2
    if not kube.in_cluster():
        print("this check runs in a pod: `helm test` starts it", file=sys.stderr)  # noqa: T201  # likewise
        return 2
    found = findings(read_in_cluster, sys.argv[1], sys.argv[2])
    for is_good, line in found:
        print(f"{'ok' if is_good else 'FAILED'}  {line}")  # noqa: T201  # likewise
    return 0 if all(is_good for is_good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
