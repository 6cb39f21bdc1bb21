from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_engine.core.terms import CLASSES, Terms
from sluice_engine.live_config import TenantConfig
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.telemetry.decisions import Decision
from sluice_sidecar.waiting.fairness import Queue, Ticket
from sluice_sidecar.waiting.tenants import Tenants

S = 1_000_000
COST = Cost((ChoiceCost(100, 50),))


class Line:
    """A queue, its tenants, and what was served."""

    def __init__(self, *weights: tuple[str, int], aging_us: int = 20 * S) -> None:
        self.tenants = Tenants([TenantConfig(name=name, weight=weight) for name, weight in weights])
        self.queue = Queue(self.tenants, aging_us)
        self.made = 0

    def push(self, tenant: str = "", service_class: str = "standard", at_us: int = 0, **terms: Any) -> Ticket:
        self.made += 1
        name = f"{tenant or service_class}{self.made}"
        decision = Decision(request_id=name, client_id="", route="", arrived_us=at_us)
        found = Ticket(
            name, COST, Terms(service_class=service_class, tenant=tenant, **terms), at_us, decision, lambda _: None
        )
        self.queue.push(found)
        return found

    def first(self) -> Ticket | None:
        return next(self.queue.in_turn(), None)

    def serve(self, cost_us: int = 1_000) -> Ticket:
        """The next goes in."""
        ticket = self.first()
        assert ticket is not None
        self.tenants.start(ticket.terms.tenant, ticket.request_id, cost_us, 0)
        assert self.queue.remove(ticket)
        return ticket


def test_the_more_urgent_class_goes_first_and_a_callers_own_order_stays_inside_it() -> None:
    line = Line()
    background = line.push(service_class="background")
    behind = line.push(behind=True)
    batch = line.push(service_class="batch")
    standard = line.push()
    critical = line.push(service_class="critical")

    assert [line.serve() for _ in range(5)] == [critical, standard, behind, batch, background]


def test_sixty_seconds_put_base_six_ahead_of_a_fresh_five() -> None:
    line = Line()
    batch = line.push(service_class="batch", at_us=0)
    fresh = line.push(behind=True, at_us=19 * S)
    assert line.first() is fresh
    line.queue.remove(fresh)

    later = line.push(behind=True, at_us=60 * S)

    assert list(line.queue.in_turn()) == [batch, later]


def test_without_aging_a_class_waits_for_ever() -> None:
    line = Line(aging_us=20 * S)
    line.push(service_class="batch", at_us=0)
    fresh = line.push(at_us=3600 * S)
    assert line.first() is not fresh

    line.queue.configure(0)

    assert list(line.queue.in_turn()) == [fresh]


def test_one_that_floods_takes_turns_with_one_that_asks_now_and_then() -> None:
    line = Line()
    for _ in range(50):
        line.push("flood")
    served = []
    for number in range(20):
        if number % 2:
            line.push("rare")
        served.append(line.serve().terms.tenant)

    assert served.count("rare") == 10, "each of its requests went in as soon as it came"


def test_weights_say_how_often_each_is_served() -> None:
    line = Line(("big", 3))
    for _ in range(40):
        line.push("big")
        line.push("small")

    served = [line.serve().terms.tenant for _ in range(40)]

    assert served.count("big") == 30


def test_what_is_shared_is_the_engine_and_not_the_number_of_requests() -> None:
    line = Line()
    for _ in range(100):
        line.push("long")
        line.push("short")

    had = {"long": 0, "short": 0}
    for _ in range(110):
        first = line.first()
        assert first is not None
        tenant = first.terms.tenant
        had[tenant] += 10_000 if tenant == "long" else 1_000
        line.serve(10_000 if tenant == "long" else 1_000)

    assert abs(had["long"] - had["short"]) <= 11_000


def test_who_is_given_something_back_comes_forward() -> None:
    line = Line()
    for name in ("a", "b"):
        line.push(name)
        line.push(name)
    assert [line.serve(5_000).terms.tenant, line.serve(4_000).terms.tenant] == ["a", "b"]
    first = line.first()
    assert first is not None
    assert first.terms.tenant == "b"

    line.tenants.end("a1", 1_000)
    line.queue.renew("a")

    first = line.first()
    assert first is not None
    assert first.terms.tenant == "a"


def test_how_many_are_ahead_goes_by_turns_and_not_by_the_length_of_the_line() -> None:
    line = Line()
    flood = [line.push("flood") for _ in range(30)]
    rare = line.push("rare")
    line.push(service_class="critical")

    assert line.queue.ahead_of(rare) == 1 + 1
    assert line.queue.ahead_of(flood[-1]) == 1 + 29 + 1


def test_one_too_many_costs_the_least_urgent_and_there_whoever_has_most_its_newest() -> None:
    line = Line()
    for _ in range(3):
        line.push("flood")
    newest = line.push("flood")
    assert line.queue.superfluous(line.push("rare")) is newest
    again = line.push("flood")
    assert line.queue.superfluous(again) is again
    background = line.push("other", "background")
    assert line.queue.superfluous(line.push("flood")) is background


def test_among_equals_the_newcomer_goes() -> None:
    line = Line()
    for name in ("a", "b", "c"):
        line.push(name)
    newcomer = line.push("d")

    assert line.queue.superfluous(newcomer) is newcomer


def test_others_wait_only_where_it_is_another_tenant_of_the_same_urgency() -> None:
    line = Line()
    mine = line.push("a")
    line.push("b", "background")
    assert not line.queue.others_wait(mine)
    line.push("b")
    assert line.queue.others_wait(mine)
    line.queue.remove(mine)
    assert line.queue.others_wait(mine)


def test_a_place_is_given_up_once() -> None:
    line = Line()
    ticket = line.push("a")

    assert line.queue.remove(ticket)
    assert not line.queue.remove(ticket)
    assert (len(line.queue), list(line.queue.in_turn())) == (0, [])


TENANTS = ("a", "b", "c", "d")


class QueueMachine(RuleBasedStateMachine):
    """Whatever comes, goes and is corrected: the order is that of a plain list, looked through from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(("a", 3), ("b", 2))
        self.waiting: list[Ticket] = []
        self.inside: dict[str, str] = {}
        self.now_us = 0

    @rule(
        tenant=st.sampled_from(TENANTS),
        service_class=st.sampled_from(CLASSES),
        behind=st.booleans(),
        pause_us=st.sampled_from([0, 1, S, 30 * S]),
    )
    def push(self, tenant: str, service_class: str, pause_us: int, *, behind: bool) -> None:
        self.now_us += pause_us
        self.waiting.append(self.line.push(tenant, service_class, self.now_us, behind=behind))

    @precondition(lambda self: self.waiting)
    @rule(cost_us=st.integers(1, 5_000))
    def serve(self, cost_us: int) -> None:
        ticket = self.line.serve(cost_us)
        self.waiting.remove(ticket)
        self.inside[ticket.request_id] = ticket.terms.tenant

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.line.queue.remove(ticket)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), used_us=st.integers(1, 10_000))
    def end(self, data: st.DataObject, used_us: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.inside)))
        tenant = self.inside.pop(name)
        assert self.line.tenants.end(name, used_us) == tenant
        self.line.queue.renew(tenant)

    @rule(weight=st.integers(1, 9))
    def reconfigure(self, weight: int) -> None:
        self.line.tenants.configure((TenantConfig(name="c", weight=weight),))
        self.line.queue.configure(20 * S)

    @invariant()
    def the_first_is_the_one_that_a_plain_search_finds(self) -> None:
        first = self.line.first()
        assert (first is None) == (not self.waiting)
        assert len(self.line.queue) == len(self.waiting)
        if first is None:
            return
        urgent = min(ticket.terms.priority() for ticket in self.waiting)
        band = [ticket for ticket in self.waiting if ticket.terms.priority() == urgent]
        ahead = [ticket for ticket in self.waiting if self.key(ticket) < self.key(band[0])]
        if ahead:
            assert first is min(ahead, key=self.key)
        else:
            least = min(self.line.tenants.virtual(ticket.terms.tenant) for ticket in band)
            assert self.line.tenants.virtual(first.terms.tenant) == least
            assert first is next(ticket for ticket in band if ticket.terms.tenant == first.terms.tenant)

    @staticmethod
    def key(ticket: Ticket) -> int:
        return ticket.terms.priority() * 20 * S + ticket.arrived_us

    @invariant()
    def nothing_is_kept_of_who_is_not_here(self) -> None:
        here = {ticket.terms.tenant for ticket in self.waiting} | set(self.inside.values())
        shares = [self.line.tenants.shares_percent(name)[0] for name in TENANTS if name not in here]
        assert not any(shares)
        assert len(self.line.tenants) <= len(TENANTS)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


@pytest.mark.parametrize("tenants", [1, 200])
def test_the_next_is_found_without_looking_through_all_that_wait(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    for number in range(400):
        line.push(f"t{number % tenants}")
    looks = 0

    def virtual(tenant: str) -> int:
        nonlocal looks
        looks += 1
        return Tenants.virtual(line.tenants, tenant)

    monkeypatch.setattr(line.tenants, "virtual", virtual)
    for _ in range(100):
        line.serve()

    assert looks <= 100 * 4
