"""What may still be taken of each limited thing, and who has taken what: one mechanism for all budgets.

A budget is a name and a number. Some last for one step (tokens, prefill tokens, draft tokens, encoder tokens, media
items), some as long as a request runs (requests, adapters in use); both are this class, with another lifetime. Whoever
is undone gives back all it took, whatever that was, so a new budget cannot be forgotten there: it is a limit and a line
in `needs`. The KV blocks have a pool of their own, since they are things and not a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice_engine.core.request import Request


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request takes."""

    amounts: Mapping[str, int]
    shared: Mapping[str, str] = field(default_factory=dict)
    """Budget → name of a thing that costs one for all who use it together (an adapter)."""


class Budgets:
    """Named budgets with their takers. What has no limit here is not counted."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._left = dict(limits)
        self._taken: dict[Request, list[Needs]] = {}
        self._users: dict[tuple[str, str], int] = {}
        self._each: list[tuple[int, Needs]] = []

    def left(self, name: str) -> int:
        """What can still be taken."""
        return self._left[name]

    def limit(self, name: str, amount: int) -> None:
        """Set a limit while nothing of it is taken."""
        self._limits[name] = self._left[name] = amount

    def lacking(self, needs: Needs) -> str | None:
        """The first budget that these needs exceed; None when they fit."""
        for name, amount in needs.amounts.items():
            if amount > self._left.get(name, amount):
                return name
        for name, thing in needs.shared.items():
            if name in self._left and (name, thing) not in self._users and self._left[name] < 1:
                return name
        return None

    def take(self, request: Request, needs: Needs) -> None:
        """Take what was found to fit."""
        self._taken.setdefault(request, []).append(needs)
        self._change(needs, 1)
        for name, thing in needs.shared.items():
            users = self._users.get((name, thing), 0)
            self._users[name, thing] = users + 1
            if not users and name in self._left:
                self._left[name] -= 1

    def take_for_each(self, requests: int, needs: Needs) -> None:
        """Take the same for many, none of whom is known by name until `take_back_for_each`."""
        self._each.append((requests, needs))
        self._change(needs, requests)

    def take_back(self, request: Request) -> None:
        """A request is undone: all that it had taken goes back. Nothing when it took nothing."""
        for needs in self._taken.pop(request, ()):
            self._change(needs, -1)
            for name, thing in needs.shared.items():
                users = self._users[name, thing] - 1
                if users:
                    self._users[name, thing] = users
                    continue
                del self._users[name, thing]
                if name in self._left:
                    self._left[name] += 1

    def take_back_for_each(self, requests: int, needs: Needs) -> None:
        """So many of those of `take_for_each` are undone."""
        self.take_for_each(-requests, needs)

    def check(self) -> None:
        """Limit = left + what everybody holds, for each budget; nothing is below zero.

        Raises:
            AssertionError: it is not so.
        """
        held = dict.fromkeys(self._limits, 0)
        everything = [(1, needs) for taken in self._taken.values() for needs in taken]
        for count, needs in [*everything, *self._each]:
            for name, amount in needs.amounts.items():
                if name in held:
                    held[name] += count * amount
        for name, _thing in self._users:
            if name in held:
                held[name] += 1
        for name, limit in self._limits.items():
            assert self._left[name] >= 0, f"budget {name} is overdrawn by {-self._left[name]}"
            assert self._left[name] + held[name] == limit, f"budget {name}: {self._left[name]} + {held[name]} ≠ {limit}"

    def _change(self, needs: Needs, count: int) -> None:
        left = self._left
        for name, amount in needs.amounts.items():
            if name in left:
                left[name] -= count * amount
