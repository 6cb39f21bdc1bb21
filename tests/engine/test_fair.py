"""Shares of tenants: the unit has a name, the bound holds, idleness saves nothing up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ordering import SERVICE, ids, waiter
from sluice_engine.config import FairnessUnit
from sluice_engine.core.order import fair
from sluice_engine.core.order.fair import WeightedFair
from sluice_engine.core.order.keyed import first_come
from sluice_engine.core.order.policy import Policies, order_for
from sluice_engine.core.order.waiting import Waiting
from sluice_engine.core.request import Request, RequestStatus

UNITS: tuple[FairnessUnit, ...] = ("Starts", "Tokens", "DeviceTime", "KVByteSeconds")


def fair_order(unit: FairnessUnit, weights: Mapping[str, int] | None = None) -> Waiting:
    return order_for(Policies(order="WeightedFair", fairness_unit=unit, weights=weights or {}), SERVICE)


def start(waiting: Waiting) -> Request:
    """Let the next request in, as the scheduler does."""
    request = next(waiting.candidates(0))
    waiting.remove(request)
    waiting.charge(request, starts=1)
    request.status = RequestStatus.RUNNING
    return request


def finish(waiting: Waiting, request: Request, used: int) -> None:
    """A request ends after it used so much of whatever the unit is."""
    waiting.charge(request, tokens=used, device_us=used, block_us=used)
    request.status = RequestStatus.FINISHED
    waiting.remove(request)


def backlog(waiting: Waiting, tenant: str, count: int, *, prompt: int = 10) -> None:
    for index in range(count):
        waiting.push(waiter(f"{tenant}{index}", tenant=tenant, prompt=prompt))


@pytest.mark.parametrize(
    ("unit", "cost", "starts"),
    [
        pytest.param("Starts", {"a": 900, "b": 100}, {"a": 50, "b": 50}, id="equal-starts-however-long-they-are"),
        pytest.param(
            "Tokens", {"a": 900, "b": 100}, {"a": 10, "b": 90}, id="equal-tokens-so-that-long-ones-start-less"
        ),
        pytest.param("DeviceTime", {"a": 300, "b": 100}, {"a": 25, "b": 75}, id="equal-device-time"),
        pytest.param("KVByteSeconds", {"a": 400, "b": 100}, {"a": 20, "b": 80}, id="equal-kv-byte-seconds"),
    ],
)
def test_the_unit_decides_what_is_equal(unit: FairnessUnit, cost: dict[str, int], starts: dict[str, int]) -> None:
    waiting = fair_order(unit)
    for tenant in cost:
        backlog(waiting, tenant, 100)

    started: Counter[str] = Counter()
    for _ in range(100):
        request = start(waiting)
        started[request.tenant] += 1
        finish(waiting, request, cost[request.tenant])

    assert {tenant: pytest.approx(count, abs=2) for tenant, count in starts.items()} == started


@pytest.mark.parametrize("unit", UNITS)
def test_weights_divide_what_is_used(unit: FairnessUnit) -> None:
    waiting = fair_order(unit, {"gold": 3, "silver": 2})
    for tenant in ("gold", "silver", "none"):
        backlog(waiting, tenant, 100)

    started = Counter[str]()
    for _ in range(60):
        request = start(waiting)
        started[request.tenant] += 1
        finish(waiting, request, 100)

    assert [started[name] for name in ("gold", "silver", "none")] == pytest.approx([30, 20, 10], abs=1)


@pytest.mark.parametrize("unit", UNITS)
def test_one_step_does_not_fill_the_batch_with_one_tenant(unit: FairnessUnit) -> None:
    waiting = fair_order(unit)
    backlog(waiting, "warm", 1)
    finish(waiting, start(waiting), 100)  # a price is known from here on
    backlog(waiting, "a", 8)
    backlog(waiting, "b", 8)

    batch = [start(waiting).tenant for _ in range(8)]

    assert Counter(batch) == {"a": 4, "b": 4}


@pytest.mark.parametrize("unit", UNITS)
def test_a_tenant_that_was_idle_has_saved_nothing_up(unit: FairnessUnit) -> None:
    waiting = fair_order(unit)
    backlog(waiting, "busy", 200)
    for _ in range(100):
        finish(waiting, start(waiting), 100)

    backlog(waiting, "back", 100)
    tenants = []
    for _ in range(20):
        request = start(waiting)
        tenants.append(request.tenant)
        finish(waiting, request, 100)

    assert Counter(tenants)["back"] == pytest.approx(10, abs=1), "its share from now on, not what it missed"


@pytest.mark.parametrize("unit", UNITS)
def test_a_tenant_that_used_the_pod_alone_is_not_punished_for_it(unit: FairnessUnit) -> None:
    waiting = fair_order(unit)
    backlog(waiting, "busy", 200)
    for _ in range(100):
        finish(waiting, start(waiting), 100)

    backlog(waiting, "new", 100)

    assert {start(waiting).tenant for _ in range(3)} == {"busy", "new"}


def test_a_tenant_that_left_overdrawn_still_owes_it_when_it_returns() -> None:
    waiting = fair_order("Tokens")
    backlog(waiting, "greedy", 1)
    finish(waiting, start(waiting), 10_000)
    backlog(waiting, "modest", 20)
    backlog(waiting, "greedy", 20)

    tenants = []
    for _ in range(10):
        request = start(waiting)
        tenants.append(request.tenant)
        finish(waiting, request, 100)

    assert Counter(tenants) == {"modest": 10}


def test_a_tenant_that_left_overdrawn_has_saved_nothing_up_once_the_others_have_passed_it() -> None:
    waiting = fair_order("Tokens")
    backlog(waiting, "greedy", 1)
    finish(waiting, start(waiting), 1000)
    backlog(waiting, "modest", 200)
    for _ in range(100):
        finish(waiting, start(waiting), 100)
    backlog(waiting, "greedy", 50)

    tenants = []
    for _ in range(20):
        request = start(waiting)
        tenants.append(request.tenant)
        finish(waiting, request, 100)

    assert Counter(tenants)["greedy"] == pytest.approx(10, abs=1)


def test_what_was_booked_and_not_used_is_given_back() -> None:
    order = WeightedFair("Tokens", first_come)
    for tenant in "ab":
        order.push(waiter(f"{tenant}0", tenant=tenant, prompt=100, output=901))
    request = next(order.candidates(0))
    order.remove(request)
    order.charge(request, starts=1)
    booked = order.service("a")

    order.charge(request, tokens=150)
    still_booked = order.service("a")
    order.remove(request)

    assert (booked, still_booked, order.service("a")) == (1000_000_000, 1000_000_000, 150_000_000)


def test_what_is_used_beyond_the_booking_is_charged_as_it_comes() -> None:
    order = WeightedFair("Tokens", first_come)
    order.push(waiter("a0", tenant="a", prompt=10, output=1))
    request = next(order.candidates(0))
    order.remove(request)
    order.charge(request, starts=1)

    order.charge(request, tokens=8)
    order.charge(request, tokens=8)

    assert order.service("a") == 16_000_000


def test_late_and_lumped_charges_come_out_as_early_and_small_ones_do() -> None:
    orders = [WeightedFair("DeviceTime", first_come, {"a": 7}) for _ in range(2)]
    for order, lumps in zip(orders, ([1000], [1] * 1000), strict=True):
        order.push(waiter("a0", tenant="a"))
        request = next(order.candidates(0))
        order.remove(request)
        order.charge(request, starts=1)
        for lump in lumps:
            order.charge(request, device_us=lump)
        order.remove(request)

    assert orders[0].service("a") == orders[1].service("a")


def test_names_of_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_IDLE_TENANTS", 10)
    order = WeightedFair("Tokens", first_come)
    for index in range(1000):
        request = waiter("x", tenant=str(index))
        order.push(request)
        order.remove(next(order.candidates(0)))
        order.charge(request, starts=1)
        order.charge(request, tokens=10_000 - index)
        order.remove(request)

    assert len(order._accounts) <= 11


def test_a_skipped_request_counts_as_given_so_that_the_next_tenant_comes_up() -> None:
    waiting = fair_order("Tokens")
    backlog(waiting, "a", 3, prompt=100)
    backlog(waiting, "b", 3, prompt=100)

    assert ids(waiting.candidates(0)) == ["a0", "b0", "a1", "b1", "a2", "b2"]


@settings(deadline=None)
@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=2),
    lengths=st.lists(st.integers(1, 400), min_size=40, max_size=40),
    unit=st.sampled_from(("Starts", "Tokens")),
)
def test_two_backlogged_tenants_differ_by_at_most_one_request_each(
    weights: dict[str, int], lengths: list[int], unit: FairnessUnit
) -> None:
    """Whatever starts, at any moment, in any interval from the beginning: the bound of start-time fair queueing."""
    waiting = fair_order(unit, weights)
    for tenant in weights:
        for index, length in enumerate(lengths):
            waiting.push(waiter(f"{tenant}{index}", tenant=tenant, prompt=length, output=1))
    given_: Counter[str] = Counter()
    largest = 1 if unit == "Starts" else max(lengths)

    for _ in range(len(lengths)):
        request = start(waiting)
        given_[request.tenant] += 1 if unit == "Starts" else request.num_prompt
        for one, other in itertools.permutations(weights, 2):
            gap = given_[one] / weights[one] - given_[other] / weights[other]
            assert gap <= largest / weights[one] + largest / weights[other] + 1e-6


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 3000)), min_size=30, max_size=60),
    st.sampled_from(("Tokens", "DeviceTime", "KVByteSeconds")),
)
def test_in_the_end_what_was_used_is_what_was_charged(jobs: list[tuple[int, int]], unit: FairnessUnit) -> None:
    """Bookings, draw-downs and refunds leave exactly the sum of what was used, however wrong the estimates were."""
    weights = {"a": 3, "b": 7, "c": 1}
    waiting = fair_order(unit, weights)
    order = waiting._order
    assert isinstance(order, WeightedFair)
    for tenant in weights:  # one more each than can start, so that no tenant is ever idle and lifted
        for index, (prompt, _) in enumerate([*jobs, (1, 0)]):
            waiting.push(waiter(f"{tenant}{index}", tenant=tenant, prompt=prompt))
    used: Counter[str] = Counter()
    for _, use in jobs:
        request = start(waiting)
        finish(waiting, request, use)
        used[request.tenant] += use

    assert {name: order.service(name) for name in weights} == {
        name: used[name] * 1_000_000 // weight for name, weight in weights.items()
    }
