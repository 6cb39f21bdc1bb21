from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import DerivedLimits
from sluice_engine.core.terms import CLASSES, Terms
from sluice_engine.live_config import ClassConfig, LiveConfig
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.waiting.classes import USUAL_PERCENT, Classes

S = 1_000_000
TWENTY_SLOTS = DerivedLimits(
    feasible=True, chunk_ceiling_tokens=256, token_budget=512, max_sequences=20, kv_capacity_tokens=1600
)
SMALL = Cost((ChoiceCost(10, 5),))


class Pod:
    """Twenty slots and a hundred blocks, of which 95 may be used; nothing moves."""

    def __init__(self, live: LiveConfig | None = None, **state: Any) -> None:
        self.now_us = 100 * S
        self.admission = Admission(
            live or live_config(), stale_after_us=500_000, blind_after_us=5 * S, draw=lambda lo, _: lo
        )
        self.admission.observe(ready_state(derived=TWENTY_SLOTS, **state), self.now_us, self.now_us)
        self.admission.set_unavailable(None, self.now_us)
        self.made = 0

    def ask(self, service_class: str = "standard", cost: Cost = SMALL, **terms: Any) -> Permit | Refusal | Ticket:
        self.made += 1
        return self.admission.enter(
            f"r{self.made}", cost, self.now_us, lambda _: None, terms=Terms(service_class=service_class, **terms)
        )

    def fill(self, service_class: str, most: int = 100, cost: Cost = SMALL) -> int:
        """How many go in before one has to wait or is refused."""
        for number in range(most):
            if not isinstance(self.ask(service_class, cost), Permit):
                return number
        return most

    @property
    def lowest(self) -> str | None:
        return self.admission.classes.lowest_let_in(self.admission.room, self.now_us)


def refusal(verdict: object) -> Refusal:
    assert isinstance(verdict, Refusal), verdict
    return verdict


@pytest.mark.parametrize(
    ("service_class", "slots"),
    [("critical", 20), ("interactive", 19), ("standard", 18), ("batch", 15), ("background", 12)],
)
def test_each_class_alone_fills_its_part_of_the_slots(service_class: str, slots: int) -> None:
    assert Pod().fill(service_class) == slots


@pytest.mark.parametrize(
    ("service_class", "blocks"),
    [("critical", 95), ("interactive", 90), ("standard", 85), ("batch", 71), ("background", 57)],
)
def test_each_class_alone_fills_its_part_of_the_steered_ceiling(service_class: str, blocks: int) -> None:
    pod = Pod()
    pod.fill(service_class, cost=Cost((ChoiceCost(111, 1),)))

    # Seven blocks each, so what is left is too little for one more.
    assert blocks - 7 < pod.admission.room.peak_blocks(pod.now_us) <= blocks


def test_what_a_class_may_not_fill_is_there_for_the_more_urgent() -> None:
    pod = Pod(live_config(max_wait_us=0))

    assert [pod.fill(name) for name in reversed(CLASSES)] == [12, 3, 3, 1, 1]
    found = refusal(pod.ask("critical"))
    assert found.reason is Reason.SLOTS, "nothing is kept free for others any more"


def test_a_class_that_is_full_of_others_work_is_cut_at_once_and_told_why() -> None:
    pod = Pod(live_config(max_wait_us=S))
    pod.fill("critical", 17)

    found = refusal(pod.ask("batch"))

    assert (found.reason, found.status) == (Reason.CLASS_CEILING, 429)
    assert "batch may fill 75 %" in found.message
    assert found.should_retry


def test_one_that_only_by_itself_would_cross_its_ceiling_may_wait_a_moment() -> None:
    pod = Pod(live_config(max_wait_us=S))
    permits = [pod.ask("standard") for _ in range(18)]
    assert all(isinstance(permit, Permit) for permit in permits)

    ticket = pod.ask("standard")
    assert isinstance(ticket, Ticket)
    assert ticket.held is not None
    assert ticket.held.reason is Reason.CLASS_CEILING
    assert isinstance(permits[0], Permit)
    permits[0].close(pod.now_us)

    assert isinstance(ticket.verdict, Permit)


def test_one_that_waits_for_its_class_keeps_no_more_urgent_one_out() -> None:
    pod = Pod(live_config(max_wait_us=S))
    pod.fill("standard", 18)
    assert isinstance(pod.ask("standard"), Ticket)

    assert isinstance(pod.ask("interactive"), Permit)


def test_old_work_of_a_class_that_is_full_keeps_no_fresh_work_of_a_more_urgent_one_out() -> None:
    live = live_config(max_wait_us=60 * S, ttft_us=600 * S)
    pod = Pod(replace(live, scheduling=replace(live.scheduling, aging_interval_us=S // 10)))
    pod.fill("batch", 15)
    waiting = pod.ask("batch")
    assert isinstance(waiting, Ticket)
    pod.now_us += 300_000
    pod.admission.observe(ready_state(derived=TWENTY_SLOTS, seq=2), pod.now_us, pod.now_us)

    assert isinstance(pod.ask("standard"), Permit), "the old one stands before it by age, and has no use for the room"
    assert waiting.verdict is None


@pytest.mark.parametrize("service_class", CLASSES)
def test_an_idle_pod_takes_one_of_any_class_whatever_the_state(service_class: str) -> None:
    pod = Pod()
    pod.now_us += 60 * S

    assert isinstance(pod.ask(service_class, Cost((ChoiceCost(500, 500),))), Permit)


@pytest.mark.parametrize(
    ("service_class", "is_let_in"), [("standard", True), ("interactive", True), ("batch", False), ("background", False)]
)
def test_an_old_state_shuts_out_what_can_wait(service_class: str, *, is_let_in: bool) -> None:
    pod = Pod()
    pod.ask("critical")
    pod.now_us += 600_000

    verdict = pod.ask(service_class)

    assert isinstance(verdict, Permit) == is_let_in
    if not is_let_in:
        assert "fresh state" in refusal(verdict).message


def test_the_lowest_class_that_is_let_in_is_told() -> None:
    pod = Pod(live_config(max_wait_us=0))
    assert pod.lowest == "background"
    told = []
    for name in reversed(CLASSES):
        pod.fill(name)
        told.append(pod.lowest)

    assert told == ["batch", "standard", "interactive", "critical", None]


def test_no_class_may_fill_more_than_a_more_urgent_one() -> None:
    pod, classes = Pod(), Classes((ClassConfig(name="standard", ceiling_percent=50),))

    assert [classes.percent(name, pod.admission.room, 0) for name in CLASSES] == [100, 95, 50, 50, 50]


def stayed(pod: Pod, stay_us: int) -> None:
    """Requests stay so long."""
    for _ in range(20):
        pod.admission.room.learned.residence.add(stay_us)


@pytest.mark.parametrize(
    ("stay_us", "slots"),
    [
        pytest.param(10 * S, 19, id="a-twentieth-falls-free-within-the-moment-that-others-may-wait"),
        pytest.param(5 * S, 20, id="a-tenth-does"),
        pytest.param(100 * S, 18, id="who-stays-long-gives-nothing-back-in-time"),
    ],
)
def test_what_is_kept_for_more_urgent_ones_is_lent_while_none_asks(stay_us: int, slots: int) -> None:
    pod = Pod(live_config(max_wait_us=S, ttft_us=2 * S))
    stayed(pod, stay_us)

    assert pod.fill("standard") == slots


def test_once_a_more_urgent_one_has_asked_its_part_is_kept_for_a_minute() -> None:
    pod = Pod(live_config(max_wait_us=S, ttft_us=2 * S))
    stayed(pod, 5 * S)
    urgent = pod.ask("interactive")
    assert isinstance(urgent, Permit)
    urgent.close(pod.now_us)

    pod.now_us += 60 * S
    pod.admission.observe(ready_state(derived=TWENTY_SLOTS, seq=2), pod.now_us, pod.now_us)
    assert pod.fill("standard") == 18
    pod.now_us += 1
    pod.admission.observe(ready_state(derived=TWENTY_SLOTS, seq=3), pod.now_us, pod.now_us)
    assert pod.admission.room.inside(pod.now_us) == 19, "the one that waited for it is in"


def test_a_ceiling_that_somebody_set_is_obeyed() -> None:
    live = live_config(max_wait_us=S, ttft_us=2 * S)
    set_by_hand = replace(live.admission, classes=(ClassConfig(name="standard", ceiling_percent=90),))
    pod = Pod(replace(live, admission=set_by_hand))
    stayed(pod, 5 * S)

    assert pod.fill("standard") == 18


def test_changed_ceilings_hold_for_who_asks_next() -> None:
    live = live_config(max_wait_us=0)
    pod = Pod(live)
    assert pod.fill("standard") == USUAL_PERCENT["standard"] * 20 // 100

    wider = replace(live.admission, classes=(ClassConfig(name="standard", ceiling_percent=95),))
    pod.admission.configure(replace(live, admission=wider), pod.now_us)

    assert pod.fill("standard") == 1
