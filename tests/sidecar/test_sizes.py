from __future__ import annotations

import pytest

from sluice_sidecar.ledger import ChoiceCost, Cost
from sluice_sidecar.sizes import KEPT_US, REST_FACTOR, SizeGuard

S = 1_000_000
SMALL, LARGE, HUGE = (Cost((ChoiceCost(tokens - 10, 10),)) for tokens in (40, 160, 700))


def guard(*, admitted: int = 10, refused: int = 0) -> SizeGuard:
    made = SizeGuard()
    for _ in range(admitted):
        made.admitted("standard", SMALL, 0)
    for _ in range(refused):
        made.refused("standard", SMALL, 0)
    return made


def kept(made: SizeGuard, now_us: int = 0, service_class: str = "standard") -> Cost | None:
    return made.kept_for(service_class, SMALL, now_us)


def test_without_a_refusal_nothing_is_kept() -> None:
    assert kept(guard()) is None
    assert kept(SizeGuard()) is None


def test_one_refused_while_smaller_ones_get_in_has_room_kept_for_it() -> None:
    made = guard()

    made.refused("standard", LARGE, 0)

    assert kept(made) is LARGE
    assert made.kept_for("standard", LARGE, 0) is None, "not from its own size"
    assert kept(made, service_class="batch") is None, "nor from another class"


def test_while_the_smaller_ones_fare_no_better_nothing_is_kept() -> None:
    made = guard(admitted=3, refused=7)
    for number in range(10):
        (made.admitted if number < 3 else made.refused)("standard", LARGE, 0)

    assert kept(made) is None


@pytest.mark.parametrize(
    ("let_in", "is_kept"),
    [pytest.param(6, True, id="clearly-behind"), pytest.param(8, False, id="near-enough")],
)
def test_room_is_kept_until_the_size_is_let_in_nearly_as_often(let_in: int, *, is_kept: bool) -> None:
    made = guard()
    for number in range(10):
        (made.admitted if number < let_in else made.refused)("standard", LARGE, 0)

    assert (kept(made) is not None) == is_kept


def test_the_largest_that_is_behind_is_kept_for() -> None:
    made = guard()
    made.refused("standard", LARGE, 0)
    made.refused("standard", HUGE, 0)

    assert kept(made) is HUGE
    assert made.kept_for("standard", LARGE, 0) is None, "the large ones fared no better than the huge one"


def test_kept_in_vain_it_is_given_up_and_not_begun_again_for_a_while() -> None:
    made = guard()
    made.refused("standard", LARGE, 0)

    assert kept(made, KEPT_US - 1) is LARGE
    assert kept(made, KEPT_US) is None
    made.admitted("standard", SMALL, KEPT_US + 1)
    made.refused("standard", LARGE, KEPT_US + 1)
    assert kept(made, KEPT_US + 1) is None
    later_us = KEPT_US + REST_FACTOR * KEPT_US
    made.admitted("standard", SMALL, later_us)
    made.refused("standard", LARGE, later_us)
    assert kept(made, later_us) is LARGE


def test_who_is_refused_over_and_over_is_kept_for_twice_as_long_and_no_longer() -> None:
    made = guard()
    held_s = 0
    for second in range(200):
        made.admitted("standard", SMALL, second * S)
        made.refused("standard", HUGE, second * S)
        held_s += kept(made, second * S) is not None

    assert held_s == 60, "then it rests for four times as long"


def test_one_that_was_let_in_ends_it_unless_its_size_is_still_behind() -> None:
    made = guard()
    for _ in range(3):
        made.refused("standard", LARGE, 0)

    made.admitted("standard", LARGE, 5 * S)
    assert kept(made, 5 * S) is LARGE
    for _ in range(12):
        made.admitted("standard", LARGE, 6 * S)
    assert kept(made, 6 * S) is None


def test_what_is_long_ago_counts_for_little() -> None:
    made = guard(admitted=1000)
    for _ in range(1000):
        made.admitted("standard", LARGE, 0)

    for second in range(60, 120):
        made.admitted("standard", SMALL, second * S)
        made.refused("standard", LARGE, second * S)

    assert kept(made, 90 * S) is LARGE


def test_a_call_of_many_choices_is_as_large_as_all_of_them() -> None:
    assert SizeGuard.is_as_large(Cost(SMALL.choices * 4), LARGE)
    assert not SizeGuard.is_as_large(SMALL, LARGE)
