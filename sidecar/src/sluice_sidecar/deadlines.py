"""Whether a call can meet its own bounds, before anything is spent on it.

Pure functions over the step times. A bound is the caller's; a missed promise is the pod's, and is load. Both are held
against a prediction without what was learned of its errors: who is told not to retry must be refused for certain.
Must not know the ledger.
"""

from __future__ import annotations

from sluice_engine.core.terms import Terms
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.look import Held, Look
from sluice_sidecar.errors import Reason, Refusal

# The step times are those of the promise's percentile; a typical step is about so much shorter.
TYPICAL_SHARE = 0.85
# What is expected of an answer is a high quantile of those before; of chats the middle one has about so much of it.
MIDDLING_SHARE = 0.4


def unreachable(cost: Cost, terms: Terms, limits: Limits, waited_us: int) -> Refusal | None:
    """The refusal of a call that would be too late even if it had the engine to itself.

    Of its answer only the first token is counted: where it ends nobody knows.
    """
    if terms.bound_us is None:
        return None
    parts = [(choice.cached_tokens, choice.prompt_tokens - choice.cached_tokens) for choice in cost.choices]
    alone_us = limits.prefill_us(
        0,
        cost.prefill_tokens,
        0,
        own_requests=len(cost.choices),
        prior_pairs=sum(limits.prior_pairs(computed, left, 0) for computed, left in parts),
    )
    total_us = waited_us + int(alone_us * TYPICAL_SHARE)
    return None if total_us <= terms.bound_us else _refusal("its first token", total_us, terms.bound_us, alone=True)


def too_late(look: Look, cost: Cost, terms: Terms, waited_us: int) -> Refusal | None:
    """The refusal of a call that has room now, and would be too late beside those inside.

    Waiting makes it no earlier.
    """
    if terms.bound_us is None or look.unbiased_ttft_us is None:
        return None
    first_us = waited_us + look.unbiased_ttft_us
    if terms.first_token_us is not None and first_us > terms.first_token_us:
        return _refusal("its first token", first_us, terms.first_token_us, alone=False)
    if terms.finish_us is not None and (last_us := first_us + _more_us(look, cost)) > terms.finish_us:
        return _refusal("its last token", last_us, terms.finish_us, alone=False)
    return None


def _more_us(look: Look, cost: Cost) -> int:
    """From the first token to the last of a middling answer; 0 where no history tells how long answers are."""
    if look.predicted_finish_us is None or look.predicted_ttft_us is None:
        return 0
    if all(choice.output_tokens == choice.max_tokens for choice in cost.choices):
        return 0
    return int((look.predicted_finish_us - look.predicted_ttft_us) * MIDDLING_SHARE)


def held_by_own_promise(look: Look, terms: Terms, waited_us: int) -> Held | None:
    """What keeps out a call that asks for an earlier first token than is promised to all. An idle engine takes it."""
    if terms.promise_us is None or look.predicted_ttft_us is None or not look.inside:
        return None
    total_us = waited_us + look.predicted_ttft_us
    if total_us <= terms.promise_us:
        return None
    problem = f"the first token is predicted after {total_us / 1e6:.1f} s, and it was asked for within "
    problem += f"{terms.promise_us / 1e6:.1f} s"
    return Held(Reason.TTFT_PROMISE, problem, total_us - terms.promise_us, by_itself=True)


def _refusal(what: str, total_us: int, bound_us: int, *, alone: bool) -> Refusal:
    how = "even if nothing else ran here" if alone else "beside those that run"
    due = f"{what} is due within {bound_us / 1e6:.2f} s and would come after {total_us / 1e6:.2f} s, {how}"
    message = f"The deadline of this request cannot be met: {due}. Allow more time or ask for less."
    return Refusal(Reason.DEADLINE_UNREACHABLE, message)
