"""Speculation by prompt lookup: guesses at what a request says next, from what it read and said before.

A guess is what followed the last few tokens when they occurred last. As a *draft* it joins the request's next step,
which samples after each of its tokens; it is kept as far as the samples agree, so that the output is what it would have
been. Drafts are what is left over: they come after decodes and prefill, inside every budget of the step, only where the
step then gives more tokens a second, and they never cost anybody a block. Guesses that are not computed are compared
with what came all the same, so it is known what drafting would bring while it is off. It knows no torch and no clock.

A guess needs the newest token on the host, so steps with drafts do not overlap. Start reading at `Drafts.schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice_engine.core.plan import StepPlan
from sluice_engine.core.request import Request
from sluice_engine.core.running import Running
from sluice_engine.core.step import Step
from sluice_engine.core.steptime import StepTimes

# Two tokens recur everywhere, four miss most of what is copied with a change.
NGRAM_TOKENS = 3
# Token ids are below 2²¹ in every vocabulary there is; three of them make one small key.
_ID_BITS = 21
_KEY_MASK = (1 << NGRAM_TOKENS * _ID_BITS) - 1
# A step with drafts has to give so much more than one without: the prices are estimates.
LEAST_GAIN = 1.05
# Of what a new guess says about how the next will fare.
HIT_GAIN = 0.1
UNKNOWN_HIT_RATE = 0.5
# Of what a step with drafts says about what one costs.
PRICE_GAIN = 0.1
# While none is worth its price, that price goes back to what the table says: in a thousand steps it is tried again.
FORGOTTEN = 0.001


def num_accepted(drafts: Sequence[int], sampled: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """How many drafts the samples confirm: those before the first that differs."""
    for index, draft in enumerate(drafts):
        if draft != sampled[index]:
            return index
    return len(drafts)


class Lookup:
    """The guesses for one request. Tokens are only ever appended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.hit_rate = UNKNOWN_HIT_RATE
        """Of its guesses' next tokens, the part that came true, the latest counting most."""
        self._follows: dict[int, int] = {}
        """N-gram → position of the token after its last occurrence."""
        self._num_seen = 0
        self._key = 0
        """The last n-gram seen, in one number."""
        self._guess_at = 0
        """Position that the last guess was about."""
        self._guess: list[int] = []

    def guess(self, most: int) -> list[int]:
        """What may come next, `most` tokens at most; empty where the last n-gram is new."""
        tokens = self.request.tokens
        length = len(tokens)
        if length == self._guess_at:
            return self._guess[:most]
        if self._guess and self._guess_at < length:
            self.saw(hit=tokens[self._guess_at] == self._guess[0])
        # An n-gram is kept once it has a successor: the last one would find itself.
        key = self._key
        for position in range(self._num_seen, length):
            if position >= NGRAM_TOKENS:
                self._follows[key] = position
            key = (key << _ID_BITS | tokens[position]) & _KEY_MASK
        self._key, self._num_seen = key, length
        self._guess_at = length
        follows = self._follows.get(key) if length >= NGRAM_TOKENS else None
        self._guess = [] if follows is None else tokens[follows : follows + most]
        return self._guess

    def saw(self, *, hit: bool) -> None:
        """A guessed token came true, or did not."""
        self.hit_rate += HIT_GAIN * (hit - self.hit_rate)

    def settled(self, proposed: int, accepted: int) -> None:
        """A draft was computed: what came of it is known of each of its tokens up to the first that was wrong."""
        for _ in range(accepted):
            self.saw(hit=True)
        if accepted < proposed:
            self.saw(hit=False)
        self._guess = []  # it has been told of


@dataclass(frozen=True, slots=True)
class _Draft:
    request: Request
    start: int
    """Position of its newest token, which is computed with the draft."""
    tokens: tuple[int, ...]
    expected: float
    """Of these, tokens that will probably be kept."""


class Drafts:
    """Who drafts in a step, and what."""

    def __init__(self, running: Running, times: StepTimes, *, most_tokens: int) -> None:
        """`most_tokens`: of one request in one step."""
        self._running = running
        self._times = times
        self._most = most_tokens
        self._lookups: dict[int, Lookup] = {}
        """By slot."""
        self.pays = True
        """Whether a step with drafts would probably give more than one without: then steps do not overlap."""
        self.proposed_total = 0
        """Draft tokens that were computed."""
        self.accepted_total = 0
        """Of them, those that became output."""
        self._price_us: float | None = None
        """What steps with drafts say that one costs; before the first the table's word is taken."""

    def schedule(self, step: Step, *, may_run: bool) -> None:
        """Turn decodes of a step that is otherwise planned into drafts, where that pays.

        `may_run`: whether all tokens are settled. If they are not, it is only found whether drafting would pay.
        """
        drafts = self._worth_it(step, self._wanted(step))
        self.pays = bool(drafts)
        if not may_run or not drafts:
            return
        for draft in drafts:
            end = draft.start + 1 + len(draft.tokens)
            if end > self._running.rows.until[draft.request.slot]:
                granted = self._running.grow(draft.request, end)
                assert granted, "there were blocks enough"
        step.turn_into_drafts({draft.request: (draft.start, draft.tokens) for draft in drafts})

    def settled(self, request: Request, slot: int, proposed: int, accepted: int) -> None:
        """A request's draft was computed; so many of its tokens became output."""
        self.proposed_total += proposed
        self.accepted_total += accepted
        lookup = self._lookups.get(slot)
        if lookup is not None and lookup.request is request:
            lookup.settled(proposed, accepted)

    def ran(self, plan: StepPlan, real_us: int) -> None:
        """A step took so long."""
        drafting = [chunk for chunk in plan.chunks if chunk.drafts]
        if not drafting:
            return
        without = self._times.predict_us(
            len(plan.decodes) + len(drafting),
            plan.prefill_tokens - sum(chunk.num_tokens for chunk in drafting),
            plan.context_tokens + sum(chunk.start + 1 for chunk in drafting),
            plan.prior_pairs - sum(chunk.num_tokens * chunk.start for chunk in drafting),
        )
        # A pause of the machine is no price: no guess costs more than a step.
        said = min(without, max(0, real_us - without) / plan.draft_tokens)
        before = said if self._price_us is None else self._price_us
        self._price_us = before + PRICE_GAIN * (said - before)

    def _wanted(self, step: Step) -> list[_Draft]:
        """The drafts for which there is room, the most promising first."""
        rows, size = self._running.rows, self._running.pool.block_tokens
        free_blocks = self._running.pool.num_free - rows.num_running  # one for each who may need it next
        room = min(step.budgets.left("tokens"), step.budgets.left("draft_tokens"))
        prefill, pairs, drafts = step.prefill, step.prior_pairs, []
        left = step.budgets.left("prefill_tokens")
        guesses = [
            (lookup, int(start), guess)
            for request, start in zip(step.decodes.requests, step.starts, strict=True)
            if request.sampling.can_draft
            and (lookup := self._lookup(request))
            and (guess := lookup.guess(min(self._most, request.peak_tokens - len(request.tokens))))
        ]
        guesses.sort(key=lambda each: -each[0].hit_rate)
        for lookup, start, guess in guesses:
            request = lookup.request
            share = step.limits.chunk_share(len(step.decodes), step.context, start, prefill, pairs)
            until = int(rows.until[request.slot])
            reach = until + max(0, free_blocks) * size
            count = min(len(guess), room, left - 1, share - 1, reach - start - 1)
            if count < 1:
                continue
            free_blocks -= -(-max(0, start + 1 + count - until) // size)
            room, left = room - count, left - count - 1
            prefill, pairs = prefill + count + 1, pairs + start * (count + 1)
            drafts.append(_Draft(request, start, tuple(guess[:count]), _expected(lookup.hit_rate, count)))
        return drafts

    def _worth_it(self, step: Step, drafts: list[_Draft]) -> list[_Draft]:
        """As many of these as make the step give more tokens in its time; none when none do."""
        decodes = len(step.decodes)
        without = self._times.predict_us(decodes, step.prefill, step.context, step.prior_pairs)
        by_table_us: float | None = None  # where there is nothing to guess, nothing is learned of its price
        while drafts:
            guessed = sum(len(draft.tokens) for draft in drafts)
            pairs = sum(draft.start * len(draft.tokens) for draft in drafts)
            with_them = self._times.predict_us(decodes, step.prefill + guessed, step.context, step.prior_pairs + pairs)
            by_table_us = max(0, with_them - without) / guessed
            each_us = by_table_us if self._price_us is None else self._price_us
            gained = decodes + sum(draft.expected for draft in drafts)
            if gained * without > LEAST_GAIN * decodes * (without + guessed * each_us):
                return drafts
            drafts = drafts[: len(drafts) // 2]
        if self._price_us is not None and by_table_us is not None:
            self._price_us += FORGOTTEN * (by_table_us - self._price_us)
        return drafts

    def _lookup(self, request: Request) -> Lookup:
        lookup = self._lookups.get(request.slot)
        if lookup is None or lookup.request is not request:
            lookup = self._lookups[request.slot] = Lookup(request)
        return lookup


def _expected(hit_rate: float, count: int) -> float:
    """Tokens kept of `count`: each counts only if those before it were right."""
    return sum(hit_rate**number for number in range(1, count + 1))
