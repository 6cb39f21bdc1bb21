"""API keys, and the tenants that they name. No key is kept: what is kept of one cannot be turned back into it.

Owns what a key may look like and how one is recognised. The digests are keyed with a secret of this process, so that
how long a comparison takes says nothing about a key, and a dump of memory here says nothing elsewhere. Pure: the
process's secret comes in. Where the keys come from is `key_files`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from sluice_engine.core.terms import is_tenant
from sluice_engine.errors import InvalidConfig

# Short ones can be guessed; no sensible one is longer. A Secret holds a MiB.
LEAST_CHARACTERS, MOST_CHARACTERS = 16, 512
MOST_KEYS = 10_000

# What an Authorization header can carry after "Bearer " (RFC 6750), so that no key can be set that nobody could send.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_HEAD_BYTES = 8
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


class ApiKeys:
    """The keys in force. Equal where they recognise the same keys as the same tenants."""

    def __init__(self, secret: bytes, tenants: Mapping[bytes, str]) -> None:
        """`tenants`: digest under this secret → tenant."""
        self._secret = secret
        self._tenants = dict(tenants)
        self._by_head: dict[bytes, list[bytes]] = {}
        for digest in tenants:
            self._by_head.setdefault(digest[:_HEAD_BYTES], []).append(digest)

    @classmethod
    def parse(cls, files: Mapping[str, bytes], secret: bytes) -> ApiKeys:
        """The keys of files that are named for tenants and hold a key a line, beside comments that begin with #.

        Raises:
            InvalidConfig: a name is no tenant's, a line is no key, or two tenants share one. The text tells no key.
        """
        tenants: dict[bytes, str] = {}
        for tenant, content in sorted(files.items()):
            if not is_tenant(tenant):
                raise InvalidConfig(f"api keys: {tenant[:40]!r}", "is no name of a tenant")
            for number, line in enumerate(content.splitlines(), start=1):
                key = line.decode("ascii", "replace").strip()
                if not key or key.startswith("#"):
                    continue
                where = f"api keys: {tenant}: line {number}"
                if not LEAST_CHARACTERS <= len(key) <= MOST_CHARACTERS or _KEY.fullmatch(key) is None:
                    characters = f"{LEAST_CHARACTERS} to {MOST_CHARACTERS} letters, digits or . _ ~ + / -, then ="
                    raise InvalidConfig(where, f"must be a key of {characters}, or a comment that begins with #")
                other = tenants.setdefault(_digest(secret, key), tenant)
                if other != tenant:
                    raise InvalidConfig(where, f"is a key of tenant {other} as well")
        if len(tenants) > MOST_KEYS:
            raise InvalidConfig("api keys", f"are {len(tenants)}, and may be {MOST_KEYS}")
        return cls(secret, tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKeys) and (self._secret, self._tenants) == (other._secret, other._tenants)

    def __hash__(self) -> int:
        return hash(frozenset(self._tenants))

    def tenant(self, key: str) -> str | None:
        """Whose key it is; None where it is nobody's."""
        presented = _digest(self._secret, key)
        # Found by its first bytes, which nobody can choose, and compared as a whole in constant time.
        for digest in self._by_head.get(presented[:_HEAD_BYTES], ()):
            if hmac.compare_digest(digest, presented):
                return self._tenants[digest]
        return None


def bearer(values: Sequence[str]) -> str | None:
    """The key in a request's Authorization headers; None where there is not exactly one."""
    match = _BEARER.fullmatch(values[0].strip()) if len(values) == 1 else None
    return match[1] if match else None


def _digest(secret: bytes, key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=secret, digest_size=32).digest()
