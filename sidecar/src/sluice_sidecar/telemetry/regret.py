"""The verdicts held against what became of the requests: which were wrong.

Owns the counts. With `admission.mode: Observe` both kinds of error show: a request that Enforce would have shed, and
that kept the promise all the same; and one that it would have let in, and that missed it. Under Enforce what was shed
is never seen again, so only the second kind is known. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["", "shed_but_met", "admitted_but_missed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Verdicts on requests of which it is known what became of the promise, since the gate started."""

    shed: int = 0
    """Would have been refused under Enforce."""
    shed_but_met: int = 0
    """Of them, those that kept the promise."""
    admitted: int = 0
    admitted_but_missed: int = 0
    """Of those, the ones that missed it, a gap, or their own deadline."""


class Regret:
    """Counts verdicts and the wrong ones among them."""

    def __init__(self) -> None:
        self._shed = [0, 0]
        """[all, those that met the promise]"""
        self._admitted = [0, 0]
        """[all, those that missed it]"""

    def judge(self, promise: str, outcome: str, *, shed: bool) -> Kind:
        """What became of one that was served, and whether the verdict is to be regretted; empty where it is not.

        One that ended through a fault or by its client says nothing about the verdict.
        """
        if not promise and outcome != "expired":
            return ""
        met = promise == "kept"
        counts, wrong = (self._shed, met) if shed else (self._admitted, not met)
        counts[0] += 1
        counts[1] += wrong
        if not wrong:
            return ""
        return "shed_but_met" if shed else "admitted_but_missed"

    @property
    def verdicts(self) -> Verdicts:
        """The counts."""
        return Verdicts(
            shed=self._shed[0],
            shed_but_met=self._shed[1],
            admitted=self._admitted[0],
            admitted_but_missed=self._admitted[1],
        )
