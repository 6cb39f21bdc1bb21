"""What the operators asked of the API server: its own audit log of the whole run.

Owns the policy and the reading of the log. Written down are the service accounts that are not Kubernetes' own: whoever
is admin in the box may do everything, and proves nothing.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # A watch is told when it begins: it may end after the test.
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a service account."""

    account: str
    """`namespace:name`."""
    at: dt.datetime
    """When the API server received it."""
    verb: str
    group: str
    """Empty: the core group, or no resource."""
    resource: str
    """With its subresource, `inferenceservices/status`; empty where a path is asked that is no resource."""
    namespace: str
    """Empty: of the whole cluster."""
    name: str
    path: str
    code: int
    is_allowed: bool
    """By the rights: a request that is allowed may still be refused by an admission plugin."""


def flags(run: Path) -> Sequence[str]:
    """What makes the API server write the log below the run folder; the policy is written first."""
    policy = run / "audit-policy.json"
    policy.write_text(json.dumps(_POLICY))
    return "--audit-policy-file", str(policy), "--audit-log-path", str(_log(run)), "--audit-log-maxsize", "1000"


def requests(run: Path) -> Iterator[Request]:
    """The requests so far, in their order; one that goes on is told when it began, and again when it ended."""
    with _log(run).open() as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # it is being written
            yield _request(json.loads(line))


def _log(run: Path) -> Path:
    return run / "audit.log"


def _request(event: Mapping[str, Any]) -> Request:
    about = event.get("objectRef") or {}
    parts = (about.get("resource", ""), about.get("subresource", ""))
    return Request(
        account=event["user"]["username"].removeprefix(_ACCOUNT),
        at=dt.datetime.fromisoformat(event["requestReceivedTimestamp"]),
        verb=event["verb"],
        group=about.get("apiGroup", ""),
        resource="/".join(part for part in parts if part),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        path=event["requestURI"],
        code=(event.get("responseStatus") or {}).get("code", 0),
        is_allowed=(event.get("annotations") or {}).get("authorization.k8s.io/decision") != "forbid",
    )
