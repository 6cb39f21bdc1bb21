"""Retries at the door, and a door that only observes."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sluice_engine.core.terms import Terms
from sluice_engine.live_config import LiveConfig
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.retries.attempts import Attempt

S = 1_000_000
COST = Cost((ChoiceCost(100, 50),))
SHED_MISSED = r'sluice_gate_verdicts_total{promise="missed",verdict="shed"} ([0-9])'


def config(**admission: Any) -> LiveConfig:
    live = live_config(max_wait_us=0)
    return replace(live, admission=replace(live.admission, **admission))


class Door:
    """An admission of four slots with a hand-turned clock."""

    def __init__(self, **admission: Any) -> None:
        self.now_us = 100 * S
        self.admission = Admission(
            config(**admission), stale_after_us=500_000, blind_after_us=5 * S, draw=lambda lo, hi: (lo + hi) // 2
        )
        self.asked = 0
        self.later(0)

    def later(self, passed_us: int) -> None:
        self.now_us += passed_us
        self.admission.observe(ready_state(seq=self.now_us), self.now_us, self.now_us)
        self.admission.set_unavailable(None, self.now_us)

    def enter(self, attempt: int = 0, body: bytes = b"", **terms: Any) -> Permit | Refusal | Ticket:
        self.asked += 1
        return self.admission.enter(
            f"r{self.asked}", COST, self.now_us, lambda _: None, terms=Terms(**terms), attempt=Attempt(attempt, body)
        )

    def fill(self) -> list[Permit]:
        permits = [self.enter() for _ in range(4)]
        assert all(isinstance(permit, Permit) for permit in permits)
        return [permit for permit in permits if isinstance(permit, Permit)]

    def reason(self, attempt: int = 0, body: bytes = b"", **terms: Any) -> str:
        verdict = self.enter(attempt, body, **terms)
        return verdict.reason.value if isinstance(verdict, Refusal) else "admitted"

    def spend(self) -> None:
        """Retries have a fifth of what was let in, and the class was refused just now."""
        permits = self.fill()
        permits.pop().close(self.now_us)
        assert self.reason(attempt=1) == "admitted"
        assert self.reason() == "slots"


def test_a_retry_beyond_the_budget_is_told_not_to_come_again() -> None:
    door = Door()
    door.spend()

    found = door.enter(attempt=1)

    assert isinstance(found, Refusal)
    assert (found.reason, found.status, found.should_retry) == (Reason.RETRY_BUDGET, 429, False)
    assert "Retry-After" not in found.headers()


def test_a_first_attempt_is_no_retry_whatever_the_budget() -> None:
    door = Door()
    door.spend()

    assert door.reason() == "slots"


def test_a_first_attempt_is_told_not_to_come_again_where_retries_have_had_their_share() -> None:
    door = Door()
    door.fill()
    invited = door.enter()
    assert isinstance(invited, Refusal)
    assert (invited.reason, invited.should_retry) == (Reason.SLOTS, True), "nobody has come back yet"

    spent = Door()
    spent.spend()
    told = spent.enter()

    assert isinstance(told, Refusal)
    assert (told.reason, told.should_retry, told.headers()["x-should-retry"]) == (Reason.SLOTS, False, "false")
    assert "do not send this request again by itself" in told.message
    other = spent.enter(service_class="critical")
    assert isinstance(other, Refusal)
    assert not other.should_retry, "its class is short of room by now, too"


def test_a_class_that_has_room_is_open_to_retries() -> None:
    door = Door()
    door.spend()

    assert door.reason(attempt=1, service_class="critical") == "slots", "not refused for capacity before"
    assert door.reason(attempt=1, service_class="critical") == "retry_budget"


def test_refusals_for_the_budget_do_not_keep_it_closed() -> None:
    door = Door()
    door.spend()

    for _ in range(10):
        door.later(900_000)
        assert door.reason(attempt=1) == "retry_budget"
    door.later(2 * S)

    assert door.reason(attempt=1) == "slots", "ten seconds after the class was last refused for room"


def test_a_silent_loop_is_known_by_its_body_and_stays_known() -> None:
    door = Door()
    door.spend()
    assert door.reason(body=b"loop") == "slots"

    assert [door.reason(body=b"loop") for _ in range(3)] == ["retry_budget"] * 3
    assert door.reason(body=b"another") == "slots"


def test_the_budget_can_be_turned_off() -> None:
    door = Door(retry_budget_percent=100)
    door.spend()

    assert door.reason(attempt=1) == "slots"


def test_attempts_are_counted_by_verdict() -> None:
    door = Door()
    door.spend()
    door.reason(attempt=1)

    assert door.admission.returning.verdicts == {"admitted": 1, "refused": 1}


def test_who_leaves_the_line_was_not_refused() -> None:
    door = Door(max_wait_us=1 * S)
    for number in range(4):
        door.admission.enter(f"inside-{number}", COST, 0, print)
    ticket = door.admission.enter("leaves", COST, 0, print, attempt=Attempt(1, b"key"))
    assert isinstance(ticket, Ticket)

    door.admission.leave(ticket, 0)

    assert door.admission.returning.verdicts["refused"] == 0
    assert door.admission.returning.attempts.number(Attempt(0, b"key"), 0) == 2, "it may come back all the same"


def test_the_measured_wait_is_kept_beside_what_was_told() -> None:
    door = Door()
    for _ in range(3):
        permit = door.enter()
        assert isinstance(permit, Permit)
        door.later(200_000)
        permit.completed = True
        permit.close(door.now_us)
    door.fill()

    found = door.enter()

    assert isinstance(found, Refusal)
    assert found.wait_us == 50_000, "four that stay for 200 ms: one leaves every 50 ms"
    assert found.retry_after_us == 1_500_000


def test_observe_lets_in_what_enforce_would_refuse_and_says_why() -> None:
    door = Door(mode="Observe")
    door.fill()

    assert door.reason() == "admitted"
    assert door.reason(attempt=1) == "admitted"
    assert door.reason(attempt=1) == "admitted"

    decisions = door.admission.decisions.last(10)
    assert [decision.shed_by for decision in decisions] == ["", "", "", "", "slots", "slots", "retry_budget"]
    assert {decision.verdict for decision in decisions} == {"admitted"}
    assert door.admission.refused_total == {}


def test_observe_lets_nobody_wait() -> None:
    door = Door(mode="Observe", max_wait_us=1 * S)
    door.fill()

    assert isinstance(door.enter(), Permit)
    decision = door.admission.decisions.last(1)[0]
    assert (decision.shed_by, decision.held_by) == ("", ""), "a wait at the door is no refusal"


def test_who_waits_when_nothing_is_refused_any_more_goes_in() -> None:
    door = Door(max_wait_us=1 * S)
    door.fill()
    settled: list[Permit | Refusal] = []
    tickets = [door.admission.enter(f"waits-{index}", COST, door.now_us, settled.append) for index in range(2)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)

    door.admission.configure(config(mode="Observe", max_wait_us=1 * S), door.now_us)

    assert [isinstance(verdict, Permit) for verdict in settled] == [True, True]
    assert door.admission.waiting == 0


def test_observe_tells_whom_the_size_guard_would_have_refused() -> None:
    door = Door(mode="Observe", max_wait_us=1 * S)
    door.fill()
    long = Cost((ChoiceCost(800, 100),))
    for index in range(4):
        door.admission.sizes.refused(Terms(), long, door.now_us)
        door.admission.enter(f"more-{index}", COST, door.now_us, lambda _: None)

    assert door.admission.decisions.last(1)[0].shed_by == Reason.SIZE_GUARD


@pytest.mark.parametrize(
    ("terms", "cost", "status"),
    [({"finish_us": 0}, COST, 504), ({}, Cost((ChoiceCost(1_000, 100),)), 400)],
    ids=["too-late", "impossible"],
)
def test_observe_refuses_what_no_load_is_to_blame_for(terms: dict[str, Any], cost: Cost, status: int) -> None:
    door = Door(mode="Observe")

    verdict = door.admission.enter("a", cost, door.now_us, lambda _: None, terms=Terms(**terms))

    assert isinstance(verdict, Refusal)
    assert verdict.status == status


async def test_what_enforce_would_have_refused_is_served_and_held_against_what_became_of_it(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    hold = asyncio.Event()
    engine.script = Script(hold_token={1: hold})

    async def read(gate: RunningGate) -> None:
        async with gate.post() as response:
            assert response.status == 200
            await response.read()

    async with running_gate(engine, socket_dir, live=config(mode="Observe")) as gate:
        running = [asyncio.create_task(read(gate)) for _ in range(6)]
        await until(lambda: len(engine.bodies) == 6)
        hold.set()
        await asyncio.gather(*running)
        await empty(gate.gate)
        async with gate.client.get(f"{gate.admin_url}/state") as response:
            state = (await response.json())["admission"]
        page = gate.gate.metrics.page().decode()

    assert state["mode"] == "Observe"
    assert state["refused_total"] == {}
    verdicts = state["verdicts"]
    assert (verdicts["admitted"], verdicts["shed"]) == (4, 2)
    assert verdicts["shed_but_met"] == 2 - int("".join(re.findall(SHED_MISSED, page)))
