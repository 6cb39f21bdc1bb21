"""What is learned of another engine's steps, and its page in the words of our own engine's state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config
from sluice_engine.core.terms import Terms
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Entry
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.progress import Progress
from sluice_sidecar.engines.assumed import assume_prefilled
from sluice_sidecar.engines.bodies import with_priority, without_priority
from sluice_sidecar.engines.learned import FIRST_BATCH, KEPT_US, Calibration, LearnedSteps
from sluice_sidecar.engines.reading import Facts, Reading
from sluice_sidecar.engines.told import Started, Told

S = 1_000_000
# 2 ms a token of prefill, a step of 20 ms.
CALIBRATION = Calibration(short_tokens=20, short_us=60_000, long_tokens=520, long_us=1_060_000, gap_us=22_000)
FACTS = Facts(model="m", context_tokens=1024)


def reading(**changes: Any) -> Reading:
    base = Reading(
        running=0, waiting=0, kv_tokens=1600, kv_used_tokens=0, block_tokens=16, preemptions_total=0,
        gap_seconds_total=0.0, gaps_total=0, prompt_tokens_total=0, output_tokens_total=0,
    )  # fmt: skip
    return replace(base, **changes)


class Engine:
    """Pages of an engine whose gaps are as they are told to be."""

    def __init__(self, steps: LearnedSteps) -> None:
        self.steps = steps
        self.now_us, self.gaps, self.seconds = 0, 0, 0.0
        steps.observe(reading(), 0)

    def runs(self, requests: int, gap_us: int, gaps: int = 100, *, after_us: int = 200_000) -> None:
        self.now_us += after_us
        self.gaps += gaps
        self.seconds += gaps * gap_us / 1e6
        page = reading(running=requests, gaps_total=self.gaps, gap_seconds_total=self.seconds)
        # Two pages, so that both ends of the window have that many.
        self.steps.observe(replace(page, gaps_total=self.gaps - gaps, gap_seconds_total=None), self.now_us)
        self.steps._last = replace(
            page, gaps_total=self.gaps - gaps, gap_seconds_total=self.seconds - gaps * gap_us / 1e6
        )
        self.steps.observe(page, self.now_us)


def learned(itl_us: int = 100_000, most: int | None = None) -> Engine:
    return Engine(LearnedSteps(CALIBRATION, itl_us, most))


def test_a_calibration_splits_a_step_into_its_parts() -> None:
    assert CALIBRATION.per_token_ns == 2_000_000
    assert CALIBRATION.fixed_us == 20_000


def test_a_long_prompt_that_came_no_later_than_a_short_one_still_costs_something() -> None:
    noisy = replace(CALIBRATION, long_us=50_000)

    assert noisy.per_token_ns == 96_153
    assert 0 <= noisy.fixed_us <= noisy.gap_us


def test_before_anything_was_seen_a_few_may_run() -> None:
    assert learned().steps.max_sequences == FIRST_BATCH


def test_a_promise_that_a_single_request_cannot_keep_lets_one_in() -> None:
    assert learned(itl_us=10_000).steps.max_sequences == 1


def test_another_promise_lets_others_in_at_once() -> None:
    engine = learned(itl_us=10_000)
    engine.steps.configure(100_000)

    assert engine.steps.max_sequences == FIRST_BATCH


def test_the_number_that_may_run_at_most_doubles_with_what_was_seen() -> None:
    engine = learned()
    allowed = []
    for _ in range(4):
        engine.runs(engine.steps.max_sequences, 22_000)
        allowed.append(engine.steps.max_sequences)

    assert allowed == [8, 16, 32, 64]


def test_it_stops_where_the_line_through_what_was_seen_meets_the_promise() -> None:
    engine = learned(itl_us=100_000)
    for requests in (4, 8, 16):
        engine.runs(requests, 20_000 + 2_000 * requests)

    # 1.15 × (20 + 2 b) ms ≤ 100 ms: b ≤ 33.
    assert engine.steps.max_sequences == pytest.approx(32, abs=2)


def test_a_batch_that_broke_the_promise_bounds_the_next() -> None:
    engine = learned(itl_us=100_000)
    engine.runs(8, 40_000)
    engine.runs(32, 160_000)

    assert engine.steps.max_sequences == pytest.approx(8 + (100 - 46) / ((184 - 46) / 24), abs=1.01)


def test_what_a_storm_taught_is_forgotten_after_a_minute() -> None:
    engine = learned(itl_us=100_000)
    engine.runs(8, 40_000)
    engine.runs(32, 160_000)
    narrow = engine.steps.max_sequences
    engine.runs(narrow, 40_000, after_us=KEPT_US + 1)

    assert engine.steps.max_sequences > narrow


def test_what_the_engine_runs_at_most_is_never_exceeded() -> None:
    engine = learned(most=6)
    engine.runs(6, 22_000)

    assert engine.steps.max_sequences == 6


def test_an_engine_that_lets_others_wait_beside_the_same_number_is_full() -> None:
    engine = learned()
    for at_us in (0, S // 2):
        engine.steps.observe(reading(running=3, waiting=2), at_us)
    assert engine.steps.max_sequences == FIRST_BATCH

    engine.steps.observe(reading(running=3, waiting=1), S)
    assert engine.steps.max_sequences == 3

    engine.steps.observe(reading(running=3, waiting=0), S + KEPT_US + 1)
    assert engine.steps.max_sequences == FIRST_BATCH


def test_a_queue_that_moves_on_is_one_of_prefill() -> None:
    engine = learned()
    for running in range(1, 6):
        engine.steps.observe(reading(running=running, waiting=3), running * S)

    assert engine.steps.max_sequences == FIRST_BATCH


def test_a_restart_teaches_nothing() -> None:
    engine = learned()
    engine.runs(4, 22_000)
    before = engine.steps.curve_us
    engine.steps.observe(reading(running=4, gaps_total=10, gap_seconds_total=9.0), engine.now_us + S)

    assert engine.steps.curve_us == before


def test_an_engine_that_tells_no_gaps_keeps_what_was_measured_at_start() -> None:
    engine = learned()
    engine.steps.observe(reading(running=4, gaps_total=None, gap_seconds_total=None), S)
    engine.steps.observe(reading(running=4, gaps_total=None, gap_seconds_total=None), 2 * S)

    assert engine.steps.curve_us == ((1, 22_000),)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1_000, 2_000_000)), max_size=30), st.integers(5_000, 500_000)
)
def test_whatever_is_seen_the_curve_rises_and_someone_may_run(seen: list[tuple[int, int]], itl_us: int) -> None:
    engine = learned(itl_us=itl_us)
    for requests, gap_us in seen:
        engine.runs(requests, gap_us)

    curve = engine.steps.curve_us
    assert list(curve) == sorted(curve)
    assert [gap for _, gap in curve] == sorted(gap for _, gap in curve)
    assert 1 <= engine.steps.max_sequences <= max(FIRST_BATCH, 2 * curve[-1][0])


# ------------------------------------------------------------------------------------------------- the page as a state


def told(**started: int) -> Told:
    return Told("vllm", Started(**started), 2048)


def state(teller: Told, page: Reading, *, inside: tuple[int, ...] = (), facts: Facts = FACTS) -> Any:
    steps = LearnedSteps(CALIBRATION, 100_000, teller.max_sequences(facts))
    return teller.state(facts, page, steps, inside=inside)


def test_a_page_in_the_words_of_a_state() -> None:
    made = state(told(), reading(running=2, waiting=1, kv_used_tokens=170, preemptions_total=5), inside=(60, 60, 60))

    assert (made.engine, made.phase, made.model, made.max_length_tokens) == ("vllm", "ready", "m", 1024)
    assert (made.pool.total_blocks, made.pool.free_blocks, made.pool.block_tokens) == (100, 89, 16)
    assert (made.running_requests, made.waiting_requests, made.preemptions_total) == (2, 1, 5)
    assert (made.derived.max_sequences, made.derived.chunk_ceiling_tokens) == (FIRST_BATCH, 2048)
    assert made.step_cost.per_prefill_token_ns == 2_000_000
    assert made.requests == ()


def test_how_it_was_started_goes_before_what_it_tells() -> None:
    made = state(told(max_sequences=2, kv_tokens=320, chunk_tokens=64), reading())

    assert (made.derived.max_sequences, made.pool.total_blocks, made.derived.chunk_ceiling_tokens) == (2, 20, 64)
    assert made.max_length_tokens == 320, "no request is longer than the whole cache"


def test_an_engine_that_tells_no_usage_holds_what_the_gate_let_in() -> None:
    made = state(told(), reading(kv_used_tokens=None, block_tokens=1, kv_tokens=500), inside=(120,))

    assert made.pool.free_blocks == 380


def test_without_a_size_of_the_cache_there_is_no_state() -> None:
    assert state(told(), reading(kv_tokens=None)) is None


def test_a_page_that_is_the_same_has_the_same_number_and_a_new_process_a_new_boot() -> None:
    teller = told()
    first = state(teller, reading(prompt_tokens_total=10))
    same = state(teller, reading(prompt_tokens_total=10))
    moved = state(teller, reading(prompt_tokens_total=11))
    anew = state(teller, reading(prompt_tokens_total=3))

    assert first.seq == same.seq < moved.seq < anew.seq
    assert first.boot_id == moved.boot_id != anew.boot_id


def test_requests_that_nobody_let_in_are_strangers_once_two_pages_say_so() -> None:
    teller = told()
    page = reading(running=3, kv_used_tokens=500)

    assert state(teller, page, inside=(100,)).requests == ()
    strangers = state(teller, page, inside=(100,)).requests
    assert [(request.id, request.prompt_tokens) for request in strangers] == [("unknown-0", 200), ("unknown-1", 200)]
    assert state(teller, reading(running=1), inside=(100,)).requests == ()


def test_more_in_use_than_was_estimated_stands_beside_the_estimates() -> None:
    teller = told()
    page = reading(running=1, kv_used_tokens=800)

    assert state(teller, page, inside=(160,)).requests == ()
    (excess,) = state(teller, page, inside=(160,)).requests
    assert excess.prompt_tokens == 640
    assert state(teller, reading(running=1, kv_used_tokens=230), inside=(160,)).requests == ()


def inside_for(us: int, *, tokens: int = 0) -> Entry:
    entry = Entry(
        "a", Cost((ChoiceCost(400, 50),)), 0, 0, [Progress(400, 50, 50, 50, output_tokens=tokens)], forwarded_us=0
    )
    limits = Limits.from_state(state(told(), reading()), live_config())
    assert limits is not None
    assume_prefilled([entry], limits, us)
    return entry


@pytest.mark.parametrize(
    ("us", "prefilling"),
    [pytest.param(1_500_000, True, id="not-yet"), pytest.param(1_800_000, False, id="long-enough")],
)
def test_a_prompt_that_shows_no_token_is_taken_as_computed_after_a_while(us: int, *, prefilling: bool) -> None:
    # 400 tokens at 2 ms and a step: 0.85 s, twice.
    assert inside_for(us).choices[0].prefilling is prefilling


def test_what_has_shown_tokens_is_left_as_it_is() -> None:
    assert inside_for(9 * S, tokens=3).choices[0].computed_tokens == 0


# -------------------------------------------------------------------------------------------------------- a priority


BATCH = Terms(service_class="batch")


@pytest.mark.parametrize(
    ("body", "sign", "priority"),
    [
        pytest.param('{"prompt": "a"}', 1, 6, id="small-numbers-first"),
        pytest.param('{"prompt": "a"}', -1, -6, id="large-numbers-first"),
        pytest.param('{"prompt": "a", "priority": 5}', 1, 7, id="asked-to-be-behind-its-own"),
        pytest.param('{"prompt": "a", "priority": -5}', 1, 6, id="nobody-leaves-its-class"),
        pytest.param('{"prompt": "a", "\\u0070riority": -5}', 1, 6, id="nor-by-another-spelling"),
        pytest.param('{"prompt": {} }', 1, 6, id="an-empty-field-at-the-end"),
        pytest.param('{"prompt": "say \\"priority\\""}', 1, 6, id="the-word-in-a-text"),
        pytest.param("{}", 1, 6, id="an-empty-body"),
        pytest.param(' { "prompt": "ä" }', -1, -6, id="spaces"),
        pytest.param('{"prompt": "a", "priority": null}', 1, 6, id="null"),
    ],
)
def test_a_priority_is_written_in_the_engines_own_sign(body: str, sign: int, priority: int) -> None:
    written = json.loads(with_priority(body.encode(), BATCH, sign))

    assert written.pop("priority") == priority
    asked = json.loads(body)
    asked.pop("priority", None)
    assert written == asked


def test_a_priority_of_a_wrong_type_is_left_for_the_engine_to_refuse() -> None:
    body = b'{"priority": "high"}'

    assert with_priority(body, BATCH, 1) is body


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        pytest.param(b'{"prompt":"a"}', b'{"prompt":"a"}', id="nothing-to-take-out"),
        pytest.param(b'{"prompt":"\\"priority\\""}', b'{"prompt":"\\"priority\\""}', id="the-word-in-a-text"),
        pytest.param(b'{"prompt":"a","priority":3}', b'{"prompt": "a"}', id="taken-out"),
    ],
)
def test_a_priority_is_taken_out_for_an_engine_that_would_refuse_it(body: bytes, kept: bytes) -> None:
    assert without_priority(body) == kept
