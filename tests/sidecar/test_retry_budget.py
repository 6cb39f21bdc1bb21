from __future__ import annotations

import pytest

from sluice_sidecar.retries.retry_budget import LEAST_EVERY_US, SHORT_OF_CAPACITY_US, RetryBudget

S = 1_000_000


def filled(percent: int = 10, retried: int = 100, first: int = 800) -> RetryBudget:
    budget = RetryBudget(percent)
    budget.admitted(first, 0, is_retry=False)
    budget.admitted(retried, 0, is_retry=True)
    budget.refused("standard", 0)
    return budget


def test_retries_beyond_their_share_are_refused_while_the_class_lacks_capacity() -> None:
    assert filled(retried=100, first=800).closed_to("standard", 1 * S)
    assert not filled(retried=80, first=800).closed_to("standard", 1 * S)


def test_a_spent_budget_alone_refuses_nothing() -> None:
    budget = filled()

    assert budget.spent(1 * S)
    assert not budget.closed_to("batch", 1 * S)
    assert budget.closed_to("standard", SHORT_OF_CAPACITY_US - 1)
    assert not budget.closed_to("standard", SHORT_OF_CAPACITY_US + 1)


def test_new_work_gives_retries_their_share_again() -> None:
    budget = filled()

    budget.admitted(200, 1 * S, is_retry=False)

    assert not budget.closed_to("standard", 1 * S)


def test_a_spike_of_retries_fades() -> None:
    budget = filled(retried=1_000, first=1_000)
    budget.refused("standard", 200 * S)
    budget.admitted(200, 195 * S, is_retry=True)
    assert budget.closed_to("standard", 200 * S)

    budget.admitted(2_000, 200 * S, is_retry=False)

    assert not budget.closed_to("standard", 200 * S)


def test_however_little_is_let_in_a_retry_now_and_then_is() -> None:
    budget = RetryBudget(10)
    budget.refused("standard", 0)
    assert not budget.closed_to("standard", 0)

    budget.admitted(50, 0, is_retry=True)
    budget.refused("standard", LEAST_EVERY_US)

    assert budget.closed_to("standard", 1 * S)
    assert not budget.closed_to("standard", LEAST_EVERY_US)


@pytest.mark.parametrize(("percent", "closed"), [(0, True), (100, False)])
def test_nothing_for_retries_and_all_for_retries(percent: int, *, closed: bool) -> None:
    budget = RetryBudget(percent)
    budget.refused("standard", 0)
    assert budget.closed_to("standard", 1 * S) is closed

    budget.admitted(100, 0, is_retry=True)

    assert budget.closed_to("standard", 1 * S) is closed


def test_another_share_holds_from_the_next_decision_on() -> None:
    budget = filled(percent=10)

    budget.configure(20)

    assert not budget.closed_to("standard", 1 * S)


@pytest.mark.parametrize("percent", [5, 10, 30])
def test_over_time_retries_get_their_share_and_no_more(percent: int) -> None:
    budget = RetryBudget(percent)
    first = retried = 0

    for index in range(10_000):  # half of all that asks is a retry, and a tenth of it finds no room
        now_us = index * 20_000
        budget.refused("standard", now_us)
        if index % 2 and not budget.closed_to("standard", now_us):
            budget.admitted(7, now_us, is_retry=True)
            retried += 7
        elif not index % 2:
            budget.admitted(7, now_us, is_retry=False)
            first += 7

    assert retried / (first + retried) == pytest.approx(percent / 100, rel=0.1)


def test_a_clock_that_jumps_back_makes_nothing_grow() -> None:
    budget = filled()
    share = budget.share()

    budget.admitted(0, -100 * S, is_retry=False)

    assert budget.share() == pytest.approx(share)
