"""What goes wrong between an engine and its gate, and when: the state is late, lost or nonsense, the engine restarts.

Owns the faults of a scenario and what each does to a document of the engine's state. Who reads that is `state_link`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sluice_simulator.fields import Fields

Kind = Literal[
    "StateHangs", "StateFails", "StateNaN", "StateMissing", "StateFrozen", "StateDelayed",
    "CountersReset", "EngineRestarts", "ClockJumps", "LoopStalls",
]  # fmt: skip
KINDS: tuple[Kind, ...] = (
    "StateHangs", "StateFails", "StateNaN", "StateMissing", "StateFrozen", "StateDelayed",
    "CountersReset", "EngineRestarts", "ClockJumps", "LoopStalls",
)  # fmt: skip
# Happen at one moment.
_MOMENTS = frozenset(("CountersReset", "ClockJumps"))
# By how much, they ask.
_MEASURED = frozenset(("StateDelayed", "ClockJumps", "LoopStalls"))
_MOST_BY_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    kind: Kind
    from_us: int
    until_us: int
    by_us: int = 0
    """StateDelayed: how old an answer is when it comes. ClockJumps: forward. LoopStalls: each stall, as long apart."""

    def lasts(self, now_us: int) -> bool:
        """Whether it is on."""
        return self.from_us <= now_us < self.until_us


class Faults:
    """All faults of a scenario. They happen to every replica."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.all = faults

    def active(self, now_us: int, *kinds: Kind) -> Fault | None:
        """The first one of these kinds that is on."""
        return next((one for one in self.all if one.kind in kinds and one.lasts(now_us)), None)

    def gate_clock_us(self, now_us: int) -> int:
        """What the gate's clock shows."""
        return now_us + sum(one.by_us for one in self.all if one.kind == "ClockJumps" and one.from_us <= now_us)

    def stalled_until_us(self, now_us: int) -> int:
        """When the gate's event loop gets on; now, while nothing holds it up."""
        one = self.active(now_us, "LoopStalls")
        if one is None:
            return now_us
        into_us = (now_us - one.from_us) % (2 * one.by_us)
        return now_us + max(0, one.by_us - into_us)


def spoilt(kind: Kind, document: Any) -> Any:  # noqa: ANN401  # JSON has no narrower type
    """What an engine with this fault answers instead of the document of its state."""
    if kind == "StateFails":
        return {"error": {"message": "internal error", "type": "server_error", "code": 500}}
    if kind == "StateNaN":
        return {**document, "step": float("nan"), "pool": {**document["pool"], "free_blocks": float("nan")}}
    assert kind == "StateMissing", "asked for what spoils a document"
    return {key: value for key, value in document.items() if key not in {"pool", "derived", "preemptions_total"}}


def read_faults(fields: Fields) -> Faults:
    """The scenario's list of faults.

    Raises:
        InvalidInput: one breaks a rule.
    """
    return Faults(tuple(map(_read, fields.sections("faults")))) if fields.has("faults") else Faults()


def _read(fields: Fields) -> Fault:
    kind: Kind = fields.choice("kind", KINDS)  # type: ignore[assignment]  # one of KINDS
    from_us = fields.duration_us("at")
    lasting_us = 1 if kind in _MOMENTS else fields.duration_us("lasting", least_us=1)
    by_us = fields.duration_us("by", least_us=1, most_us=_MOST_BY_US) if kind in _MEASURED else 0
    fields.end()
    return Fault(kind, from_us, from_us + lasting_us, by_us)
