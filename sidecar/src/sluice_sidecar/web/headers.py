"""Which headers pass the gate: none that belong to one connection, and no identity that a client made up.

Pure. Must not know bodies. W3C trace context (`traceparent`, `tracestate`) passes as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from sluice_engine.core.terms import IDENTITY_HEADERS

_HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "http2-settings",
))  # fmt: skip
_NOT_FORWARDED = frozenset(("host", "content-length", "expect", "accept-encoding", "content-encoding"))
# Who a caller is was settled at the door; its secrets are none of the engine's, nor of the engine's log.
_SECRET = frozenset(("authorization", "cookie"))
# An engine takes the gate's word for a tenant in a gateway's header as well: who was not believed here is not there.
_IDENTITY = frozenset(IDENTITY_HEADERS)
_NOT_RETURNED = frozenset(("content-length", "date", "server"))
_DROPPED_ON_THE_WAY_UP = _HOP_BY_HOP | _NOT_FORWARDED | _SECRET | _IDENTITY
_DROPPED_ON_THE_WAY_BACK = _HOP_BY_HOP | _NOT_RETURNED
# What only the gate says of itself, to the engine and to the client.
_OWN = "x-sluice-"
REQUEST_ID = "x-sluice-request-id"
CLIENT_ID = "x-request-id"
# It is echoed, logged and kept with the decision: long enough for any id, too short to hold anything else.
_ID = re.compile(r"[!-~]{1,128}")


class Headers(Protocol):
    """Headers by name, whatever its case, each as often as it was sent."""

    def items(self) -> Iterable[tuple[str, str]]:
        """All of them, in order."""
        ...

    def getall(self, key: str, default: Sequence[str]) -> Sequence[str]:
        """All values of a header."""
        ...


def for_engine(received: Headers, request_id: str, terms: Mapping[str, str]) -> dict[str, str]:
    """What the engine is told; `terms` are the headers on which the call is served."""
    headers = _joined(received, _DROPPED_ON_THE_WAY_UP, (CLIENT_ID, _OWN))
    headers.setdefault("content-type", "application/json")
    headers |= terms
    headers[REQUEST_ID] = request_id
    headers[CLIENT_ID] = client_id(received) or request_id
    return headers


def for_client(answered: Headers, own: Mapping[str, str]) -> dict[str, str]:
    """What the client is told: the engine's headers, and the gate's own in place of their like."""
    return {**_joined(answered, _DROPPED_ON_THE_WAY_BACK, (CLIENT_ID, _OWN)), **own}


def own(received: Headers, request_id: str, server: str) -> dict[str, str]:
    """The ids that every answer carries."""
    return {REQUEST_ID: request_id, CLIENT_ID: client_id(received) or request_id, "Server": server}


def client_id(received: Headers) -> str:
    """The client's own id; empty without one, and where it is longer than any id or holds what no id does."""
    values = received.getall(CLIENT_ID, ())
    return values[0] if values and _ID.fullmatch(values[0]) is not None else ""


def _joined(received: Headers, dropped: frozenset[str], beginnings: tuple[str, ...]) -> dict[str, str]:
    """The other headers by their names in small letters; of one that came several times, all values in one list."""
    said = received.getall("Connection", ())
    bound = {name.strip().lower() for value in said for name in value.split(",")} if said else ()
    headers: dict[str, str] = {}
    for written, value in received.items():
        name = written.lower()
        if name not in dropped and name not in bound and not name.startswith(beginnings):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
