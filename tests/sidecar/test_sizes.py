from __future__ import annotations

import pytest

from sluice_engine.core.terms import Terms
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.prefixes import Beginning, Match
from sluice_sidecar.waiting.sizes import KEPT_US, MAX_OWN, OWN_FROM, REST_FACTOR, SizeGuard

S = 1_000_000
USUAL, BATCH = Terms(), Terms(service_class="batch")
SMALL, LARGE, HUGE = (Cost((ChoiceCost(tokens - 10, 10),)) for tokens in (40, 160, 700))


def guard(*, admitted: int = 10, refused: int = 0) -> SizeGuard:
    made = SizeGuard()
    for _ in range(admitted):
        made.admitted(USUAL, SMALL, 0)
    for _ in range(refused):
        made.refused(USUAL, SMALL, 0)
    return made


def kept(made: SizeGuard, now_us: int = 0, terms: Terms = USUAL) -> Cost | None:
    return made.kept_for(terms, SMALL, now_us)


def refuse_twice(made: SizeGuard, now_us: int) -> None:
    for _ in range(2):
        made.admitted(USUAL, SMALL, now_us)
        made.refused(USUAL, LARGE, now_us)


def test_without_a_refusal_nothing_is_kept() -> None:
    assert kept(guard()) is None
    assert kept(SizeGuard()) is None


def test_a_size_that_gets_in_less_often_goes_before_shorter_ones_that_have_to_wait() -> None:
    made = guard()
    for number in range(10):
        (made.admitted if number < 6 else made.refused)(USUAL, LARGE, 0)

    assert made.is_ahead(USUAL, SMALL, 0)
    assert not made.is_ahead(USUAL, LARGE, 0)
    assert not made.is_ahead(USUAL, HUGE, 0), "nobody has asked for that much"
    assert not made.is_ahead(BATCH, SMALL, 0), "classes do not meet here"
    made.admitted(USUAL, LARGE, 0)
    made.admitted(USUAL, LARGE, 0)
    assert not made.is_ahead(USUAL, SMALL, 0), "near enough"
    assert kept(made) is None, "and no room need be kept"


def test_one_refused_twice_while_smaller_ones_get_in_has_room_kept_for_it() -> None:
    made = guard()

    made.refused(USUAL, LARGE, 0)
    assert kept(made) is None
    made.refused(USUAL, LARGE, 0)

    assert kept(made) == LARGE
    assert made.kept_for(USUAL, LARGE, 0) is None, "not from its own size"
    assert kept(made, 0, BATCH) is None, "nor from another class"


def test_while_the_smaller_ones_fare_no_better_nothing_is_kept() -> None:
    made = guard(admitted=3, refused=7)
    for number in range(10):
        (made.admitted if number < 3 else made.refused)(USUAL, LARGE, 0)

    assert kept(made) is None


@pytest.mark.parametrize(
    ("let_in", "is_kept"),
    [pytest.param(2, True, id="hardly-let-in"), pytest.param(4, False, id="let-in-now-and-then")],
)
def test_room_is_kept_for_a_size_that_is_hardly_let_in(let_in: int, *, is_kept: bool) -> None:
    made = guard()
    for number in range(10):
        (made.admitted if number < let_in else made.refused)(USUAL, LARGE, 0)

    assert (kept(made) is not None) == is_kept


def test_the_largest_that_is_behind_is_kept_for() -> None:
    made = guard()
    for _ in range(2):
        made.refused(USUAL, LARGE, 0)
        made.refused(USUAL, HUGE, 0)

    assert kept(made) == HUGE
    assert made.kept_for(USUAL, LARGE, 0) is None, "the large ones fared no better than the huge one"


def test_kept_in_vain_it_is_given_up_and_not_begun_again_for_a_while() -> None:
    made = guard()
    refuse_twice(made, 0)

    assert kept(made, KEPT_US - 1) == LARGE
    assert kept(made, KEPT_US) is None
    refuse_twice(made, KEPT_US + 1)
    assert kept(made, KEPT_US + 1) is None
    later_us = KEPT_US + REST_FACTOR * KEPT_US
    refuse_twice(made, later_us)
    assert kept(made, later_us) == LARGE


def refused_huge(made: SizeGuard, now_us: int) -> bool:
    """One more of each came; whether room is kept."""
    made.admitted(USUAL, SMALL, now_us)
    made.refused(USUAL, HUGE, now_us)
    return kept(made, now_us) is not None


def test_who_is_refused_over_and_over_is_kept_for_twice_as_long_and_no_longer() -> None:
    made = guard()
    kept_s = [second for second in range(200) if refused_huge(made, second * S)]

    # From the second refusal on, and again after a rest of four times as long.
    assert kept_s == [*range(1, 21), *range(101, 121)]


def test_one_that_was_let_in_ends_it_unless_its_size_is_still_behind() -> None:
    made = guard()
    for _ in range(5):
        made.refused(USUAL, LARGE, 0)

    made.admitted(USUAL, LARGE, 5 * S)
    assert kept(made, 5 * S) == LARGE
    for _ in range(12):
        made.admitted(USUAL, LARGE, 6 * S)
    assert kept(made, 6 * S) is None


def test_no_prompt_is_kept_with_the_room_for_it() -> None:
    made = guard()
    text = Cost(LARGE.choices, matches=(Match(Beginning("", b"x" * 4096)),))
    for _ in range(2):
        made.refused(USUAL, text, 0)

    found = kept(made)

    assert found is not None
    assert (found.choices, found.matches) == (LARGE.choices, ())


def test_what_is_long_ago_counts_for_little() -> None:
    made = guard(admitted=1000)
    for _ in range(1000):
        made.admitted(USUAL, LARGE, 0)

    for second in range(60, 120):
        made.admitted(USUAL, SMALL, second * S)
        made.refused(USUAL, LARGE, second * S)

    assert made.is_ahead(USUAL, SMALL, 120 * S)
    assert not made.is_ahead(USUAL, SMALL, 3600 * S), "nobody has asked for an hour"


def test_a_call_of_many_choices_is_as_large_as_all_of_them() -> None:
    assert SizeGuard.is_as_large(Cost(SMALL.choices * 4), LARGE)
    assert not SizeGuard.is_as_large(SMALL, LARGE)


def test_a_tenant_that_asks_often_is_judged_by_its_own_requests() -> None:
    made = SizeGuard()
    often, seldom = Terms(tenant="often"), Terms(tenant="seldom")
    for _ in range(int(OWN_FROM)):
        made.admitted(often, SMALL, 0)
        made.refused(Terms(tenant="flood"), LARGE, 0)

    assert not made.is_ahead(often, SMALL, 0), "it has nothing longer"
    assert made.kept_for(often, SMALL, 0) is None
    made.admitted(seldom, SMALL, 0)
    assert made.is_ahead(seldom, SMALL, 0), "too little is known of it alone"
    for _ in range(2):
        made.refused(often, LARGE, 0)
    assert made.is_ahead(often, SMALL, 0)


def test_one_huge_request_does_not_turn_everybody_else_away() -> None:
    made = guard(admitted=200)
    for _ in range(3):
        made.refused(USUAL, HUGE, 0)

    assert not made.is_ahead(USUAL, SMALL, 0), "three of two hundred are too few"
    made.refused(USUAL, LARGE, 0)
    made.refused(USUAL, LARGE, 0)
    assert made.is_ahead(USUAL, SMALL, 0), "with the large ones they are enough"


def test_names_from_outside_do_not_fill_the_memory() -> None:
    made = SizeGuard()
    for number in range(3 * MAX_OWN):
        made.admitted(Terms(tenant=f"user-{number}"), SMALL, 0)

    assert len(made._own) == MAX_OWN
