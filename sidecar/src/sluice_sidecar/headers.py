"""Which headers pass the gate: none that belong to one connection, and no identity that a client made up.

Pure. Must not know bodies.
"""

from __future__ import annotations

from collections.abc import Mapping

_HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
))  # fmt: skip
_NOT_FORWARDED = frozenset(("host", "content-length", "expect", "accept-encoding", "content-encoding"))
_NOT_RETURNED = frozenset(("content-length", "date", "server"))
# What only the gate says of itself, to the engine and to the client.
_OWN = "x-sluice-"
REQUEST_ID = "x-sluice-request-id"
CLIENT_ID = "x-request-id"


def for_engine(received: Mapping[str, str], request_id: str, terms: Mapping[str, str]) -> dict[str, str]:
    """What the engine is told; `terms` are the headers on which the call is served."""
    dropped = _HOP_BY_HOP | _NOT_FORWARDED | _listed(received)
    headers = {
        name: value
        for name, value in received.items()
        if name.lower() not in dropped and not name.lower().startswith(_OWN)
    }
    headers.setdefault("Content-Type", "application/json")
    headers |= terms
    headers[REQUEST_ID] = request_id
    headers[CLIENT_ID] = received.get(CLIENT_ID, request_id)
    return headers


def for_client(answered: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What the client is told: the engine's headers, and the gate's own in place of their like."""
    dropped = _HOP_BY_HOP | _NOT_RETURNED | _listed(answered)
    kept = {
        name: value
        for name, value in answered.items()
        if name.lower() not in dropped and not name.lower().startswith((CLIENT_ID, _OWN))
    }
    return {**kept, **own}


def own(received: Mapping[str, str], request_id: str, server: str) -> dict[str, str]:
    """The ids that every answer carries."""
    return {REQUEST_ID: request_id, CLIENT_ID: received.get(CLIENT_ID, request_id), "Server": server}


def _listed(headers: Mapping[str, str]) -> frozenset[str]:
    """Names that the other side bound to its own connection."""
    return frozenset(name.strip().lower() for name in headers.get("Connection", "").split(","))
