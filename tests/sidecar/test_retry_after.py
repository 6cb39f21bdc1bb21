from __future__ import annotations

import random

import pytest

from sluice_sidecar.retries.retry_after import LEAST_US, MOST_US, RetryAfter

S = 1_000_000


def seeded() -> RetryAfter:
    return RetryAfter(random.Random(5).randint)


def per_second(count: int) -> int:
    """Ten are let in each second."""
    return count * S // 10


def test_while_the_drain_is_unmeasured_no_time_is_named() -> None:
    assert seeded().delay_us(None, per_second, 0) is None


@pytest.mark.parametrize(("wait_us", "lo_us"), [(0, S), (7 * S, 7 * S), (90 * S, 20 * S)])
def test_nobody_comes_back_before_the_wait_nor_later_than_clients_honour(wait_us: int, lo_us: int) -> None:
    after = seeded()

    delays = [after.delay_us(wait_us, per_second, 0) or 0 for _ in range(500)]

    assert min(delays) >= lo_us
    assert max(delays) <= MOST_US


@pytest.mark.parametrize("crowd", [20, 100, 200])
@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_refused_at_once_comes_back_evenly(crowd: int, seed: int) -> None:
    after = RetryAfter(random.Random(seed).randint)

    back = sorted(after.delay_us(0, per_second, 0) or 0 for _ in range(crowd))

    span_s = (back[-1] - back[0]) / S
    most = max(sum(1 for other in back if start <= other < start + S) for start in back)
    assert most <= 2 * crowd / max(1.0, span_s)


def test_a_storm_comes_back_evenly_too() -> None:
    after = seeded()
    back = []

    for index in range(2_000):
        now_us = index * 50_000  # twenty refused each second, of whom ten could be let in
        back.append(now_us + (after.delay_us(2 * S, per_second, now_us) or 0))

    seconds = [at // S for at in back if 40 * S <= at < 100 * S]
    counts = [seconds.count(second) for second in range(40, 100)]
    assert max(counts) <= 2 * sum(counts) / len(counts)


def test_the_crowd_is_those_who_are_still_to_come() -> None:
    after = seeded()
    for _ in range(50):
        after.delay_us(0, per_second, 0)

    assert after.crowd(0) == 50
    assert 0 < after.crowd(3 * S) < 50
    assert after.crowd(40 * S) == 0


def test_a_storm_is_remembered_in_bounded_memory() -> None:
    after = seeded()

    for index in range(20_000):
        after.delay_us(0, per_second, index * 500)

    assert len(after._slots) <= (MOST_US + LEAST_US) // 250_000
