"""The size guard: room is kept for long requests where short ones would take all of it.

Whatever falls free is enough for a short request long before it is enough for a long one, so under load the short ones
get in and the long ones never. Owns, by class and size, how many asked and how many were let in, and decides for which
size room is kept: while one of it, refused a while ago, is let in clearly less often than the smaller ones, those must
leave room for it. Must not know what room is, nor tenants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_sidecar.ledger import Cost

# Let in this much less often than the smaller ones, a size has room kept for it. The promise to keep is 0.6.
STARVED_BELOW = 0.8
# A refused caller is told to come back within this: so long room is kept for it.
KEPT_US = 30_000_000
# Kept in vain, it is not kept again for this many times as long: who asks and never comes back costs others little.
REST_FACTOR = 4
# Counts are halved every so often: the ratio is that of late.
HALVED_US = 10_000_000
# Fewer than these of smaller requests say nothing.
_LEAST_SMALLER = 1.0


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

    def is_behind(self, asked: float, let_in: float) -> bool:
        """Whether it is let in clearly less often than so many of so many."""
        return self.let_in * asked < STARVED_BELOW * let_in * self.asked

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
    """The sizes of one class, by binary digits of their tokens."""

    by_digits: dict[int, _Size] = field(default_factory=dict)
    halved_us: int = 0

    def at(self, digits: int) -> _Size:
        size = self.by_digits.get(digits)
        if size is None:
            size = self.by_digits[digits] = _Size()
        return size

    def halve(self, now_us: int) -> None:
        if now_us - self.halved_us < HALVED_US:
            return
        halvings = min(60, (now_us - self.halved_us) // HALVED_US)
        self.halved_us += (now_us - self.halved_us) // HALVED_US * HALVED_US
        for size in self.by_digits.values():
            size.asked /= 2**halvings
            size.let_in /= 2**halvings

    def is_starved(self, digits: int) -> bool:
        """Whether this size is let in clearly less often than all smaller ones together."""
        size = self.by_digits[digits]
        smaller = [each for number, each in self.by_digits.items() if number < digits]
        asked, let_in = sum(each.asked for each in smaller), sum(each.let_in for each in smaller)
        return asked >= _LEAST_SMALLER and size.is_behind(asked, let_in)


class SizeGuard:
    """For whom room is kept."""

    def __init__(self) -> None:
        self._classes: dict[str, _Sizes] = {}

    def admitted(self, service_class: str, cost: Cost, now_us: int) -> None:
        """A call was let in."""
        sizes, digits = self._find(service_class, cost, now_us)
        size = sizes.at(digits)
        size.asked += 1
        size.let_in += 1
        size.rests_until_us = 0
        if size.kept_from_us is not None:
            # It was for this one. While it is still behind, the next of its size is expected too.
            size.kept_from_us = None
            if sizes.is_starved(digits):
                size.keep(now_us)

    def refused(self, service_class: str, cost: Cost, now_us: int) -> None:
        """A call was refused for load."""
        sizes, digits = self._find(service_class, cost, now_us)
        size = sizes.at(digits)
        size.asked += 1
        size.check(now_us)
        if now_us >= size.rests_until_us and sizes.is_starved(digits):
            size.cost = cost
            size.keep(now_us)

    def kept_for(self, service_class: str, cost: Cost, now_us: int) -> Cost | None:
        """The larger call that must still find room beside this one; None when there is none."""
        sizes = self._classes.get(service_class)
        if sizes is None:
            return None
        digits = _digits(cost)
        own = sizes.by_digits.get(digits)
        for number in sorted(sizes.by_digits, reverse=True):
            if number <= digits:
                return None
            size = sizes.by_digits[number]
            # Who fares no better leaves nothing for it.
            is_behind = own is None or size.is_behind(own.asked, own.let_in)
            if size.check(now_us) and is_behind and sizes.is_starved(number):
                return size.cost
        return None

    @staticmethod
    def is_as_large(cost: Cost, other: Cost) -> bool:
        """Whether a call is of the other's size, or a larger one."""
        return _digits(cost) >= _digits(other)

    def _find(self, service_class: str, cost: Cost, now_us: int) -> tuple[_Sizes, int]:
        sizes = self._classes.get(service_class)
        if sizes is None:
            sizes = self._classes[service_class] = _Sizes(halved_us=now_us)
        sizes.halve(now_us)
        return sizes, _digits(cost)


def _digits(cost: Cost) -> int:
    return (cost.prompt_tokens + cost.decode_tokens).bit_length()
