"""The ceiling of KV blocks, as preemptions steer it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_sidecar.capacity.ceiling import Ceiling
from sluice_sidecar.capacity.recent import Recent

S = 1_000_000


def test_a_count_over_the_last_while_forgets_what_is_older() -> None:
    recent = Recent(10)
    recent.add(2, 0)
    recent.add(3, 5)

    assert [recent.total(now) for now in (10, 11, 15, 16)] == [5, 3, 3, 0]
    recent.add(1, 20)
    recent.clear()
    assert recent.total(20) == 0


def steered(events: list[tuple[int, int]], *, until_us: int, per_minute: float = 6.0) -> Ceiling:
    """A ceiling polled five times a second; `events` are (second, preemptions)."""
    ceiling = Ceiling(95, per_minute)
    total = 0
    pending = sorted(events)
    for now_us in range(0, until_us + 1, 200_000):
        while pending and pending[0][0] * S <= now_us:
            total += pending.pop(0)[1]
        ceiling.observe("boot", total, now_us)
    return ceiling


@pytest.mark.parametrize(
    ("events", "second", "share"),
    [
        pytest.param([], 60, 0.95, id="nothing-happened"),
        pytest.param([(1, 3)], 5, 0.95, id="three-in-30-s-are-6-a-minute-and-allowed"),
        pytest.param([(1, 4)], 5, 0.95 * 0.9, id="four-make-a-bad-window"),
        pytest.param([(1, 4)], 15, 0.95 * 0.9, id="one-window-is-judged-once"),
        pytest.param([(1, 4), (8, 1)], 10, 0.95 * 0.81, id="two-bad-windows-in-a-row"),
        pytest.param([(4, 4), (6, 9)], 10, 0.95 * 0.9, id="one-storm-falls-once-wherever-the-windows-part"),
        pytest.param([(1, 4)], 16, 0.95 * 0.9 + 0.05, id="it-rises-once-10-s-were-clean"),
        pytest.param([(1, 4)], 40, 0.95, id="it-rises-no-higher-than-configured"),
        pytest.param([(1, 4), (14, 1)], 15, 0.95 * 0.9 * 0.9, id="a-preemption-while-it-is-too-many-is-bad-again"),
        pytest.param([(1, 4), (12, 1)], 21, 0.95 * 0.9 * 0.9, id="and-clean-time-begins-after-it"),
        pytest.param(
            [(1, 4), (16, 1)], 19, 0.95 * 0.9 + 0.04, id="a-preemption-that-is-too-many-stops-the-rise-at-once"
        ),
        pytest.param([(s, 9) for s in range(0, 100, 2)], 100, 0.5, id="a-storm-ends-at-the-floor"),
    ],
)
def test_the_ceiling_follows_the_preemption_rate(events: list[tuple[int, int]], second: int, share: float) -> None:
    assert steered(events, until_us=second * S).share == pytest.approx(share)


@pytest.mark.parametrize(
    ("storms", "second", "share"),
    [
        pytest.param([1], 16, 0.855 + 0.05, id="after-the-first-storm-it-rises-fast"),
        pytest.param([1, 41], 56, 0.855 + 0.05, id="fast-into-the-next-it-rises-fast-to-what-was-borne"),
        pytest.param([1, 41], 65, 0.95 * 0.98 + 8.5 * 0.1 / 60, id="and-slowly-beyond"),
        pytest.param(
            [1, 41, 121], 160, 0.95 * 0.96 + 24 * 0.05 / 60, id="half-as-fast-as-often-as-they-come-within-five-minutes"
        ),
        pytest.param([1, 141], 156, 0.855 + 0.05, id="two-minutes-later-it-is-another-storm"),
        pytest.param([1, 41, 401], 416, 0.855 + 0.05, id="five-clean-minutes-are-forgiven"),
    ],
)
def test_a_ceiling_that_rose_into_the_next_storm_rises_slowly(storms: list[int], second: int, share: float) -> None:
    found = steered([(at, 4) for at in storms], until_us=second * S)

    assert found.share == pytest.approx(share, abs=0.002)


@pytest.mark.parametrize(
    ("events", "percent", "share"),
    [
        pytest.param([], 80, 0.8, id="a-lower-top-binds-at-once"),
        pytest.param([], 100, 1.0, id="a-higher-one-too-where-nothing-was-preempted"),
        pytest.param([(1, 4)], 100, 0.95 * 0.9, id="what-preemptions-took-does-not-come-back-by-it"),
        pytest.param([(1, 4)], 80, 0.8, id="nor-does-it-stay-above-the-new-top"),
    ],
)
def test_another_top_for_the_ceiling(events: list[tuple[int, int]], percent: int, share: float) -> None:
    ceiling = steered(events, until_us=8 * S)
    ceiling.configure(percent, 6.0)

    assert ceiling.share == pytest.approx(share)
    for second in range(9, 60):
        ceiling.observe("boot", sum(new for _, new in events), second * S)
    assert ceiling.share == pytest.approx(percent / 100)


def test_where_nobody_was_let_in_a_bad_window_takes_nothing_away() -> None:
    ceiling = Ceiling(95, 6)
    for second in range(21):
        ceiling.observe("boot", 3 * second, second * S, let_in=second <= 5)

    # The first window's crowd goes on preempting for as long as it stays: that says nothing of the ceiling.
    assert ceiling.share == pytest.approx(0.95 * 0.9)


def test_a_restarted_engine_counts_anew_and_never_below_zero() -> None:
    ceiling = Ceiling(95, 6)
    ceiling.observe("first", 100, 0)
    ceiling.observe("second", 2, 1 * S)
    ceiling.observe("second", 1, 2 * S)

    assert ceiling.per_minute(2 * S) == pytest.approx(4)


def test_what_an_engine_preempted_before_the_gate_came_is_not_held_against_it() -> None:
    ceiling = Ceiling(95, 6)
    ceiling.observe("boot", 1_000, 0)
    ceiling.observe("boot", 1_000, 6 * S)

    assert ceiling.share == pytest.approx(0.95)


def test_a_clock_that_went_back_stops_neither_the_fall_nor_the_rise() -> None:
    ceiling = steered([(1, 4)], until_us=6 * S)
    for second in range(3, 60):
        ceiling.observe("boot", 4, (second - 3) * S)
    assert ceiling.share == pytest.approx(0.95)

    ceiling = steered([], until_us=3_600 * S)
    for tick in range(40):
        ceiling.observe("boot", 2 * tick, tick * S // 5)
    assert ceiling.share < 0.95


@given(st.lists(st.tuples(st.integers(-400_000, 400_000), st.integers(0, 5)), max_size=200))
def test_the_ceiling_stays_between_its_floor_and_its_top(moves: list[tuple[int, int]]) -> None:
    ceiling, now_us, total = Ceiling(95, 6), 0, 0
    for elapsed_us, new in moves:
        now_us += elapsed_us
        total += new
        ceiling.observe("boot", total, now_us)
        assert 0.5 <= ceiling.share <= 0.95
