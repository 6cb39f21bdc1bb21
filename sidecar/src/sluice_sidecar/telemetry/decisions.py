"""What the gate decided about each request and why, kept for a while: `/decisions`, and the source of explanations.

Owns two rings of bounded size, so that a storm of refusals does not push out what was let in. Every request costs a
few assignments and one small object, nothing a token. Pure: the clock comes in with each call; ids and numbers only,
never prompts or outputs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import merge
from typing import TYPE_CHECKING, Literal

from sluice_sidecar.telemetry.regret import Kind, Regret

if TYPE_CHECKING:
    from sluice_engine.core.terms import Terms
    from sluice_sidecar.capacity.cost import Cost
    from sluice_sidecar.capacity.look import Held, Look
    from sluice_sidecar.errors import Refusal
    from sluice_sidecar.telemetry.measure import StreamTimes

# Half an hour at two requests a second, about a megabyte; what is inside is kept beside them until it ends.
KEPT = 1024


@dataclass(slots=True, kw_only=True)
class Decision:
    """One request at the door: what it asked, what was predicted, what was decided, how it ended.

    Times are microseconds of the gate's monotonic clock, which is the engine's too where both run on one machine.
    None is what was not looked at: the tests at the door run cheap ones first.
    """

    request_id: str
    client_id: str
    """`x-request-id`, where the client sent one."""
    route: str
    arrived_us: int
    """When its body was whole."""
    attempt: int = 0
    """How often its caller had tried before: as headers say, or as its body was refused a moment ago."""
    service_class: str = ""
    tenant: str = ""
    choices: int = 0
    prompt_tokens: int = 0
    """Over all choices, as estimated at the door."""
    cached_tokens: int = 0
    """Of those, what the engine was credited with having computed already."""
    max_tokens: int = 0
    """Over all choices."""
    expected_tokens: int = 0
    """Output expected, over all choices: at most `max_tokens`."""
    inside: int | None = None
    """Choices that were inside when it asked."""
    sequences: int | None = None
    """Choices that may run at once."""
    predicted_peak_blocks: int | None = None
    ceiling_blocks: int | None = None
    predicted_ttft_us: int | None = None
    promised_ttft_us: int | None = None
    held_by: str = ""
    """Reason code of what it waited for at the door; empty when it did not wait."""
    held_because: str = ""
    verdict: Literal["", "admitted", "refused"] = ""
    """Empty while it waits, or while its body is still coming."""
    decided_us: int | None = None
    reason: str = ""
    """Reason code of the refusal."""
    message: str = ""
    shed_by: str = ""
    """Under `admission.mode: Observe`: the reason for which Enforce would have refused it."""
    regret: Kind = ""
    """Whether that verdict, or the one to let it in, turned out wrong."""
    retry_after_us: int | None = None
    first_token_us: int | None = None
    ended_us: int | None = None
    outcome: str = ""
    """How it ended for its client; empty while it has not."""
    promise: str = ""
    """kept, ttft_missed or itl_missed, of one that completed."""
    output_tokens: int | None = None
    gaps: int = 0
    """Between tokens of a stream, as they left the gate."""
    gaps_over: int = 0
    """Of them longer than the promise."""
    longest_gap_us: int | None = None

    def looked(self, look: Look) -> None:
        """The door looked at the room there is."""
        self.inside, self.sequences = look.inside, look.sequences
        self.predicted_peak_blocks, self.ceiling_blocks = look.peak_blocks, look.ceiling_blocks
        self.predicted_ttft_us, self.promised_ttft_us = look.predicted_ttft_us, look.promised_ttft_us

    def held(self, held: Held) -> None:
        """It waits at the door."""
        self.held_by, self.held_because = held.reason.value, held.problem

    def admitted(self, now_us: int) -> None:
        """It was let in."""
        self.verdict, self.decided_us = "admitted", now_us


class Decisions:
    """The decisions of late, and those about requests that have not ended."""

    def __init__(self, kept: int = KEPT) -> None:
        self._open: dict[str, Decision] = {}
        self._admitted: deque[Decision] = deque(maxlen=kept)
        self._refused: deque[Decision] = deque(maxlen=kept)
        self.regret = Regret()

    def asked(self, request_id: str, client_id: str, route: str, now_us: int) -> Decision:
        """A request has come."""
        decision = Decision(request_id=request_id, client_id=client_id, route=route, arrived_us=now_us)
        self._open[request_id] = decision
        return decision

    def priced(self, request_id: str, cost: Cost, arrived_us: int, terms: Terms) -> Decision:
        """What it costs is known; its body was whole at `arrived_us`."""
        decision = self._open.get(request_id) or self.asked(request_id, "", "", arrived_us)
        decision.arrived_us = arrived_us
        decision.service_class, decision.tenant = terms.service_class, terms.tenant
        decision.choices = len(cost.choices)
        decision.prompt_tokens, decision.max_tokens = cost.prompt_tokens, cost.max_tokens
        decision.cached_tokens = cost.prompt_tokens - cost.prefill_tokens
        decision.expected_tokens = cost.decode_tokens
        return decision

    def first_token(self, request_id: str, now_us: int) -> None:
        """Its first token went out."""
        if (decision := self._open.get(request_id)) is not None:
            decision.first_token_us = now_us

    def ended(
        self, request_id: str, outcome: str, now_us: int, refusal: Refusal | None, times: StreamTimes | None
    ) -> Decision | None:
        """It has gone, one way or another: from now on it is history. None for one that never asked."""
        decision = self._open.pop(request_id, None)
        if decision is None:
            return None
        decision.ended_us, decision.outcome = now_us, outcome
        if refusal is not None:
            decision.reason, decision.message = refusal.reason.value, refusal.message
            decision.retry_after_us = refusal.retry_after_us
        if not decision.verdict and refusal is not None:
            decision.verdict, decision.decided_us = "refused", now_us
        if times is not None:
            decision.promise, decision.output_tokens = times.promise, times.output_tokens
            decision.gaps, decision.gaps_over = times.gaps, times.gaps_over
            decision.longest_gap_us = times.longest_gap_us
        if decision.verdict == "admitted":
            decision.regret = self.regret.judge(decision.promise, outcome, shed=bool(decision.shed_by))
        (self._admitted if decision.verdict == "admitted" else self._refused).append(decision)
        return decision

    def last(self, count: int) -> list[Decision]:
        """The last `count` by arrival, oldest first; those that have not ended are among them."""
        rings = (self._admitted, self._refused, self._open.values())
        found = list(merge(*(sorted(ring, key=_arrival) for ring in rings), key=_arrival))
        return found[max(0, len(found) - count) :]


def _arrival(decision: Decision) -> int:
    return decision.arrived_us
