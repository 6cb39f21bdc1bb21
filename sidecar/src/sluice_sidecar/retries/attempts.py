"""Which attempt of its caller's a request is: what headers say, and what was refused a moment ago.

Owns the memory of bodies that were refused. Most callers tell, each in its own way; a loop around `curl` does not, and
a header that says "first" is no proof, since a loop around a client says so each time. Pure: the clock comes in with
each call; bodies are known by a digest only. Must not know what is done about a retry.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from sluice_engine.core.terms import Headers

# Clients come back within half a minute when told, and within seconds when not.
MEMORY_US = 60_000_000
# A minute of 136 refusals a second, about two megabytes; beyond, the oldest are forgotten first.
KEPT = 8192
# What a number is cut to: it is kept in records, and no caller means more.
MOST_ATTEMPTS = 1000

_NUMBER = re.compile(r"[0-9]{1,9}")
_OF_AMAZON = re.compile(r"(?:^|[;\s])attempt=([0-9]{1,9})(?:$|[;\s])")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a request."""

    number: int = 0
    """Attempts made before, as the headers say; 0: the first, or a caller that does not tell."""
    body_key: bytes = b""
    """Equal for equal bodies of one tenant; empty where it is not known."""


FIRST = Attempt()


@dataclass(frozen=True, slots=True)
class Told:
    """What the headers say."""

    number: int
    unreadable: tuple[str, ...] = ()
    """Headers that say nothing that can be read."""


# How each says which attempt it is. Counts from 0 or 1: Envoy's and the AWS clients' first is 1.
# Sources: openai-python `_base_client.py`; Envoy docs, `http_conn_man/headers`; gRPC A6; AWS SDK retry behaviour.
STAINLESS, ENVOY, GRPC = "x-stainless-retry-count", "x-envoy-attempt-count", "grpc-previous-rpc-attempts"
ENVOY_TIMEOUT, AMAZON = "x-envoy-is-timeout-retry", "amz-sdk-request"
HEADERS = (STAINLESS, ENVOY, GRPC, ENVOY_TIMEOUT, AMAZON)


def told(headers: Headers) -> Told:
    """How often the caller had tried before, by its own word or that of a proxy on the way: the largest counts."""
    number, unreadable = 0, []
    for name in HEADERS:
        for value in headers.getall(name, ()):
            found = _read(name, value.strip())
            if found is None:
                unreadable.append(name)
            else:
                number = max(number, found)
    return Told(min(MOST_ATTEMPTS, number), tuple(dict.fromkeys(unreadable)))


def _read(name: str, value: str) -> int | None:
    if name == ENVOY_TIMEOUT:
        return {"true": 1, "false": 0}.get(value.lower())
    if name == AMAZON:
        # Its other fields have nothing to do with attempts, and may stand alone.
        found = _OF_AMAZON.search(value)
        return max(0, int(found[1]) - 1) if found else None if "attempt" in value else 0
    if _NUMBER.fullmatch(value) is None:
        return None
    return max(0, int(value) - (name == ENVOY))


def body_key(tenant: str, body: bytes) -> bytes:
    """The same for the same body of the same tenant."""
    # With its length, so that no tenant's name runs on into a body.
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(4) + name, digest_size=16)
    digest.update(body)
    return digest.digest()


@dataclass(slots=True)
class _Refused:
    """One body, and how often it may be expected back."""

    count: int
    number: int
    """Attempts that the furthest of them has made."""
    until_us: int


class Attempts:
    """Counts attempts; whoever was refused is expected back once for each refusal."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()

    def __len__(self) -> int:
        """Bodies that are expected back."""
        return len(self._refused)

    def number(self, attempt: Attempt, now_us: int) -> int:
        """Attempts that were made before this one. A body that comes back is expected no more."""
        refused = self._refused.get(attempt.body_key)
        if refused is None:
            return attempt.number
        refused.count -= 1
        if not refused.count or refused.until_us <= now_us:
            del self._refused[attempt.body_key]
        return attempt.number if refused.until_us <= now_us else max(attempt.number, refused.number)

    def turned_away(self, attempt: Attempt, now_us: int) -> None:
        """An attempt, its number as counted, got no answer: it may come back."""
        if not attempt.body_key:
            return
        before = self._refused.pop(attempt.body_key, None)
        alive = before if before is not None and before.until_us > now_us else None
        count, most = (0, 0) if alive is None else (alive.count, alive.number)
        made = min(MOST_ATTEMPTS, attempt.number + 1)
        self._refused[attempt.body_key] = _Refused(count + 1, max(most, made), now_us + MEMORY_US)
        if len(self._refused) > self._kept:
            self._refused.popitem(last=False)
