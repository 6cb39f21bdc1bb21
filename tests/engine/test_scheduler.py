"""The scheduler, step by step and under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scripted import (
    SampledToken,
    ScriptedRunner,
    check_invariants,
    make_limits,
    make_loop,
    make_request,
    make_scheduler,
    position_token,
    result_of,
)
from sluice_engine.core.emissions import Emission, Emissions
from sluice_engine.core.loop import EngineLoop, RunnerFailed
from sluice_engine.core.plan import ScheduledRequest, StepPlan, StepResult
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile


def contents(plan: StepPlan) -> dict[str, int]:
    return {entry.request.id: entry.num_tokens for entry in plan.scheduled}


def run(scheduler: Scheduler, *requests: Request, limit: int = 10_000) -> list[StepPlan]:
    """Add the requests, run to the end, return the plans."""
    loop = make_loop(scheduler)
    for request in requests:
        assert loop.add(request) is None
    for _ in range(limit):
        if not loop.has_work:
            break
        loop.step()
        check_invariants(scheduler)
    assert not loop.has_work
    assert isinstance(loop.runner, ScriptedRunner)
    return loop.runner.plans


def test_the_worked_example_keeps_a_decode_slot_while_a_long_prompt_goes_in_chunks() -> None:
    scheduler = make_scheduler(make_limits(token_budget=16, chunk=16, per_request=8))

    plans = run(scheduler, make_request("A", 24, 4), make_request("B", 4, 8, arrival_us=1))

    assert [contents(plan) for plan in plans[:3]] == [{"A": 8, "B": 4}, {"B": 1, "A": 8}, {"B": 1, "A": 8}]


def test_the_practice_needs_what_the_text_says() -> None:
    needs = {
        name: make_request(name, p, o).peak_tokens
        for name, p, o in [("A", 24, 4), ("B", 4, 8), ("C", 8, 4), ("D", 20, 2)]
    }

    assert needs == {"A": 27, "B": 11, "C": 11, "D": 21}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "refused"),
    [
        pytest.param(200, 57, False, id="fills-the-pool-to-the-last-token"),
        pytest.param(200, 58, True, id="one-token-more-than-the-pool"),
        pytest.param(50, 51, False, id="far-below"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt: int, max_tokens: int, refused: bool) -> None:  # noqa: FBT001
    scheduler = make_scheduler(num_blocks=64)

    reason = scheduler.add(make_request("A", prompt, max_tokens))

    assert (reason is not None) is refused
    assert len(scheduler.waiting) == (0 if refused else 1)


def test_a_prompt_over_the_context_length_is_refused_with_both_numbers() -> None:
    reason = make_scheduler(max_length=100).add(make_request("A", 90, 20))

    assert reason is not None
    assert "110" in reason
    assert "100" in reason


def test_prefill_beside_decodes_stays_within_the_derived_ceiling() -> None:
    limits = make_limits(token_budget=100_000, block_tokens=16)
    scheduler = make_scheduler(limits, num_blocks=2000, max_length=30_000)

    plans = run(scheduler, make_request("B", 4, 8), make_request("A", 12_000, 2, arrival_us=1))

    beside_decodes = [plan.prefill_tokens for plan in plans if plan.decode_requests and plan.prefill_tokens]
    assert plans[0].prefill_tokens == 12_004, "nothing decodes in the first step, so the token budget alone binds"
    assert all(tokens <= 3428 for tokens in beside_decodes)


def test_a_long_prompt_arriving_late_never_breaks_the_ceiling() -> None:
    limits = make_limits(token_budget=100_000, block_tokens=16)
    scheduler = make_scheduler(limits, num_blocks=2000, max_length=30_000)
    loop = make_loop(scheduler)
    loop.add(make_request("B", 4, 40))
    loop.step()
    loop.add(make_request("A", 12_000, 2, arrival_us=1))

    while loop.has_work:
        loop.step()

    assert isinstance(loop.runner, ScriptedRunner)
    chunks = [plan.prefill_tokens for plan in loop.runner.plans[1:] if plan.prefill_tokens]
    assert chunks == [3428, 3428, 3428, 1716]


class Deep(PlanningProfile):
    """The planning profile, and 10 ns a prior pair."""

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        return super().predict_us(decode_requests, prefill_tokens, context_tokens) + prior_pairs // 100


def test_chunks_shrink_with_their_depth_so_that_each_step_keeps_the_promise() -> None:
    limits = make_limits(token_budget=100_000, block_tokens=16, times=Deep())
    scheduler = make_scheduler(limits, num_blocks=2000, max_length=30_000, times=Deep())
    loop = make_loop(scheduler)
    loop.add(make_request("B", 4, 400))
    loop.step()
    loop.add(make_request("A", 12_000, 2, arrival_us=1))
    loop.add(make_request("C", 600, 2, arrival_us=2))

    while loop.has_work:
        loop.step()

    assert isinstance(loop.runner, ScriptedRunner)
    mixed = [plan for plan in loop.runner.plans[1:] if plan.prefill_tokens]
    chunks = [plan.prefill_tokens for plan in mixed]
    assert all(plan.predicted_us <= 150_000 for plan in mixed)
    assert all(plan.predicted_us > 149_000 for plan in mixed[:-2]), "and uses it up"
    assert chunks[0] == 3428
    assert chunks == sorted(chunks, reverse=True), "deeper is smaller"


def test_a_chunk_that_is_set_binds_in_every_step_also_when_nothing_decodes() -> None:
    plans = run(make_scheduler(make_limits(chunk=7)), make_request("A", 20, 2))

    assert [plan.prefill_tokens for plan in plans] == [7, 7, 6, 0]


def test_entry_waits_for_room_for_the_whole_known_input() -> None:
    scheduler = make_scheduler(num_blocks=10)
    loop = make_loop(scheduler)
    loop.add(make_request("A", 24, 8))
    loop.step()
    loop.add(make_request("B", 20, 4, arrival_us=1))

    loop.step()

    assert [r.id for r in scheduler.running] == ["A"]
    assert loop.last_plan is not None
    assert loop.last_plan.waiting_reasons == (("no_free_blocks", 1),)


def test_the_slot_limit_holds_and_is_named() -> None:
    scheduler = make_scheduler(make_limits(max_sequences=1))
    loop = make_loop(scheduler)
    loop.add(make_request("A", 4, 4))
    loop.add(make_request("B", 4, 4, arrival_us=1))

    loop.step()

    assert loop.last_plan is not None
    assert loop.last_plan.waiting_reasons == (("no_free_slots", 1),)


def test_when_blocks_run_out_the_one_with_least_computed_gives_way_and_returns_to_its_place() -> None:
    scheduler = make_scheduler(num_blocks=4)  # 16 tokens
    loop = make_loop(scheduler)
    old, young, later = (
        make_request("A", 8, 8),
        make_request("B", 6, 8, arrival_us=1),
        make_request("C", 8, 4, arrival_us=2),
    )
    for request in (old, young, later):
        loop.add(request)
    while not scheduler.preemptions_total:
        loop.step()
        check_invariants(scheduler)

    assert (young.num_preemptions, young.incarnation) == (1, 1)
    assert next(scheduler.waiting.candidates(0)) is young, "ahead of C, which came later"
    assert loop.last_plan is not None
    (preemption,) = loop.last_plan.preempted
    assert preemption.beneficiary_id == "A"
    assert preemption.recompute_us > 0
    assert not loop.last_plan.prefill_tokens, "nobody enters in a step that preempted"


def test_entry_stays_shut_after_a_preemption_until_somebody_leaves_or_the_victim_fits_with_headroom() -> None:
    scheduler = make_scheduler(num_blocks=5)
    loop = make_loop(scheduler)
    loop.add(make_request("A", 8, 12))
    loop.add(make_request("B", 7, 12, arrival_us=1))
    while not scheduler.preemptions_total:
        loop.step()
    loop.add(make_request("C", 1, 1, arrival_us=2))

    loop.step()

    assert loop.last_plan is not None
    assert dict(loop.last_plan.waiting_reasons) == {"entry_latched": 2}
    assert [r.id for r in scheduler.running] == ["A"]


def test_a_shut_entry_reopens_when_anybody_leaves() -> None:
    scheduler = make_scheduler()
    loop = make_loop(scheduler)
    loop.add(make_request("A", 4, 3))
    loop.step()
    scheduler._ladder.latched_for = 10_000
    loop.add(make_request("B", 4, 3, arrival_us=1))
    loop.step()
    assert loop.last_plan is not None
    assert loop.last_plan.waiting_reasons == (("entry_latched", 1),)

    loop.step()  # A's last
    loop.step()

    assert [request.id for request in scheduler.running] == ["B"]


def test_a_preempted_run_gives_the_same_tokens_as_an_undisturbed_one() -> None:
    def tokens(num_blocks: int) -> tuple[dict[str, list[int]], int]:
        scheduler = make_scheduler(num_blocks=num_blocks)
        requests = [make_request(str(i), 5 + i, 12, arrival_us=i) for i in range(6)]
        run(scheduler, *requests)
        return {r.id: r.tokens for r in requests}, scheduler.preemptions_total

    squeezed, preemptions = tokens(10)
    assert preemptions > 0
    assert squeezed == tokens(64)[0]


def test_what_a_victim_had_taken_in_this_step_goes_back() -> None:
    """A is older, so it is scheduled first; B then needs a block and A has least to lose."""
    scheduler = make_scheduler(num_blocks=6)
    loop = make_loop(scheduler)
    loop.add(make_request("A", 2, 12))
    loop.add(make_request("B", 16, 8, arrival_us=1))
    while not scheduler.preemptions_total:
        loop.step()

    plan = loop.last_plan
    assert plan is not None
    assert [p.request_id for p in plan.preempted] == ["A"]
    assert contents(plan) == {"B": 1}
    assert (plan.decode_requests, plan.prefill_tokens) == (1, 0)
    assert (plan.tokens_left, plan.context_tokens) == (scheduler.limits.token_budget - 1, plan.scheduled[0].start + 1)


@pytest.mark.parametrize("leave", [True, False], ids=["it-left-meanwhile", "it-runs-in-another-incarnation"])
def test_a_result_that_comes_late_is_counted_and_never_applied(leave: bool) -> None:  # noqa: FBT001
    scheduler = make_scheduler()
    request = make_request("A", 4, 4)
    scheduler.add(request)
    plan = scheduler.schedule(0)
    if leave:
        scheduler.end("A", Outcome.ABORTED)
    else:
        request.incarnation += 1

    emissions = scheduler.update(result_of(plan, [SampledToken(5)]), 0)

    assert (list(emissions), request.num_output, scheduler.stale_results_total) == ([], 0, 1)


def test_a_stop_token_ends_a_request_and_is_not_delivered() -> None:
    scheduler = make_scheduler()
    loop = make_loop(scheduler, lambda _entry: SampledToken(7))
    loop.add(make_request("A", 4, 9, stop=frozenset({7})))

    (emission,) = loop.step()

    assert (emission.token_id, emission.outcome) == (None, Outcome.STOP)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_max_tokens_ends_a_request_after_exactly_that_many() -> None:
    request = make_request("A", 4, 3)
    plans = run(make_scheduler(), request)

    assert request.num_output == 3
    assert request.outcome is Outcome.LENGTH
    assert len(plans) == 3, "no step is spent on a token that length alone proves useless"


def test_one_bad_row_fails_alone() -> None:
    def script(entry: ScheduledRequest) -> SampledToken:
        if entry.request.id == "A":
            return SampledToken(0, error="logits are not finite")
        return position_token(entry)

    scheduler = make_scheduler()
    loop = make_loop(scheduler, script)
    bad, good = make_request("A", 4, 3), make_request("B", 4, 3)
    loop.add(bad)
    loop.add(good)
    while loop.has_work:
        loop.step()

    assert (bad.outcome, bad.error) == (Outcome.FAILED, "logits are not finite")
    assert (good.outcome, good.num_output) == (Outcome.LENGTH, 3)


class _Broken:
    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.inner = ScriptedRunner(4)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.failures:
            self.failures -= 1
            raise MemoryError("device out of memory")
        return self.inner.execute(plan)


def test_a_step_that_fails_ends_its_requests_and_the_loop_goes_on() -> None:
    scheduler = make_scheduler(make_limits(max_sequences=1))
    loop = EngineLoop(scheduler, _Broken(1), lambda: 0)
    first, second = make_request("A", 4, 2), make_request("B", 4, 2, arrival_us=1)
    loop.add(first)
    loop.add(second)
    while loop.has_work:
        loop.step()

    assert first.outcome is Outcome.FAILED
    assert first.error is not None
    assert "device out of memory" in first.error
    assert second.outcome is Outcome.LENGTH
    assert loop.failed_steps_total == 1
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_runner_that_fails_over_and_over_ends_the_loop_and_loses_no_ending() -> None:
    scheduler = make_scheduler(make_limits(max_sequences=1))
    loop = EngineLoop(scheduler, _Broken(99), lambda: 0)
    for i in range(3):
        loop.add(make_request(str(i), 4, 2, arrival_us=i))
    loop.step()
    loop.step()

    with pytest.raises(RunnerFailed) as raised:
        loop.step()

    assert [emission.outcome for emission in raised.value.emissions] == [Outcome.FAILED]


def test_an_idle_step_says_that_there_is_nothing_to_do() -> None:
    plan = make_scheduler().schedule(0)

    assert (plan.scheduled, plan.idle_reason) == ((), "no_requests")


def test_a_step_that_outlives_every_excuse_is_hung() -> None:
    loop = make_loop(make_scheduler())
    loop.step_started_us, loop.step_predicted_us = 1_000_000, 900_000

    assert not loop.hung(18_900_000)
    assert loop.hung(19_100_001), "20 × predicted is 18 s"


class Machine(RuleBasedStateMachine):
    """Any order of adding, aborting and stepping, under any budgets."""

    @initialize(
        num_blocks=st.integers(2, 24),
        block_tokens=st.sampled_from([1, 4, 16]),
        max_sequences=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk=st.none() | st.integers(1, 20),
        per_request=st.none() | st.integers(1, 10),
        promise_ms=st.sampled_from([10, 31, 150]),
    )
    def start(
        self,
        num_blocks: int,
        block_tokens: int,
        max_sequences: int,
        token_budget: int,
        chunk: int | None,
        per_request: int | None,
        promise_ms: int,
    ) -> None:
        self.limits = make_limits(
            max_sequences=max_sequences,
            token_budget=token_budget,
            chunk=chunk,
            per_request=per_request,
            block_tokens=block_tokens,
            promise_us=promise_ms * 1000,
        )
        self.scheduler = make_scheduler(self.limits, num_blocks=num_blocks, max_length=400)
        self.loop = make_loop(self.scheduler)
        self.all: list[Request] = []
        self.told: dict[str, list[Emission]] = {}

    def hear(self, emissions: Emissions) -> None:
        for emission in emissions:
            self.told.setdefault(emission.request.id, []).append(emission)

    @rule(prompt=st.integers(1, 120), max_tokens=st.integers(1, 40), at=st.integers(0, 5))
    def add(self, prompt: int, max_tokens: int, at: int) -> None:
        request = make_request(str(len(self.all)), prompt, max_tokens, arrival_us=at)
        fits = request.peak_tokens <= self.scheduler.pool.num_tokens and prompt + max_tokens <= 400
        assert (self.loop.add(request) is None) is fits
        if fits:
            self.all.append(request)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.all))
        self.hear(self.loop.abort(request.id))

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.hear(self.loop.step())
            self.check_plan()

    def check_plan(self) -> None:
        plan = self.loop.last_plan
        if plan is None:
            return
        assert plan.num_tokens <= self.limits.token_budget
        assert plan.tokens_left == self.limits.token_budget - plan.num_tokens
        assert plan.num_tokens == plan.decode_requests + plan.prefill_tokens
        if self.limits.prefill_chunk_tokens is not None:
            assert plan.prefill_tokens <= self.limits.prefill_chunk_tokens
        elif plan.decode_requests:
            ceiling = self.limits.ceiling(plan.decode_requests, 0)
            assert plan.prefill_tokens <= max(ceiling, self.limits.block_tokens)
        if plan.preempted:
            assert all(entry.start > 0 for entry in plan.scheduled), "nobody entered"
        assert plan.scheduled or plan.idle_reason is not None

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            check_invariants(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        work = sum(r.num_tokens + r.sampling.max_tokens for r in self.all)
        for _ in range(work * 12 + 50):
            if not self.loop.has_work:
                break
            self.hear(self.loop.step())
            self.check_plan()
        assert not self.loop.has_work, "everything drains"
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        for request in self.all:
            emissions = self.told[request.id]
            assert [e.outcome is not None for e in emissions].count(True) == 1, "ends exactly once"
            assert emissions[-1].outcome is request.outcome
            delivered = [e.token_id for e in emissions if e.token_id is not None]
            assert delivered == request.tokens[request.num_prompt :], "no token twice, none lost"
            if request.outcome is Outcome.LENGTH:
                assert request.num_output == request.sampling.max_tokens
            assert request.outcome in {Outcome.LENGTH, Outcome.ABORTED}


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
