"""Classes of service at the door: how much of the room each may fill, and which are shut out now.

Owns the ceilings, in percent of the steered ceiling of KV blocks and of the slots, and when each class asked last. What
is kept for more urgent classes is lent while none of them asks, as far as it falls free again within the moment that
one of theirs may wait. The order of classes in the queue is `fairness`'s. Must not know tenants or answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice_engine.core.terms import CLASSES
from sluice_engine.live_config import ClassConfig
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.look import Held, Look
from sluice_sidecar.capacity.room import Room
from sluice_sidecar.errors import Reason

# What is kept free for the more urgent: a burst of theirs finds room before anything had to end.
USUAL_PERCENT = {"critical": 100, "interactive": 95, "standard": 90, "batch": 75, "background": 60}
# A class by itself fills its ceiling, and what was predicted of it moves a little: only more than this is others' work.
CUT_MARGIN_PERCENT = 5
# So long after the last request of a more urgent class what is kept for such is lent: a pod whose callers name no class
# would refuse for the sake of nobody.
LENT_AFTER_US = 60_000_000
# Work that can wait is not let in by a state that may be wrong by now.
SHUT_UNLESS_FRESH = frozenset(("batch", "background"))


class Classes:
    """The ceilings of classes."""

    def __init__(self, configured: Sequence[ClassConfig], moment_us: int = 0) -> None:
        """`moment_us`: how long one of a more urgent class may wait for what was lent."""
        self._percent: dict[str, int] = {}
        self._set: frozenset[str] = frozenset()
        """Classes whose ceiling somebody chose: it is obeyed."""
        self._asked_us: dict[str, int] = {}
        self.configure(configured, moment_us)

    def configure(self, configured: Sequence[ClassConfig], moment_us: int = 0) -> None:
        """Take other ceilings. No class may fill more than one that is more urgent."""
        wanted = USUAL_PERCENT | {one.name: one.ceiling_percent for one in configured}
        least = 100
        for name in CLASSES:
            least = self._percent[name] = min(least, wanted[name])
        self._set = frozenset(one.name for one in configured)
        self._moment_us = moment_us

    def asked(self, service_class: str, now_us: int) -> None:
        """A request of this class has come."""
        self._asked_us[service_class] = now_us

    def percent(self, service_class: str, room: Room, now_us: int) -> int:
        """What it may fill now, in percent of the room: its ceiling, and what is lent to it."""
        percent = self._percent[service_class]
        if percent >= 100 or service_class in self._set or self._is_asked_before(service_class, now_us):
            return percent
        stay_us = room.stay_us(now_us)
        return percent if not stay_us else min(100, percent + percent * self._moment_us // stay_us)

    def _is_asked_before(self, service_class: str, now_us: int) -> bool:
        """Whether a more urgent class has asked of late."""
        for name in CLASSES:
            if name == service_class:
                return False
            asked_us = self._asked_us.get(name)
            if asked_us is not None and now_us - asked_us <= LENT_AFTER_US:
                return True
        return False

    def look(  # a call, and where and when it is looked at
        self, service_class: str, cost: Cost, room: Room, now_us: int, waited_us: int, *, less_percent: int = 0
    ) -> Look:
        """The room under the ceiling of a class; what keeps a call out names the class where only its ceiling does.

        `less_percent` of the room are kept from it.
        """
        if self._is_shut(service_class, room, now_us):
            problem = f"requests of class {service_class} wait for a fresh state of the engine"
            return Look(room.inside(now_us), held=Held(Reason.CLASS_CEILING, problem, None))
        percent = max(1, self.percent(service_class, room, now_us) - less_percent)
        look = room.look(cost, now_us, waited_us, ceiling_percent=percent)
        if look.held is not None and percent < 100 and _is_for_others(look, cost, room, now_us):
            problem = f"requests of class {service_class} may fill {percent} % of the room, and {look.held.problem}"
            look.held = Held(Reason.CLASS_CEILING, problem, look.held.wait_us)
        return look

    def is_cut(self, service_class: str, room: Room, now_us: int) -> bool:
        """Whether clearly more is inside than this class may fill: then a moment's wait would not let it in."""
        percent = self.percent(service_class, room, now_us) + CUT_MARGIN_PERCENT
        return (
            self._is_shut(service_class, room, now_us)
            or room.inside(now_us) > room.slots_for(percent, now_us)
            or room.peak_blocks(now_us) > room.ceiling_blocks(now_us, percent)
        )

    def lowest_let_in(self, room: Room, now_us: int) -> str | None:
        """The least urgent class of which a small request would be let in now; None when there is none."""
        inside, peak = room.inside(now_us), room.peak_blocks(now_us)
        for name in reversed(CLASSES):
            percent = self.percent(name, room, now_us)
            has_room = inside < room.slots_for(percent, now_us) and peak < room.ceiling_blocks(now_us, percent)
            if not inside or (has_room and not self._is_shut(name, room, now_us)):
                return name
        return None

    @staticmethod
    def _is_shut(service_class: str, room: Room, now_us: int) -> bool:
        """An idle engine takes any class."""
        return service_class in SHUT_UNLESS_FRESH and room.freshness(now_us) != "fresh" and room.inside(now_us) > 0


def _is_for_others(look: Look, cost: Cost, room: Room, now_us: int) -> bool:
    """Whether what keeps a call out is kept free for more urgent classes, and not full."""
    if look.held is None or look.held.reason is Reason.TTFT_PROMISE:
        return False
    if look.held.reason is Reason.SLOTS:
        return look.inside + len(cost.choices) <= room.slots_for(100, now_us)
    return look.peak_blocks is not None and look.peak_blocks <= room.ceiling_blocks(now_us, 100)
