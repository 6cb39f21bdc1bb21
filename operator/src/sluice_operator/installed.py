"""`python -m sluice_operator.installed NAMESPACE [SERVICE]`: what `helm test` runs in a pod. It changes nothing.

Owns two questions: does the API server serve the CustomResourceDefinition, and does the operator behind its Service say
that it is ready? The first needs no more rights than every account has, the second none.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from sluice_operator.cluster import credentials

_TIMEOUT_S = 10
_USAGE = "usage: python -m sluice_operator.installed NAMESPACE [SERVICE]"
_PORT = 8081
_DEFINITION = "/apis/sluice.dev/v1alpha1"


class Unanswered(Exception):
    """Somebody did not answer, or not with 200; the text says why."""


def findings(
    definition: Callable[[], str], readiness: Callable[[], str] | None, operator: str
) -> list[tuple[bool, str]]:
    """Whether each part of the installation is as it should be, and a line about it.

    Args:
        definition: reads what the API server serves of our group.
        readiness: reads the operator's `/readyz`; None: it has no Service.
        operator: how the operator is called.
    """
    found = []
    try:
        served = '"inferenceservices"' in definition()
        found.append((served, f"inferenceservices.sluice.dev is {'served' if served else 'not served'}"))
    except Unanswered as error:
        found.append((False, f"inferenceservices.sluice.dev is not served: {error}"))
    if readiness is None:
        found.append((True, "operator: not asked, since metrics.service is false"))
        return found
    try:
        readiness()
        found.append((True, f"operator {operator} is ready"))
    except Unanswered as error:
        found.append((False, f"operator {operator} is not ready: {error}"))
    return found


def host(service: str, namespace: str, environment: Mapping[str, str]) -> str:
    """Where a Service is reached: by the variable that each pod of its namespace has, else by name."""
    address = environment.get(f"{service.upper().replace('-', '_')}_SERVICE_HOST") or f"{service}.{namespace}.svc"
    return f"[{address}]" if ":" in address else address


def read(url: str, token: str = "", trust: ssl.SSLContext | None = None) -> str:
    """The text of an answer with status 200.

    Raises:
        Unanswered: there was none.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # http or https, as composed here
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trust) as answer:  # noqa: S310  # likewise
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        raise Unanswered(f"{error.code} {error.reason}") from None
    except OSError as error:
        raise Unanswered(str(error)) from None


def main() -> int:
    """Exit 0 where all is well, 1 where something is not, 2 for wrong arguments."""
    if len(sys.argv) not in {2, 3}:
        print(_USAGE, file=sys.stderr)  # noqa: T201  # a command's words
        return 2
    if not credentials.in_cluster():
        print("this check runs in a pod: `helm test` starts it", file=sys.stderr)  # noqa: T201  # likewise
        return 2
    namespace, service = sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else ""
    token = credentials.token()
    trust = ssl.create_default_context(cafile=str(credentials.CA_PATH))
    found = findings(
        lambda: read(credentials.cluster_url() + _DEFINITION, token, trust),
        (lambda: read(f"http://{host(service, namespace, os.environ)}:{_PORT}/readyz")) if service else None,
        f"{namespace}/{service.removesuffix('-metrics')}",
    )
    for is_good, line in found:
        print(f"{'ok' if is_good else 'FAILED'}  {line}")  # noqa: T201  # likewise
    return 0 if all(is_good for is_good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
