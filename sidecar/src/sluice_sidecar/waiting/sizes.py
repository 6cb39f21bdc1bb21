"""The size guard: long requests are not starved by short ones.

Whatever falls free is enough for a short request long before it is enough for a long one, so under load the short ones
get in and the long ones do not. Owns, by class and size, how many asked and how many were let in of late, and answers
with two measures. While some have to wait, a size that is let in clearly more often than a longer one does not join
them: what falls free is then left to the longer ones. And where a size is hardly let in at all, although it keeps
asking, room is kept for one of it. A tenant that asks often is judged by its own requests alone: whose turn it is among
tenants is not a matter of sizes. Must not know what room is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sluice_engine.core.terms import Terms
from sluice_sidecar.capacity.cost import Cost

# Let in less often than this beside a shorter size, a size goes before it. The promise to keep is 0.6.
BEHIND_BELOW = 0.65
# The longest count from this share of all on: one huge request does not turn everybody else away.
LEAST_SHARE = 0.02
# Below this, leaving the line to it has not helped: room is kept. It costs capacity, so it takes more than one refusal.
STARVED_BELOW, STARVED_FROM = 0.3, 2.0
# Who was refused is told to come back after some seconds: so long room is kept for it.
KEPT_US = 10_000_000
# Kept in vain, it is not kept again for this many times as long: who asks and never comes back costs others little.
REST_FACTOR = 4
# Counts are halved every so often: what counts is of late.
HALVED_US = 10_000_000
# Fewer say nothing.
_LEAST_ASKED = 2.0
# A tenant with as many requests of late is judged by them, and all others of a class together.
OWN_FROM = 20.0
# Tenants and classes that are counted apart. Names come from outside: they are bounded.
MAX_OWN = 256


@dataclass(slots=True)
class _Size:
    """Requests whose tokens have the same number of binary digits."""

    asked: float = 0.0
    let_in: float = 0.0
    cost: Cost | None = None
    """The last that was refused."""
    kept_from_us: int | None = None
    """Room is kept since then; None: it is not."""
    kept_until_us: int = 0
    rests_until_us: int = 0

    def is_behind(self, other: _Size, below: float) -> bool:
        """Whether it is let in less often than so much of how often the other is."""
        return self.let_in * other.asked < below * other.let_in * self.asked

    def keep(self, now_us: int) -> None:
        """Keep room from now on, or longer."""
        if self.kept_from_us is None:
            self.kept_from_us = now_us
        self.kept_until_us = min(now_us + KEPT_US, self.kept_from_us + 2 * KEPT_US)

    def check(self, now_us: int) -> bool:
        """Whether room is kept; when that was long enough and in vain, it is given up."""
        if self.kept_from_us is None:
            return False
        if now_us < self.kept_until_us:
            return True
        self.rests_until_us = now_us + REST_FACTOR * (self.kept_until_us - self.kept_from_us)
        self.kept_from_us = None
        return False


@dataclass(slots=True)
class _Sizes:
    """The sizes of those that are judged together, by binary digits of their tokens."""

    by_digits: dict[int, _Size] = field(default_factory=dict)
    asked: float = 0.0
    halved_us: int | None = None

    def count(self, digits: int, now_us: int) -> _Size:
        """One more has asked."""
        self.halve(now_us)
        size = self.by_digits.get(digits)
        if size is None:
            size = self.by_digits[digits] = _Size()
        size.asked += 1
        self.asked += 1
        return size

    def admitted(self, digits: int, now_us: int) -> None:
        size = self.count(digits, now_us)
        size.let_in += 1
        size.rests_until_us = 0
        if size.kept_from_us is not None:
            # It was for this one. While it is still behind, the next of its size is expected too.
            size.kept_from_us = None
            if self._is_starved(digits):
                size.keep(now_us)

    def refused(self, digits: int, cost: Cost, now_us: int) -> None:
        size = self.count(digits, now_us)
        size.check(now_us)
        if now_us >= size.rests_until_us and self._is_starved(digits):
            # Without its prompt: that is gone with its body.
            size.cost = Cost(cost.choices)
            size.keep(now_us)

    def is_ahead(self, digits: int) -> bool:
        own, longer = self.by_digits.get(digits), _Size()
        if own is None:
            return False
        for number in sorted(self.by_digits, reverse=True):
            if number <= digits:
                return False
            longer.asked += self.by_digits[number].asked
            longer.let_in += self.by_digits[number].let_in
            is_known = longer.asked >= max(_LEAST_ASKED, LEAST_SHARE * self.asked)
            if is_known and longer.is_behind(own, BEHIND_BELOW):
                return True
        return False

    def kept_for(self, digits: int, now_us: int) -> Cost | None:
        own = self.by_digits.get(digits)
        for number in sorted(self.by_digits, reverse=True):
            if number <= digits:
                return None
            size = self.by_digits[number]
            # Who fares no better leaves nothing for it.
            is_behind = own is None or size.is_behind(own, STARVED_BELOW)
            if size.check(now_us) and is_behind and self._is_starved(number):
                return size.cost
        return None

    def halve(self, now_us: int) -> None:
        """Forget half for each span that went by."""
        if self.halved_us is None:
            self.halved_us = now_us
        halvings = (now_us - self.halved_us) // HALVED_US
        if halvings <= 0:
            return
        self.halved_us += halvings * HALVED_US
        part = 2.0 ** -min(60, halvings)
        self.asked *= part
        for size in self.by_digits.values():
            size.asked *= part
            size.let_in *= part

    def _is_starved(self, digits: int) -> bool:
        """Whether this size is hardly let in, beside all smaller ones together."""
        size, smaller = self.by_digits[digits], _Size()
        for number, each in self.by_digits.items():
            if number < digits:
                smaller.asked += each.asked
                smaller.let_in += each.let_in
        return size.asked >= STARVED_FROM and size.is_behind(smaller, STARVED_BELOW)


class SizeGuard:
    """Who goes before shorter ones, and for whom room is kept."""

    def __init__(self) -> None:
        self._classes: dict[str, _Sizes] = {}
        """Of those that ask seldom."""
        self._own: OrderedDict[tuple[str, str], _Sizes] = OrderedDict()
        """By class and tenant, the one that asked last at the end."""

    def admitted(self, terms: Terms, cost: Cost, now_us: int) -> None:
        """A call was let in."""
        for sizes in self._counted(terms):
            sizes.admitted(_digits(cost), now_us)

    def refused(self, terms: Terms, cost: Cost, now_us: int) -> None:
        """A call was refused for load."""
        for sizes in self._counted(terms):
            sizes.refused(_digits(cost), cost, now_us)

    def is_ahead(self, terms: Terms, cost: Cost, now_us: int) -> bool:
        """Whether calls of this size are let in clearly more often than some that are larger."""
        sizes = self._judged(terms, now_us)
        return sizes is not None and sizes.is_ahead(_digits(cost))

    def kept_for(self, terms: Terms, cost: Cost, now_us: int) -> Cost | None:
        """The larger call that must still find room beside this one; None when there is none."""
        sizes = self._judged(terms, now_us)
        return None if sizes is None else sizes.kept_for(_digits(cost), now_us)

    @staticmethod
    def is_as_large(cost: Cost, other: Cost) -> bool:
        """Whether a call is of the other's size, or a larger one."""
        return _digits(cost) >= _digits(other)

    def _judged(self, terms: Terms, now_us: int) -> _Sizes | None:
        # Who asks after a long silence is not judged by what was before it.
        own = self._own.get((terms.service_class, terms.tenant))
        if own is not None:
            own.halve(now_us)
            if own.asked >= OWN_FROM:
                return own
        others = self._classes.get(terms.service_class)
        if others is not None:
            others.halve(now_us)
        return others

    def _counted(self, terms: Terms) -> tuple[_Sizes, ...]:
        """Where a call of these terms is counted."""
        key = terms.service_class, terms.tenant
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = _Sizes()
            if len(self._own) > MAX_OWN:
                self._own.popitem(last=False)
        self._own.move_to_end(key)
        if own.asked >= OWN_FROM:
            return (own,)
        others = self._classes.get(terms.service_class)
        if others is None:
            others = self._classes[terms.service_class] = _Sizes()
        return own, others


def _digits(cost: Cost) -> int:
    return (cost.prompt_tokens + cost.decode_tokens).bit_length()
