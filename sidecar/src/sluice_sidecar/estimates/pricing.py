"""The price of a call, from its body and from what earlier ones turned out to cost.

Owns everything learned about sizes: tokens per byte, lengths of answers, beginnings that the engine has computed. It
remembers each admitted call until the engine has said how its prediction came out. Pure. Must not know who is let in.
Start reading at `Pricing.price`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from sluice_engine.core.fit import MAX_CHOICES, largest_output_tokens
from sluice_engine.core.request import Outcome
from sluice_engine.core.state import EngineState, FinishedState, RequestState
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Entry
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.prefixes import Beginning, Match, Prefixes
from sluice_sidecar.estimates.estimate import Asked
from sluice_sidecar.estimates.fitting import most_prompt_tokens
from sluice_sidecar.estimates.media import MediaTokens
from sluice_sidecar.estimates.outputs import Outputs
from sluice_sidecar.estimates.prompt import PromptSize, TokenRatio

# The engine lists what has ended for a while: of what it has not told by then it never will.
_TOLD_WITHIN_US = 10_000_000


@dataclass(slots=True)
class _Admitted:
    """A call whose predictions have not all come out yet."""

    cost: Cost
    unfinished: set[int]
    """Choices whose answer's length is not known."""
    unbegun: set[int]
    """Choices of which the engine has not said how much of the prompt it found."""
    uncomputed: set[int]
    """Choices whose prompt the engine has not computed."""
    output_tokens: int | None = None
    """Of all its choices, where the answer itself said so."""


class Pricing:
    """What calls will cost."""

    def __init__(self) -> None:
        self.ratio = TokenRatio()
        self.media = MediaTokens()
        self.outputs = Outputs()
        self.prefixes = Prefixes()
        self.answers_total = {"within": 0, "longer": 0}
        """Answers by whether they stayed within what was expected, where that was less than what was asked for."""
        self._admitted: dict[str, _Admitted] = {}
        self._left: deque[tuple[int, str]] = deque()
        """Those whose stream has ended, and when: the engine has yet to tell of them."""
        self._boot_id = ""
        self._model = ""
        """The engine's own name for its model: another that a call gives is an adapter's."""
        self._num_shared = 0
        """Prompts that several choices had in common: each is a key of its own."""
        self._pool_tokens = 0
        """What the engine may share of earlier prompts; 0 where it shares nothing, or does not say."""
        self._block_tokens = 1

    def price(self, asked: Asked, limits: Limits, tenant: str = "", exact_tokens: int | None = None) -> Cost:
        """The cost of a call. `exact_tokens` is the counted text of its largest prompt, where it was counted."""
        choices: list[ChoiceCost] = []
        matches: list[Match] = []
        adapter = "" if asked.model == self._model else asked.model
        largest = None if exact_tokens is None else asked.largest
        for index, prompt in enumerate(asked.prompts):
            match = self.prefixes.match(Beginning(tenant, prompt.text if self._pool_tokens else b"", adapter))
            counted_tokens = exact_tokens if index == largest else None
            tokens = self._text_tokens(prompt, match) if counted_tokens is None else counted_tokens
            tokens += self.media.tokens(prompt.media)
            if counted_tokens is None or prompt.media:
                # An estimate that does not fit is too high: what cannot fit for certain was refused before.
                tokens = max(1, min(tokens, most_prompt_tokens(asked.max_tokens or 1, limits)))
            room = largest_output_tokens(
                tokens, max_length_tokens=limits.max_length_tokens, pool_tokens=limits.pool_tokens
            )
            max_tokens = max(1, room) if asked.max_tokens is None else asked.max_tokens
            cached_tokens = self.prefixes.credit(match, tokens, limits.block_tokens)
            output_tokens = max(min(asked.least_tokens, max_tokens), self.outputs.expected(tenant, max_tokens))
            key = match.key if cached_tokens else b""
            first = ChoiceCost(tokens, max_tokens, output_tokens, cached_tokens, key)
            choices.append(first)
            if asked.choices_per_prompt > 1:
                choices.extend([self._further(first)] * (asked.choices_per_prompt - 1))
            matches.extend([match] * asked.choices_per_prompt)
        return Cost(
            tuple(choices[:MAX_CHOICES]),
            text_bytes=0 if any(prompt.tokens is not None for prompt in asked.prompts) else asked.prompts[0].text_bytes,
            overhead_tokens=asked.prompts[0].overhead_tokens,
            media=asked.prompts[0].media,
            tenant=tenant,
            matches=tuple(matches[:MAX_CHOICES]),
        )

    def admitted(self, request_id: str, cost: Cost) -> None:
        """A call was let in: its predictions will come out."""
        # Choices of one prompt find what the first of them computed: only that one says what was there before.
        matches = cost.matches
        firsts = {i for i in range(len(matches)) if i == 0 or matches[i] is not matches[i - 1]}
        for index in firsts:
            matches[index].beginning.settle()
        uncomputed = {index for index in firsts if matches[index].beginning.num_chunks}
        unbegun = {index for index in firsts if matches[index].tokens}
        self._admitted[request_id] = _Admitted(cost, set(range(len(cost.choices))), unbegun, uncomputed)

    def told(self, request_id: str, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """An answer came to its end, and said how long the prompts and the outputs were.

        For engines that list no requests; the others' state tells of each choice.
        """
        call = self._admitted.get(request_id)
        if call is None:
            return
        call.output_tokens = output_tokens
        cost = call.cost
        is_one_prompt = all(match is cost.matches[0] for match in cost.matches)
        if prompt_tokens is not None and is_one_prompt:
            self.learn_prompt(cost, prompt_tokens)

    def learn_prompt(self, cost: Cost, tokens: int) -> None:
        """The prompt of a call was so long: what is not text in it is worth what its text does not explain."""
        if cost.media:
            text_tokens = self.ratio.tokens(PromptSize(cost.text_bytes, cost.overhead_tokens))
            self.media.learn(cost.media, tokens - text_tokens)
        elif cost.text_bytes:
            self.ratio.learn(cost.text_bytes, tokens - cost.overhead_tokens)

    def left(self, entry: Entry, now_us: int, *, listed: bool, completed: bool) -> None:
        """A call's stream has ended. `listed`: the engine will tell itself how long its answers were."""
        if listed:
            self._left.append((now_us, entry.id))
            return
        call = self._admitted.pop(entry.id, None)
        told = None if call is None or call.output_tokens is None else -(-call.output_tokens // len(entry.choices))
        for index, choice in enumerate(entry.choices):
            # What was counted as it went by is each choice's own; of an answer that came whole nothing did.
            output_tokens = choice.output_tokens or told or 0
            cut_off = not completed or output_tokens >= choice.max_tokens
            if output_tokens:
                self._learn(entry.cost, index, output_tokens, cut_off=cut_off)

    def observe(self, state: EngineState, now_us: int) -> None:
        """Take in what the engine says of the calls that are in it, and of those that have ended."""
        if state.boot_id != self._boot_id:
            self._boot_id = state.boot_id
            self.prefixes.forget()
        self._model = state.model
        shares = state.prefix is not None and state.prefix.enabled and state.pool is not None
        self._pool_tokens = state.pool.total_blocks * state.pool.block_tokens if shares and state.pool else 0
        self._block_tokens = state.pool.block_tokens if state.pool is not None else 1
        for request in state.requests:
            call = self._admitted.get(request.id)
            if call is not None and (call.unbegun or call.uncomputed):
                self._progressed(call, request)
        for ended in state.finished:
            call = self._admitted.get(ended.id)
            if call is not None and ended.choice in call.unfinished:
                self._finished(call, ended)
                if not call.unfinished:
                    del self._admitted[ended.id]
        while self._left and now_us - self._left[0][0] > _TOLD_WITHIN_US:
            self._admitted.pop(self._left.popleft()[1], None)

    def _further(self, first: ChoiceCost) -> ChoiceCost:
        """Each further choice of a prompt: the engine lets it wait until it finds what the first computed."""
        shared = (first.prompt_tokens - 1) // self._block_tokens * self._block_tokens if self._pool_tokens else 0
        if shared <= first.cached_tokens:
            return first
        # The first holds those blocks as its own: the others count them once more together, which errs safely.
        self._num_shared += 1
        return ChoiceCost(
            first.prompt_tokens, first.max_tokens, first.output_tokens, shared, b"choices %d" % self._num_shared
        )

    def _text_tokens(self, prompt: PromptSize, match: Match) -> int:
        """The length of its text to expect: as it was told for a known beginning, by its bytes for the rest."""
        if prompt.tokens is not None or not match.num_bytes:
            return self.ratio.tokens(prompt)
        rest = 1 - match.num_bytes / match.beginning.num_bytes
        return match.tokens + self.ratio.tokens(replace(prompt, text_bytes=math.ceil(prompt.text_bytes * rest)))

    def _progressed(self, call: _Admitted, request: RequestState) -> None:
        choice, begun = request.choice, request.status == "running" or request.computed_tokens or request.preemptions
        if begun:
            self._begun(call, choice, request.cached_tokens)
        # Its last token is computed with the first of its answer.
        if request.output_tokens:
            self._computed(call, choice, request.prompt_tokens)

    def _finished(self, call: _Admitted, ended: FinishedState) -> None:
        call.unfinished.discard(ended.choice)
        if ended.output_tokens:
            self._begun(call, ended.choice, ended.cached_tokens)
            self._computed(call, ended.choice, ended.prompt_tokens)
        if ended.outcome != Outcome.FAILED:
            self._learn(call.cost, ended.choice, ended.output_tokens, cut_off=ended.outcome != Outcome.STOP)

    def _learn(self, cost: Cost, choice: int, output_tokens: int, *, cut_off: bool) -> None:
        self.outputs.learn(cost.tenant, output_tokens, cut_off=cut_off)
        expected = cost.choices[choice]
        # One that a client ended early says nothing of how long it would have been, unless it was longer already.
        if output_tokens > expected.output_tokens or not cut_off or output_tokens >= expected.max_tokens:
            self.outputs.bias.learn(expected.output_tokens, output_tokens)
        is_longer = output_tokens > expected.output_tokens
        # One that was cut off before might have become either.
        if expected.output_tokens < expected.max_tokens and (is_longer or not cut_off):
            self.answers_total["longer" if is_longer else "within"] += 1

    def _begun(self, call: _Admitted, choice: int, cached_tokens: int) -> None:
        if choice in call.unbegun:
            call.unbegun.discard(choice)
            # It finds whole blocks: what is left of one is no wrong credit.
            matched_tokens = call.cost.matches[choice].tokens // self._block_tokens * self._block_tokens
            self.prefixes.judge(matched_tokens, cached_tokens)

    def _computed(self, call: _Admitted, choice: int, prompt_tokens: int) -> None:
        if choice in call.uncomputed:
            call.uncomputed.discard(choice)
            self.prefixes.computed(call.cost.matches[choice].beginning, prompt_tokens, self._pool_tokens)
