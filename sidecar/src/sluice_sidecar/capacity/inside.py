"""What is inside the engine, in sums: a decision reads them, and whoever comes or goes changes them by its own part.

Owns the sums and the future peak. A request's part is reckoned when it enters and with each state: p, the steps of its
prefill, by the share that it gets of a step then. Must not know entries or permits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sluice_sidecar.capacity.limits import Limits, prefill_share
from sluice_sidecar.capacity.peak import FuturePeak, Growth, growth
from sluice_sidecar.capacity.progress import Part, Progress


class Inside:
    """The sums over every choice that holds, or will hold, blocks and a slot in the engine."""

    def __init__(self) -> None:
        self.choices = 0
        self.prefilling = 0
        self.blocks = 0
        """Of all known input."""
        self.queue_tokens = 0
        self.prior_pairs = 0
        self._limits: Limits | None = None
        self._length_bias = 1.0
        self._peak = FuturePeak(1)

    def refill(self, choices: Iterable[Progress], limits: Limits, length_bias: float = 1.0) -> None:
        """Begin anew: what the engine says of all of them has changed. Answers are so much longer than predicted."""
        choices = list(choices)
        if self._limits is None or self._limits.block_tokens != limits.block_tokens:
            self._peak = FuturePeak(limits.block_tokens)
        self._limits, self._length_bias = limits, length_bias
        self.choices = len(choices)
        self.prefilling = sum(choice.prefilling for choice in choices)
        self.blocks = self.queue_tokens = self.prior_pairs = 0
        parts = self._parts(choices, limits, self.choices, self.prefilling)
        for choice, part in zip(choices, parts, strict=True):
            choice.part = part
            self._count(part, 1)
        self._peak.refill([part.growth for part in parts])

    def enter(self, choices: Sequence[Progress]) -> None:
        """The choices of a call enter together."""
        parts = self._asking(choices)
        self.choices += len(choices)
        self.prefilling += sum(choice.prefilling for choice in choices)
        for choice, part in zip(choices, parts, strict=True):
            choice.part = part
            self._count(part, 1)
            self._peak.add(part.growth)

    def leave(self, choice: Progress) -> None:
        """A choice holds nothing any more; nothing happens where it has left before."""
        part = choice.part
        if part is None:
            return
        choice.part = None
        self.choices -= 1
        self.prefilling -= part.queue_tokens > 0
        self._count(part, -1)
        self._peak.remove(part.growth)

    def peak_blocks(self, asking: Sequence[Progress] = ()) -> int:
        """The future peak, with the choices of one more call or without."""
        if not asking:
            return self._peak.peak()
        return self._peak.peak_with([part.growth for part in self._asking(asking)])

    def steps_until_room(self, asking: Sequence[Progress], ceiling_blocks: int) -> int:
        """Steps until the choices of one more call would stay below the ceiling, if nobody else entered before."""
        return self._peak.steps_until_room([part.growth for part in self._asking(asking)], ceiling_blocks)

    def _asking(self, choices: Sequence[Progress]) -> list[Part]:
        assert self._limits is not None, "nobody enters before the engine has told its limits"
        prefilling = sum(choice.prefilling for choice in choices)
        return self._parts(choices, self._limits, self.choices + len(choices), self.prefilling + prefilling)

    def _parts(self, choices: Sequence[Progress], limits: Limits, together: int, prefilling: int) -> list[Part]:
        """The part of each, where so many are inside together and so many of them prefill."""
        share = prefill_share(limits, together - prefilling, prefilling)
        return [_part(choice, limits, together, share, self._length_bias) for choice in choices]

    def _count(self, part: Part, sign: int) -> None:
        self.blocks += sign * part.blocks
        self.queue_tokens += sign * part.queue_tokens
        self.prior_pairs += sign * part.prior_pairs


def _part(choice: Progress, limits: Limits, together: int, share: int, length_bias: float) -> Part:
    # Plain arithmetic: with a thousand inside, this is what a state costs the gate.
    known = choice.prompt_tokens + choice.output_tokens
    left = known - choice.computed_tokens
    expected = choice.expected_tokens
    if length_bias > 1.0:
        expected = max(expected, choice.likely_tokens(length_bias))
    grows = growth(known, max(1, left), choice.prompt_tokens + expected, share)
    size = limits.block_tokens
    if choice.prefix_key and (shared := choice.cached_tokens // size):
        grows = Growth(*grows[:3], shared, choice.prefix_key)
    if left <= 1:
        return Part(grows, -(-known // size), 0, 0)
    pairs = limits.prior_pairs(choice.computed_tokens, left, together) if limits.per_prior_pair_ps else 0
    return Part(grows, -(-known // size), left, pairs)
