from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_sidecar.capacity.pessimism import MOST, Pessimism

S = 1_000_000
PROMISE_US = 2 * S


def taught(ratio: float, *, until_us: int, since_us: int = 0, pessimism: Pessimism | None = None) -> Pessimism:
    """Five first tokens a second, each predicted at half the promise or, once that is learned, at what keeps it."""
    found = pessimism or Pessimism(PROMISE_US)
    for now_us in range(since_us, until_us, S // 5):
        predicted_us = int(0.5 * PROMISE_US / found.factor(now_us))
        found.learn(predicted_us, int(predicted_us * ratio), now_us)
    return found


def test_without_evidence_a_prediction_is_taken_as_it_is() -> None:
    assert Pessimism(PROMISE_US).factor(0) == 1.0


def test_it_is_never_below_one() -> None:
    assert taught(0.25, until_us=30 * S).factor(30 * S) == 1.0


@pytest.mark.parametrize("ratio", [1.25, 2.0, 4.0])
def test_predictions_that_are_too_low_are_raised_to_nearly_what_came_of_them(ratio: float) -> None:
    assert taught(ratio, until_us=30 * S).factor(30 * S) == pytest.approx(ratio, rel=0.25)


def test_a_quarter_of_the_time_is_found_out_within_ten_seconds_and_forgotten_within_thirty() -> None:
    slow = taught(4.0, until_us=10 * S)
    assert slow.factor(10 * S) > 2.5

    well = taught(1.0, since_us=10 * S, until_us=40 * S, pessimism=slow)
    assert well.factor(40 * S) < 1.2


def test_of_predictions_that_come_out_unevenly_nearly_all_are_covered() -> None:
    pessimism = Pessimism(PROMISE_US, deviations=2.0)
    for number in range(100):
        pessimism.learn(S // 2, S // 2 * (3 if number % 2 else 5), number * S // 10)

    assert pessimism.factor(10 * S) > 5


def test_where_they_come_out_evenly_no_more_is_added() -> None:
    even = taught(2.0, until_us=30 * S, pessimism=Pessimism(PROMISE_US, deviations=2.0))

    assert even.factor(30 * S) < 2.1


def test_without_anything_new_it_returns_to_one() -> None:
    slow = taught(4.0, until_us=10 * S)

    factors = [slow.factor(second * S) for second in (10, 20, 40, 70)]

    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1.05


def test_a_thousand_short_waits_say_little_about_a_long_one() -> None:
    pessimism = Pessimism(PROMISE_US)
    for number in range(1_000):
        pessimism.learn(5_000, 15_000, number * 10_000)

    assert pessimism.factor(10 * S) < 1.3


def test_those_that_are_late_already_count_until_they_are_told_anew() -> None:
    pessimism = Pessimism(PROMISE_US)
    pessimism.suspect([(S // 2, 2 * S), (S, S // 2)])
    assert pessimism.factor(0) == pytest.approx((0.25 + 2.0) / (0.25 + 0.5))

    pessimism.suspect([])
    assert pessimism.factor(0) == 1.0


def test_a_miss_of_unknown_size_raises_it() -> None:
    pessimism = Pessimism(PROMISE_US)
    pessimism.miss(0)

    assert pessimism.factor(0) == pytest.approx((0.25 + 2.0) / (0.25 + 1.0))


def test_a_looser_promise_makes_the_same_error_smaller() -> None:
    factors = []
    for promise_us in (PROMISE_US, 10 * PROMISE_US):
        pessimism = Pessimism(PROMISE_US)
        pessimism.configure(promise_us)
        pessimism.learn(S // 2, 2 * S, 0)
        factors.append(pessimism.factor(0))

    assert factors[0] > factors[1]


@given(
    st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 100 * S), st.integers(-S, 10 * S)), max_size=30),
)
def test_it_stays_within_its_bounds_whatever_comes_and_whichever_way_the_clock_goes(
    samples: list[tuple[int, int, int]],
) -> None:
    pessimism, now_us = Pessimism(PROMISE_US, deviations=2.0), 0
    for predicted_us, actual_us, elapsed_us in samples:
        now_us += elapsed_us
        pessimism.learn(predicted_us, actual_us, now_us)
        assert 1.0 <= pessimism.factor(now_us) <= MOST
