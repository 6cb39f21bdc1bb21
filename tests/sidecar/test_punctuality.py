"""How much of the promise is given away, by how many first tokens came late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_sidecar.capacity.punctuality import FLOOR, Punctuality

S = 1_000_000


def after(outcomes: list[tuple[float, float, bool]], until_s: float, target_percent: int = 99) -> Punctuality:
    """`outcomes`: (let in at, first token at, whether that is late), in seconds; looked at five times a second."""
    found = Punctuality(target_percent)
    pending = sorted(outcomes, key=lambda one: one[1])
    for tick in range(int(until_s * 5) + 1):
        while pending and pending[0][1] * 5 <= tick:
            admitted_s, at_s, late = pending.pop(0)
            found.told(int(admitted_s * S), int(at_s * S), late=late)
        found.moved(tick * S // 5)
    return found


def late(count: int, at_s: float, admitted_s: float | None = None) -> list[tuple[float, float, bool]]:
    return [(at_s - 1 if admitted_s is None else admitted_s, at_s, True)] * count


@pytest.mark.parametrize(
    ("outcomes", "until_s", "share"),
    [
        pytest.param(late(2, 5), 6, 1.0, id="two-are-chance"),
        pytest.param(late(3, 5), 6, 0.8, id="three-are-too-many"),
        pytest.param([(1, 2, False)] * 400 + late(3, 5), 6, 1.0, id="not-among-four-hundred"),
        pytest.param([(1, 2, False)] * 400 + late(3, 40), 41, 0.8, id="nor-of-half-a-minute-ago"),
        pytest.param(
            late(3, 5) + late(9, 6, admitted_s=4.5), 7, 0.8, id="who-was-let-in-before-the-fall-counts-no-more"
        ),
        pytest.param(late(3, 5) + late(3, 7), 8, 0.64, id="who-was-let-in-after-it-does"),
        pytest.param(late(3, 5), 16, 0.85, id="it-rises-once-ten-seconds-were-clean"),
        pytest.param(late(3, 5) + late(1, 14), 16, 0.8, id="and-one-that-is-late-stops-that"),
        pytest.param(late(3, 5), 60, 1.0, id="to-all-of-the-promise"),
        pytest.param(late(3, 5) + late(3, 40), 55, 0.8 + 5 * 0.1 / 60, id="slowly-where-that-brought-the-next"),
        pytest.param(late(3, 5) + late(3, 140), 151, 0.85, id="fast-where-it-was-long-ago"),
    ],
)
def test_the_share_of_the_promise_follows_who_came_late(
    outcomes: list[tuple[float, float, bool]], until_s: float, share: float
) -> None:
    assert after(outcomes, until_s).share == pytest.approx(share, abs=0.015)


def test_a_promise_for_fewer_bears_more_that_are_late() -> None:
    outcomes = [(1.0, 2.0, False)] * 95 + late(6, 5)
    assert after(outcomes, 6, target_percent=99).share == pytest.approx(0.8)
    assert after(outcomes, 6, target_percent=90).share == 1.0


@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 20), st.booleans()), max_size=100))
def test_it_stays_between_its_floor_and_the_whole_promise(moves: list[tuple[int, int, bool]]) -> None:
    found, now_us = Punctuality(99), 0
    for elapsed_us, count, is_late in moves:
        now_us += elapsed_us
        for _ in range(count):
            found.told(now_us, now_us + 1, late=is_late)
        found.moved(now_us)
        assert FLOOR <= found.share <= 1.0
