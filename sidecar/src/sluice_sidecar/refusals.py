"""The words of the refusals that the admission decides on: why, and when to come back.

Pure. Must not know how it was decided.
"""

from __future__ import annotations

from sluice_sidecar.capacity.look import Held
from sluice_sidecar.errors import RateLimit, Reason, Refusal

_UNAVAILABLE = {
    Reason.DRAINING: "This pod is shutting down and takes no new requests; send the request again.",
    Reason.ENGINE_LOADING: "The model is still loading; try again in a moment.",
    Reason.ENGINE_DEAD: "The engine is down and is being restarted; try again in a moment.",
}
MISSED = Refusal(
    Reason.DEADLINE_MISSED,
    "The deadline of this request passed before it could be answered; ask for less, or allow more time.",
)


def unavailable(reason: Reason) -> Refusal:
    """No capacity exists."""
    return Refusal(reason, _UNAVAILABLE[reason])


def over_quota(quota: RateLimit, tokens: int, retry_us: int) -> Refusal:
    """The tenant has used up its own."""
    message = (
        f"The quota of this tenant is used up: it is {quota.per_second} tokens per second and {quota.limit_tokens} "
        f"at once, this request needs about {tokens}, and {quota.remaining_tokens} are left. "
        f"Come back in {retry_us / 1e6:.1f} s."
    )
    return Refusal(Reason.TENANT_QUOTA, message, retry_us, rate_limit=quota)


def busy(held: Held, retry_us: int | None, *, is_pointless: bool) -> Refusal:
    """There is no room now. `is_pointless`: retries have had their share already, one more would come for nothing."""
    back = "" if retry_us is None else f" Come back in {retry_us / 1e6:.1f} s."
    if is_pointless:
        back = f"{back} Retries have had their share of it; do not send this request again by itself."
    message = f"The model is busy: {held.problem}.{back}"
    return Refusal(held.reason, message, retry_us, wait_us=held.wait_us, is_pointless=is_pointless)
