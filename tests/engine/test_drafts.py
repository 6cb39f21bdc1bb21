"""Guesses at what a request says next: what is guessed, when it is computed, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.device import Device, undisturbed
from engine.scripted import make_limits
from engine.test_overlap import Bench, make_request, make_scheduler
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.drafts import Drafts, Lookup, num_accepted
from sluice_engine.core.emissions import Emission
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step import Step
from sluice_engine.core.steptime import PlanningProfile

REPEATS = 2
"""Of so few tokens a text soon repeats itself, and mostly goes on as before."""


def text(*tokens: int) -> Request:
    return Request("A", list(tokens), len(tokens), SamplingParams(max_tokens=100, temperature=0.0), 0)


@pytest.mark.parametrize(
    ("tokens", "most", "guess"),
    [
        pytest.param((1, 2, 3, 9, 8, 7, 1, 2, 3), 2, [9, 8], id="what followed the last three when they came before"),
        pytest.param((1, 2, 3, 9, 1, 2, 3, 5, 1, 2, 3), 4, [5, 1, 2, 3], id="what followed them the last time"),
        pytest.param((1, 2, 3, 4, 5, 6), 4, [], id="nothing where they are new"),
        pytest.param((1, 2), 4, [], id="nothing of a text that is too short"),
        pytest.param((4, 4, 4, 4), 4, [4], id="no further than the text goes"),
    ],
)
def test_a_guess_is(tokens: tuple[int, ...], most: int, guess: list[int]) -> None:
    assert Lookup(text(*tokens)).guess(most) == guess


def test_a_lookup_follows_a_text_that_grows_as_one_that_sees_it_whole() -> None:
    whole = [(i * i) % 5 for i in range(60)]
    growing = text(*whole[:1])
    lookup = Lookup(growing)
    for token in whole[1:]:
        growing.tokens.append(token)
        assert lookup.guess(6) == Lookup(text(*growing.tokens)).guess(6)


def test_a_guess_that_is_not_computed_is_compared_with_what_comes_all_the_same() -> None:
    request = text(1, 2, 3, 9, 1, 2, 3)
    lookup = Lookup(request)
    before = lookup.hit_rate
    assert lookup.guess(2)[0] == 9

    request.tokens.append(9)
    lookup.guess(2)

    assert lookup.hit_rate > before


@pytest.mark.parametrize(
    ("drafts", "sampled", "count"),
    [((1, 2, 3), (1, 2, 3, 4), 3), ((1, 2, 3), (1, 5, 3, 4), 1), ((1, 2), (9, 2, 3), 0), ((), (4,), 0)],
)
def test_drafts_are_kept_up_to_the_first_that_differs(
    drafts: tuple[int, ...], sampled: tuple[int, ...], count: int
) -> None:
    assert num_accepted(drafts, sampled) == count


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_text_that_repeats_takes_fewer_steps_and_is_the_same(depth: int) -> None:
    steps = {}
    for drafts in (0, 5):
        bench = Bench(make_scheduler(depth=depth, drafts=drafts), REPEATS)
        requests = [make_request(str(i), 5 + i, 80, arrival_us=i) for i in range(4)]
        for request in requests:
            bench.scheduler.add(request)
        bench.drain()
        steps[drafts] = bench.scheduler.step
        for request in requests:
            assert request.tokens[request.num_prompt :] == undisturbed(request, REPEATS)
        assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_blocks
    made = bench.scheduler.drafts
    assert made is not None
    assert steps[5] < 0.7 * steps[0]
    assert 0 < made.accepted_total < made.proposed_total


def drafting_plan(bench: Bench) -> StepPlan:
    """Go on until a step with drafts is planned."""
    for _ in range(200):
        plan = bench.plan()
        if plan.draft_tokens:
            return plan
        bench.settle(plan.step)
    raise AssertionError("nothing is guessed")


def alone(max_tokens: int = 80, *, depth: int = 0, prefix: bool = False) -> tuple[Bench, Request]:
    bench = Bench(make_scheduler(depth=depth, drafts=5, prefix=prefix), REPEATS)
    request = make_request("A", 5, max_tokens)
    bench.scheduler.add(request)
    return bench, request


def test_the_tokens_of_one_step_have_one_gap_and_then_none() -> None:
    bench, request = alone()
    plan = drafting_plan(bench)
    (chunk,) = plan.chunks
    bench.now_us += 7000
    known = request.num_tokens

    told = list(bench.settle(plan.step))

    kept = num_accepted(chunk.drafts, request.tokens[known:])
    assert len(told) == request.num_tokens - known == kept + 1
    assert [emission.gap_us for emission in told] == [7000, *[0] * kept]
    assert bench.scheduler.rows.start[chunk.slot] == request.num_tokens - 1


def test_an_end_inside_a_run_of_drafts_ends_it_there_and_counts_no_more() -> None:
    for max_tokens in range(10, 40):
        bench, request = alone(max_tokens)
        bench.drain()
        assert request.num_output == max_tokens
        made = bench.scheduler.drafts
        assert made is not None
        assert made.accepted_total <= max_tokens
        ends = [emission.outcome for emission in bench.told["A"] if emission.outcome is not None]
        assert ends == [Outcome.LENGTH]


def test_no_draft_reaches_beyond_the_last_token_that_may_come() -> None:
    bench, request = alone(12)
    while bench.scheduler.has_work:
        plan = bench.plan()
        for entry in plan.scheduled:
            assert entry.start + entry.num_tokens <= request.peak_tokens
        if not plan.is_empty:
            bench.settle(plan.step)


def test_while_guesses_are_computed_nothing_is_planned() -> None:
    bench, _ = alone(depth=2)
    drafting_plan(bench)

    assert bench.scheduler.must_drain_first() == "drafts"


def test_prefill_comes_before_drafts() -> None:
    bench = Bench(make_scheduler(depth=0, drafts=5, chunk=16, token_budget=17), REPEATS)
    bench.scheduler.add(make_request("A", 5, 80))
    drafting_plan(bench)
    bench.settle(bench.scheduler.step)
    bench.scheduler.add(make_request("B", 200, 4))

    while bench.scheduler.waiting or bench.scheduler.requests["B"].num_output == 0:
        plan = bench.plan()
        assert plan.prefill_tokens <= 16
        if plan.chunks[0].request.id == "B" and not plan.chunks[0].samples:
            assert plan.draft_tokens == 0
        bench.settle(plan.step)


def test_the_budget_of_drafts_bounds_those_of_all() -> None:
    limits = make_limits(block_tokens=4)
    pool = BlockPool(200, 4)
    scheduler = Scheduler(
        limits, pool, PlanningProfile(), max_length_tokens=400, most_drafts=5, budgets={"draft_tokens": 6}
    )
    bench = Bench(scheduler, REPEATS)
    for i in range(4):
        scheduler.add(make_request(str(i), 5 + i, 80, arrival_us=i))
    most = 0
    while scheduler.has_work:
        plan = bench.plan()
        most = max(most, plan.draft_tokens)
        bench.settle(plan.step)

    assert most == 6


def test_without_a_budget_of_drafts_their_room_grows_with_the_requests_that_may_run() -> None:
    few, many = (make_limits(block_tokens=4, max_sequences=most) for most in (1, 4))
    pool = BlockPool(200, 4)
    scheduler = Scheduler(few, pool, PlanningProfile(), max_length_tokens=400, most_drafts=5, num_slots=4)
    scheduler.configure(many, scheduler.policies)
    bench = Bench(scheduler, REPEATS)
    for i in range(4):
        scheduler.add(make_request(str(i), 5 + i, 80, arrival_us=i))
    most = 0
    while scheduler.has_work:
        plan = bench.plan()
        most = max(most, plan.draft_tokens)
        bench.settle(plan.step)

    assert most > 5  # what a single request may have


def test_guesses_leave_a_block_for_everybody_who_may_need_one_next() -> None:
    bench = Bench(make_scheduler(depth=0, num_blocks=20, drafts=5), REPEATS)
    scheduler = bench.scheduler
    for i in range(4):
        scheduler.add(make_request(str(i), 5, 30, arrival_us=i))
    grown = 0
    while scheduler.has_work:
        held = {request.id: len(request.blocks) for request in scheduler.running}
        plan = bench.plan()
        for chunk in plan.chunks:
            needed = max(held.get(chunk.request.id, 0), blocks_for(chunk.start + 1, 4))
            if chunk.drafts and len(chunk.request.blocks) > needed:
                grown += 1
                assert plan.free_blocks_after >= len(scheduler.running)
        if not plan.is_empty:
            bench.settle(plan.step)

    assert grown


def test_a_request_with_penalties_has_no_drafts() -> None:
    bench = Bench(make_scheduler(depth=0, drafts=5), REPEATS)
    bench.scheduler.add(make_request("A", 5, 60, penalty=0.5))
    bench.drain()

    assert bench.scheduler.drafts is not None
    assert bench.scheduler.drafts.proposed_total == 0


def test_no_guess_enters_the_prefix_cache() -> None:
    bench, request = alone(prefix=True)
    bench.drain()
    again = make_request("B", 0, 4)
    again.tokens = [*request.tokens, 7]
    again.num_prompt = len(again.tokens)
    bench.scheduler.add(again)
    bench.drain()

    assert again.num_cached_tokens > request.num_prompt
    assert again.tokens[again.num_prompt :] == undisturbed(again, REPEATS)


class Dear(PlanningProfile):
    """A device on which a chunk's token costs as much as a step."""

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        return 10_000 + 10_000 * prefill_tokens


def test_no_draft_is_computed_where_it_costs_more_than_it_gives() -> None:
    pool = BlockPool(64, 4)
    scheduler = Scheduler(make_limits(), pool, Dear(), max_length_tokens=400, most_drafts=5)
    bench = Bench(scheduler, REPEATS)
    scheduler.add(make_request("A", 5, 80))
    bench.drain()

    assert scheduler.drafts is not None
    assert (scheduler.drafts.proposed_total, scheduler.drafts.pays) == (0, False)


def test_what_steps_with_drafts_really_took_decides_whether_there_are_more() -> None:
    bench, _ = alone(200)
    scheduler = bench.scheduler
    proposed = []
    while scheduler.has_work:
        plan = bench.plan()
        took_us = plan.predicted_us * (20 if plan.draft_tokens else 1)
        scheduler.ran(plan, took_us)
        proposed.append(plan.draft_tokens)
        bench.settle(plan.step)

    half = len(proposed) // 2
    assert any(proposed[:half])
    assert not any(proposed[half:])


def test_what_drafts_cost_is_not_forgotten_while_there_is_nothing_to_guess() -> None:
    bench, _ = alone(200)
    scheduler = bench.scheduler

    def proposed() -> int:
        """Drafts until nobody runs, where a step with any takes twenty times as long as it should."""
        assert scheduler.drafts is not None
        before = scheduler.drafts.proposed_total
        while scheduler.has_work:
            plan = bench.plan()
            scheduler.ran(plan, plan.predicted_us * (20 if plan.draft_tokens else 1))
            bench.settle(plan.step)
        return scheduler.drafts.proposed_total - before

    assert proposed() > 0
    for _ in range(3000):
        assert scheduler.drafts is not None
        scheduler.drafts.schedule(Step(scheduler.step, 0, scheduler.limits, scheduler.budgets), may_run=True)
    scheduler.add(make_request("again", 5, 100))

    assert proposed() == 0


def test_a_step_that_fails_ends_the_request_that_drafts_and_frees_all() -> None:
    bench, request = alone()
    plan = drafting_plan(bench)
    failed = replace(
        bench.results[plan.step], token_ids=bench.results[plan.step].token_ids[:0], failure="out of memory"
    )
    bench.results[plan.step] = failed
    told: list[Emission] = list(bench.settle(plan.step))

    assert [emission.outcome for emission in told] == [Outcome.FAILED]
    assert request.outcome is Outcome.FAILED
    assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_blocks


@pytest.mark.parametrize("row", [0, 1])
def test_logits_that_are_no_numbers_fail_the_request_at_the_token_that_they_were_for(row: int) -> None:
    bench, request = alone()
    plan = drafting_plan(bench)
    known = request.num_tokens
    result = bench.results[plan.step]
    (chunk,) = plan.chunks
    kept = num_accepted(chunk.drafts, result.token_ids)
    bench.results[plan.step] = replace(result, errors={row: "the model's logits are not finite"})

    told = list(bench.settle(plan.step))

    fails = row <= kept
    assert (request.outcome is Outcome.FAILED) is fails
    assert request.num_tokens - known == (row if fails else kept + 1)
    assert len(told) == (row + 1 if fails else kept + 1)


def test_the_record_of_a_step_says_how_many_of_its_tokens_were_guessed() -> None:
    scheduler = make_scheduler(depth=0, drafts=5)
    ticks = iter(range(0, 1 << 62, 1000))
    loop = EngineLoop(scheduler, Device(64, 4, vocab=REPEATS), lambda: next(ticks))
    loop.add(make_request("A", 5, 80))
    while loop.has_work:
        loop.step()

    recorded = sum(share.draft_tokens for step in loop.trace.last(1000) for share in step.scheduled)
    assert isinstance(scheduler.drafts, Drafts)
    assert recorded == scheduler.drafts.proposed_total > 0
