"""Who a caller is: the tenant that its request is counted for.

Its API key says so, or a trusted peer does, or, where neither exists, the body's `user`. Owns that order; must not
know sockets or bodies. Pure.

A `user` is what anybody can write. So it becomes a name of a kind of its own, which no configured tenant has: whoever
writes another's name into it shares with that user, and with nobody who has a weight, a quota or a key.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from sluice_engine.core.terms import Headers, Terms
from sluice_sidecar.callers.api_keys import ApiKeys, bearer
from sluice_sidecar.errors import Reason, Refusal

_USER_PREFIX = "user-"
_NO_KEY = Refusal(Reason.INVALID_API_KEY, "This service asks for an API key; send it as 'Authorization: Bearer KEY'.")
_WRONG_KEY = Refusal(Reason.INVALID_API_KEY, "The API key is not one of this service's; check it, or ask for another.")


class Callers:
    """Those who may ask, as known now."""

    def __init__(self, keys: ApiKeys | None) -> None:
        """`keys`: None where no key is asked for; an empty set lets nobody in."""
        self.keys = keys

    def identify(self, headers: Headers, terms: Terms) -> Terms | Refusal:
        """The terms with the tenant that the caller has proved to be; `terms` has the one that a trusted peer named.

        A peer that is trusted names whom it has let in itself, so it needs no key; a right one wins all the same.
        """
        if self.keys is None:
            return terms
        key = bearer(headers.getall("Authorization", ()))
        tenant = None if key is None else self.keys.tenant(key)
        if tenant is not None:
            return replace(terms, tenant=tenant)
        if terms.tenant:
            return terms
        return _NO_KEY if key is None else _WRONG_KEY

    def named_by(self, user: str, terms: Terms) -> Terms:
        """The terms of a caller that nobody has named, by the `user` of its body."""
        if terms.tenant or not user:
            return terms
        return replace(
            terms, tenant=_USER_PREFIX + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        )
