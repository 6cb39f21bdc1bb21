"""The ceiling of KV blocks, as preemptions steer it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
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


STORM = (1, 4)
# With six a minute allowed.
RISE_PER_S = 0.006 / 60


@pytest.mark.parametrize(
    ("events", "second", "share"),
    [
        pytest.param([(1, 2), (8, 1)], 30, 0.95, id="before-any-bad-window-none-lowers-it"),
        pytest.param([STORM, (41, 1)], 41, 0.95 - 0.003, id="after-one-each-preemption-lowers-it"),
        pytest.param([STORM, (41, 4)], 60, 0.95 - 0.012 + 19 * RISE_PER_S, id="more-than-the-limit-too-and-no-further"),
        pytest.param([STORM, (41, 90)], 44, 0.95 - 0.03 + 3 * RISE_PER_S, id="but-not-all-of-a-crowd"),
        pytest.param([STORM, (41, 8), (42, 8)], 44, 0.95 - 0.03 + 2 * RISE_PER_S, id="nor-of-two-in-one-window"),
        pytest.param([STORM, (41, 1)], 61, 0.95 - 0.003 + 20 * RISE_PER_S, id="time-raises-it"),
        pytest.param([STORM, (41, 1)], 120, 0.95, id="no-higher-than-configured"),
        pytest.param(
            [STORM, (41, 4), (47, 4)], 50, 0.9 * (0.926 + 9 * RISE_PER_S), id="a-second-bad-window-is-a-storm"
        ),
        pytest.param(
            [STORM, (41, 4), (47, 4)], 75, 0.95 - 0.024 + 33 * RISE_PER_S, id="after-which-it-rises-to-the-mark"
        ),
        pytest.param([STORM, (16, 4)], 40, 0.895 + 20 * RISE_PER_S, id="a-storm-on-the-way-up-brings-it-down-there"),
        pytest.param([STORM, (6, 9), (15, 4)], 60, 0.95, id="one-that-goes-on-does-not"),
        pytest.param(
            [STORM, (41, 4), (47, 4), (51, 9), (60, 4)], 100, 0.926 + 59 * RISE_PER_S, id="nor-does-a-later-one"
        ),
        pytest.param([STORM, *((at, 1) for at in range(41, 3600, 11))], 3594, 0.5, id="it-has-the-same-floor"),
        pytest.param([STORM, (41, 90), (340, 1)], 342, 0.95 - 0.003, id="within-five-minutes-it-is-remembered"),
        pytest.param([STORM, (41, 90), (347, 1)], 380, 0.95, id="after-five-clean-ones-forgotten"),
    ],
)
def test_what_is_preempted_at_the_mark_lowers_it(events: list[tuple[int, int]], second: int, share: float) -> None:
    assert steered(events, until_us=second * S).share == pytest.approx(share, abs=0.0002)


def test_what_is_preempted_while_nobody_is_let_in_says_nothing_of_the_mark() -> None:
    ceiling = steered([STORM], until_us=40 * S)
    for second in range(41, 60):
        ceiling.observe("boot", 4 + second // 50, second * S, let_in=False)

    assert ceiling.share == pytest.approx(0.95)


def test_a_higher_top_does_not_forget_what_a_load_bears() -> None:
    ceiling = steered([STORM, (41, 90)], until_us=44 * S)
    ceiling.configure(100, 6.0)
    ceiling.observe("boot", 94, 60 * S)

    assert ceiling.share == pytest.approx(0.92 + 19 * RISE_PER_S)


def test_where_few_are_allowed_five_clean_minutes_bring_all_back() -> None:
    events = [STORM, (41, 90)]

    assert steered(events, until_us=340 * S, per_minute=0).share == pytest.approx(0.92)
    assert steered(events, until_us=352 * S, per_minute=0).share == pytest.approx(0.95)


@settings(max_examples=20)
@given(st.floats(0.6, 0.85), st.floats(3, 12))
def test_whatever_share_a_load_bears_it_preempts_a_third_as_often_as_it_may(bears: float, per_minute: float) -> None:
    # Above the share that it bears, one a minute more for each half per cent of the pool.
    ceiling, due, total, counted = Ceiling(95, per_minute), 0.0, 0, 0
    for second in range(7200):
        due += max(0.0, ceiling.share - bears) * 200 / 60
        new, due = int(due), due % 1
        total += new
        counted += new if second >= 3600 else 0
        ceiling.observe("boot", total, second * S)

    assert counted / 60 == pytest.approx(per_minute / 3, rel=0.15)
    assert ceiling.share == pytest.approx(bears + per_minute / 3 / 200, abs=0.01)


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


def test_a_clock_that_went_back_neither_lowers_the_mark_nor_keeps_it_for_ever() -> None:
    ceiling = steered([STORM, *((at, 1) for at in range(41, 3600, 11))], until_us=3594 * S)
    total = 4 + len(range(41, 3600, 11))
    floor = ceiling.share
    ceiling.observe("boot", total, 3591 * S)
    assert ceiling.share >= floor
    for second in range(330):
        ceiling.observe("boot", total, second * S)

    assert ceiling.share == pytest.approx(0.95)


@given(st.lists(st.tuples(st.integers(-400_000, 400_000), st.integers(0, 5)), max_size=200))
def test_the_ceiling_stays_between_its_floor_and_its_top(moves: list[tuple[int, int]]) -> None:
    ceiling, now_us, total = Ceiling(95, 6), 0, 0
    for elapsed_us, new in moves:
        now_us += elapsed_us
        total += new
        ceiling.observe("boot", total, now_us)
        assert 0.5 <= ceiling.share <= 0.95
