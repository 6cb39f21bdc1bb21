"""What was asked of the pod, and what it could still take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config, ready_state
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.estimates.work import Work, total, work_of
from sluice_sidecar.telemetry.demand import HORIZON_US, Demand
from sluice_sidecar.telemetry.headroom import capacity_tokens_per_second

SECOND = 1_000_000


def limits() -> Limits:
    found = Limits.from_state(ready_state(), live_config())
    assert found is not None
    return found


def test_the_work_of_a_call_is_what_is_left_to_compute_and_the_blocks_it_would_hold() -> None:
    work = work_of(Cost((ChoiceCost(100, 50, 40, 64),)), limits())

    assert (work.requests, work.prefill_tokens, work.output_tokens, work.tokens) == (1, 36, 40, 76)
    # 8 blocks at half of its output; 36 tokens at 50 us, 40 steps of a full pod at 10 ms.
    assert work.block_us == 8 * (36 * 50 + 40 * 10_000)


def test_every_choice_is_work() -> None:
    one, three = (work_of(Cost((ChoiceCost(100, 50),) * n), limits()) for n in (1, 3))

    assert (three.requests, three.tokens, three.block_us) == (1, 3 * one.tokens, 3 * one.block_us)


def test_a_piece_of_work_that_is_sent_five_times_is_demanded_once() -> None:
    demand = Demand()
    for attempt in range(4):
        demand.count("shed", Work(1, 100, 10, 500), attempt * SECOND, retry=attempt > 0)
    demand.count("admitted", Work(1, 100, 10, 500), 4 * SECOND, retry=True)

    assert demand.tokens_total == {("shed", "first"): 110, ("shed", "retry"): 330, ("admitted", "retry"): 110}
    assert demand.block_us_total["shed", "first"] == 500
    lately, _ = demand.lately(5 * SECOND)
    assert (lately["shed"].requests, lately["admitted"].requests) == (1, 1)


def test_what_a_storm_sheds_unread_counts_as_what_was_read_before_it() -> None:
    demand = Demand()
    for attempt in range(4):  # one piece of work in four attempts
        demand.count("shed", Work(1, 100, 20, 500), SECOND, retry=attempt > 0)
    for _ in range(400):
        demand.count_unread(SECOND)

    assert demand.tokens_total == {("shed", "first"): 120 + 400 * 30, ("shed", "retry"): 360 + 400 * 90}
    assert demand.block_us_total["shed", "first"] == pytest.approx(500 + 400 * 125, rel=0.01)
    lately, _ = demand.lately(2 * SECOND)
    assert (lately["shed"].requests, lately["shed"].tokens) == (101, 120 + 400 * 30)
    assert total(demand.lately(HORIZON_US + 2 * SECOND)[0].values()).tokens == 0


def test_a_storm_is_taken_for_what_was_read_of_late_and_not_for_long_ago() -> None:
    demand = Demand()
    for _ in range(300):
        demand.count("shed", Work(1, 900, 100, 9_000), SECOND, retry=False)
    for _ in range(250):
        demand.count("shed", Work(1, 90, 10, 700), SECOND, retry=True)
    before = dict(demand.tokens_total)
    demand.count_unread(SECOND)

    assert demand.tokens_total["shed", "first"] == before["shed", "first"]
    assert demand.tokens_total["shed", "retry"] == before["shed", "retry"] + 100
    assert demand.block_us_total["shed", "retry"] == 251 * 700


def test_a_storm_before_anything_was_read_is_no_demand_that_anybody_could_name() -> None:
    demand = Demand()
    demand.count_unread(SECOND)

    assert total(demand.lately(SECOND)[0].values()).tokens == 0


def test_what_was_asked_long_ago_is_no_demand_now() -> None:
    demand = Demand()
    demand.count("shed", Work(1, 100, 10, 500), 0, retry=False)

    assert total(demand.lately(HORIZON_US // 2)[0].values()).tokens == 110
    assert total(demand.lately(HORIZON_US + SECOND)[0].values()).tokens == 0


@pytest.mark.parametrize(
    ("asked_us", "now_us", "span_us"),
    [
        pytest.param(0, 0, 3 * SECOND, id="the-first-moment-is-no-burst-of-millions-a-second"),
        pytest.param(0, 10 * SECOND, 10 * SECOND, id="since-the-first-call"),
        pytest.param(0, 1000 * SECOND, HORIZON_US, id="half-a-minute-at-most"),
    ],
)
def test_rates_are_over_the_time_there_was(asked_us: int, now_us: int, span_us: int) -> None:
    demand = Demand()
    demand.count("admitted", Work(1, 100, 10, 500), asked_us, retry=False)

    assert demand.lately(now_us)[1] == span_us


def capacity(prefill_tokens: int, output_tokens: int, *, blocks: int = 100, of: Limits | None = None) -> int:
    found = of or limits()
    work = work_of(Cost((ChoiceCost(max(1, prefill_tokens), output_tokens),)), found)
    value = capacity_tokens_per_second(found, work, blocks)
    assert value is not None
    return value


def test_without_traffic_nothing_tells_what_a_token_is_here() -> None:
    assert capacity_tokens_per_second(limits(), Work(), 100) is None


def test_answers_alone_come_one_a_request_and_step() -> None:
    # Four at once, 10 ms a step, hardly any prompt.
    assert capacity(1, 400) == pytest.approx(400, rel=0.02)


def test_prompts_alone_are_bounded_by_the_chunk_that_keeps_the_promise() -> None:
    # Beside one decode of 8 ms, 100 ms leave 92 ms: 1,840 tokens, of which the budget takes 511.
    step_s = 0.008 + 511 * 50e-6
    assert capacity(900, 1) == pytest.approx(511 * (1 + 1 / 900) / step_s, rel=0.02)


def test_blocks_bound_how_many_run_at_once() -> None:
    assert capacity(160, 320, blocks=100) > 1.5 * capacity(160, 320, blocks=20)


def test_a_dearer_step_means_less() -> None:
    slow = replace(limits(), decode_curve_us=((1, 16_000), (4, 20_000)), per_prefill_token_ns=100_000)

    assert capacity(100, 100, of=slow) == pytest.approx(capacity(100, 100) / 2, rel=0.02)


@settings(deadline=None)
@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 100), st.integers(0, 100))
@example(237, 1, 30, 15)  # the best batch lies between two points of the curve
def test_more_blocks_never_mean_less(prefill: int, output: int, blocks: int, more: int) -> None:
    assert 0 < capacity(prefill, output, blocks=blocks) <= capacity(prefill, output, blocks=blocks + more)
