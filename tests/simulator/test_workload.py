"""Arrivals: rates, lengths, bursts, replays and contents."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sluice_simulator.lengths import Lengths
from sluice_simulator.traces import Trace
from sluice_simulator.workload import (
    END_TOKEN,
    Arrival,
    Bursts,
    Content,
    Poisson,
    Replay,
    Shape,
    Stage,
    Stages,
    prompt_of,
)

TEN = Lengths(distribution="Fixed", mean=10, least=10, most=10)
SHAPE = Shape(prompt=TEN, output=TEN, max_tokens=None)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_their_name() -> None:
    arrivals = list(Poisson(per_second=20, shape=SHAPE).arrivals(random.Random(1), 1_000_000_000))
    gaps = [b.time_us - a.time_us for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)

    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.05)


def test_bursts_come_when_they_are_due() -> None:
    bursts = Bursts(per_second=2, burst_per_second=50, every_us=10_000_000, lasting_us=1_000_000, shape=SHAPE)

    arrivals = list(bursts.arrivals(random.Random(1), 1_000_000_000))

    inside = [one for one in arrivals if one.time_us % 10_000_000 < 1_000_000]
    assert len(inside) == pytest.approx(50 * 100, rel=0.05)
    assert len(arrivals) - len(inside) == pytest.approx(2 * 900, rel=0.08)


def test_each_stage_has_its_rate_and_the_last_one_holds_on() -> None:
    stages = Stages(
        stages=(Stage(4, 100_000_000), Stage(40, 50_000_000), Stage(0, 10_000_000), Stage(8, 1)), shape=SHAPE
    )

    times = [one.time_us for one in stages.arrivals(random.Random(1), 300_000_000)]

    def count(from_s: int, to_s: int) -> int:
        return sum(from_s * 1_000_000 <= time_us < to_s * 1_000_000 for time_us in times)

    assert times == sorted(times)
    assert count(0, 100) == pytest.approx(400, rel=0.15)
    assert count(100, 150) == pytest.approx(2000, rel=0.08)
    assert count(150, 160) == 0
    assert count(160, 300) == pytest.approx(1120, rel=0.1)


def test_some_clients_leave_at_any_moment() -> None:
    shape = Shape(prompt=TEN, output=TEN, max_tokens=None, abandons_percent=20, abandons_within_us=4_000_000)

    arrivals = list(Poisson(per_second=20, shape=shape).arrivals(random.Random(1), 500_000_000))

    stays_us = [one.leaves_us - one.time_us for one in arrivals if one.leaves_us is not None]
    assert len(stays_us) == pytest.approx(0.2 * len(arrivals), rel=0.1)
    assert sum(stays_us) / len(stays_us) == pytest.approx(2_000_000, rel=0.1)
    assert max(stays_us) < 4_000_000


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(Lengths(distribution="Exponential", mean=500, least=1, most=10_000), id="exponential"),
        pytest.param(Lengths(distribution="LogNormal", mean=500, least=1, most=20_000, sigma=0.8), id="log-normal"),
        pytest.param(Lengths(distribution="Uniform", mean=500, least=1, most=999), id="uniform"),
        pytest.param(Lengths(distribution="Fixed", mean=500, least=500, most=500), id="fixed"),
    ],
)
def test_lengths_have_the_mean_that_was_asked_for(lengths: Lengths) -> None:
    source = random.Random(3)
    drawn = [lengths.draw(source) for _ in range(40_000)]

    assert sum(drawn) / len(drawn) == pytest.approx(500, rel=0.03)
    assert min(drawn) >= lengths.least
    assert max(drawn) <= lengths.most


def trace_of(*times_us: int) -> Trace:
    trace = Trace()
    for time_us in times_us:
        trace.times_us.append(time_us)
        trace.prompts.append(100)
        trace.outputs.append(20)
        trace.lines.append(0)
    return trace


def test_a_replay_takes_its_window_and_its_speed() -> None:
    replay = Replay(trace=trace_of(0, 10, 20, 30, 40), from_us=10, to_us=40, speed_up=2.0)

    assert [one.time_us for one in replay.arrivals(random.Random(0), None)] == [0, 5, 10]
    assert replay.last_us == 15
    assert [one.time_us for one in replay.arrivals(random.Random(0), 10)] == [0, 5]


def test_a_cap_on_output_cuts_what_the_trace_had() -> None:
    (first,) = Replay(trace=trace_of(0), max_tokens=5).arrivals(random.Random(0), None)

    assert (first.output_tokens, first.max_tokens) == (5, 5)


def test_prompts_share_the_tokens_of_a_common_head_and_no_others() -> None:
    def arrival(prompt: int, *heads: int) -> Arrival:
        return Arrival(0, prompt, 1, 1, Content(heads, 4))

    first, second, other = (
        prompt_of(arrival(10, 5, 6), 1),
        prompt_of(arrival(7, 5, 9), 2),
        prompt_of(Arrival(0, 6, 1, 1), 3),
    )

    assert [len(first), len(second), len(other)] == [10, 7, 6]
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])
    assert not set(other) & {*first, *second}
    assert END_TOKEN not in {*first, *second, *other}


def test_a_head_longer_than_the_prompt_is_cut() -> None:
    assert len(prompt_of(Arrival(0, 3, 1, 1, Content((1,), 512)), 1)) == 3


def test_heads_of_two_loads_are_not_the_same_text() -> None:
    assert Content((3,)).of_load(0) != Content((3,)).of_load(1)
