"""kopf's part: following the InferenceServices, and signing in.

Owns nothing: every event becomes one call of the reconciler. Raw events only, so kopf writes no annotation, no
finalizer and no status of its own.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from sluice_operator.cluster import credentials
from sluice_operator.reconcile.reconciler import Reconciler

log = logging.getLogger(__name__)

# The kubelet replaces the token at 80 % of its hour; reading it this often never uses one that has ended.
_LIFETIME = dt.timedelta(minutes=10)
# Whoever is refused asks anew at once, and would do so as fast as the API server answers.
_AT_MOST_EVERY_S = 5.0
# Between attempts while the API server is away. kopf's own grow to 21 s, for which no changed spec is seen though it is
# back. After an hour of these kopf gives up, and the process ends.
_RETRIES_S = (1, 2, 3, *(5,) * 720)


def settings() -> kopf.OperatorSettings:
    """Kopf's settings: strict, silent, and with an end to every request."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False  # our own events tell of transitions only
    chosen.scanning.disabled = True  # needs no right to list namespaces and CRDs
    chosen.peering.standalone = True
    chosen.watching.server_timeout = 240
    chosen.watching.client_timeout = 270
    chosen.watching.connect_timeout = 10
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 10
    chosen.networking.error_backoffs = _RETRIES_S
    return chosen


class SignIn:
    """Credentials for kopf, which asks anew when they expire and whenever the API server refuses them."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        self._clock, self._sleep = clock, sleep
        self._given_at = float("-inf")

    async def __call__(self, now: dt.datetime) -> kopf.ConnectionInfo:
        """The token as it is now, to be read again in ten minutes; not sooner than `_AT_MOST_EVERY_S` after the last.

        Args:
            now: the time, by which kopf reckons when they expire.
        """
        early_s = self._given_at + _AT_MOST_EVERY_S - self._clock()
        if early_s > 0:
            log.warning("the API server refuses the token; it is read again", extra={"retry_s": round(early_s, 1)})
            await self._sleep(early_s)
        self._given_at = self._clock()
        return kopf.ConnectionInfo(
            server=credentials.cluster_url(),
            ca_path=str(credentials.CA_PATH),
            scheme="Bearer",
            token=credentials.token(),
            expiration=now + _LIFETIME,
        )


def registry(reconciler: Reconciler) -> kopf.OperatorRegistry:
    """The handlers."""
    handlers = kopf.OperatorRegistry()
    sign_in = SignIn(time.monotonic, asyncio.sleep)

    @kopf.on.login(registry=handlers)  # type: ignore[untyped-decorator]  # kopf is not checked here
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401  # kopf's signature
        if not credentials.in_cluster():
            found: kopf.ConnectionInfo | None = kopf.login_with_kubeconfig(**kwargs)
            return found
        return await sign_in(dt.datetime.now(dt.UTC))

    @kopf.on.event("sluice.dev", "v1alpha1", "inferenceservices", registry=handlers)  # type: ignore[untyped-decorator]
    async def changed(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002, ANN401  # kopf's signature
        reconciler.is_watch_suspect = False
        plain = _plain(body)
        if type == "DELETED":
            reconciler.forget(plain["metadata"]["namespace"], plain["metadata"]["name"])
        else:
            reconciler.see(plain)

    return handlers


def _plain(body: kopf.Body) -> dict[str, Any]:
    """Kopf's views are read-only and live; what we keep is a copy."""
    plain = {key: _copy(value) for key, value in body.items()}
    plain["metadata"].pop("managedFields", None)  # larger than all the rest, and nothing asks for it
    return plain


def _copy(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, dict) or hasattr(value, "items"):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value
