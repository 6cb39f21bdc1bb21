"""Steps planned before earlier ones are settled: the same tokens, nothing twice, nothing lost, no block too early."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.device import FIRST_TOKEN, VOCAB, Device, undisturbed
from engine.scripted import check_invariants, make_limits
from sluice_engine.config import Policy, VictimPolicy
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.emissions import Emission, Emissions
from sluice_engine.core.host_pool import HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile
from sluice_engine.core.suspension import SwapSpace

STOPS = frozenset(range(FIRST_TOKEN, FIRST_TOKEN + VOCAB, 11))


def make_request(
    name: str,
    prompt: int,
    max_tokens: int,
    *,
    arrival_us: int = 0,
    stops: bool = False,
    penalty: float = 0.0,
    priority: int = 4,
    tenant: str = "",
    first_us: int | None = None,
    finish_us: int | None = None,
    shared: int = 0,
) -> Request:
    own = [(sum(name.encode()) * 7 + i * 3) % 500 for i in range(prompt)]
    tokens = [i % 50 for i in range(min(shared, prompt))] + own[min(shared, prompt) :]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        stop_token_ids=STOPS if stops else frozenset(),
        frequency_penalty=penalty,
    )
    return Request(
        name,
        tokens,
        prompt,
        sampling,
        arrival_us,
        priority=priority,
        tenant=tenant,
        first_token_deadline_us=first_us,
        finish_deadline_us=finish_us,
    )


def make_scheduler(
    *,
    depth: int,
    num_blocks: int = 64,
    block_tokens: int = 4,
    policy: Policy = "FirstComeFirstServed",
    prefix: bool = False,
    victim: VictimPolicy = "LeastComputed",
    host_blocks: int = 0,
    drafts: int = 0,
    **limits: int | None,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_tokens)
    times = PlanningProfile()
    return Scheduler(
        make_limits(block_tokens=block_tokens, **limits),  # type: ignore[arg-type]  # a table of keywords
        pool,
        times,
        max_length_tokens=400,
        policies=Policies(order=policy, fairness_unit="KVByteSeconds", victim=victim),
        prefix=PrefixCache(pool, enabled=prefix),
        space=SwapSpace(HostPool(host_blocks, block_tokens), Link(0, 1000, 1000)),
        depth=depth,
        most_drafts=drafts,
    )


class Bench:
    """A scheduler and a device, with results held back until somebody asks for them."""

    def __init__(self, scheduler: Scheduler, vocab: int = VOCAB) -> None:
        self.scheduler = scheduler
        pool = scheduler.pool
        self.device = Device(pool.num_blocks, pool.block_tokens, told_when_settled=True, vocab=vocab)
        self.now_us = 0
        self.results: dict[int, StepResult] = {}
        self.told: dict[str, list[Emission]] = {}

    def hear(self, emissions: Emissions) -> None:
        for emission in emissions:
            self.told.setdefault(emission.request.id, []).append(emission)

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now_us)
        self.hear(Emissions([Emission(request, outcome=request.outcome) for request in plan.expired]))
        if not plan.is_empty:
            self.results[plan.step] = self.device.execute(plan)
        return plan

    def settle(self, step: int) -> Emissions:
        in_flight = set(self.scheduler.window.steps())
        emissions = self.scheduler.update(self.results.pop(step), self.now_us)
        for settled in in_flight - set(self.scheduler.window.steps()):
            self.device.settled(settled)
        self.hear(emissions)
        return emissions

    def end(self, request: Request) -> None:
        if self.scheduler.end(request.id, Outcome.ABORTED) is not None:
            self.hear(Emissions([Emission(request, outcome=Outcome.ABORTED)]))

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            plan = self.plan() if self.scheduler.must_drain_first() is None else None
            if self.results and (plan is None or plan.is_empty or self.scheduler.must_drain_first() is not None):
                self.settle(min(self.results))
        raise AssertionError("it does not drain")


def run(scheduler: Scheduler, *requests: Request) -> Bench:
    bench = Bench(scheduler)
    for request in requests:
        assert scheduler.add(request) is None
    bench.drain()
    return bench


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "host_blocks"), [(12, 0), (12, 40), (64, 0)], ids=["with-preemptions", "with-swaps", "with-room"]
)
def test_the_same_tokens_whatever_the_depth(depth: int, num_blocks: int, host_blocks: int) -> None:
    scheduler = make_scheduler(depth=depth, num_blocks=num_blocks, host_blocks=host_blocks)
    requests = [make_request(str(i), 5 + i, 14, arrival_us=i, stops=i % 2 == 0) for i in range(8)]

    run(scheduler, *requests)

    for request in requests:
        assert request.tokens[request.num_prompt :] == undisturbed(request)
    assert (scheduler.preemptions_total > 0) is (num_blocks == 12)
    assert (scheduler.suspension.host.swaps_total > 0) is (host_blocks > 0)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_is_planned_while_its_last_token_is_in_flight(depth: int) -> None:
    bench = Bench(make_scheduler(depth=depth))
    bench.scheduler.add(make_request("A", 4, 9))

    plans = [bench.plan() for _ in range(depth + 1)]

    assert [plan.num_tokens for plan in plans] == [4] + [1] * depth
    assert [plan.decode_starts.tolist() for plan in plans[1:]] == [[4], [5]][:depth]
    assert bench.scheduler.must_drain_first() == "window_full"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_step_is_planned_that_length_alone_proves_useless(depth: int) -> None:
    scheduler = make_scheduler(depth=depth)
    request = make_request("A", 4, 3)

    run(scheduler, request)

    assert request.num_output == 3
    assert scheduler.step == 3


def test_a_stop_that_is_seen_late_wastes_one_token_and_delivers_none_of_it() -> None:
    bench = Bench(make_scheduler(depth=1))
    request = make_request("A", 4, 200, stops=True)
    bench.scheduler.add(request)

    bench.drain()

    told = [emission.token_id for emission in bench.told["A"]]
    assert told == [*undisturbed(request)[:-1], None]
    assert bench.told["A"][-1].outcome is Outcome.STOP
    assert bench.scheduler.stale_results_total == 1


def test_blocks_of_a_request_that_ends_in_flight_wait_for_the_step_that_may_write_them() -> None:
    bench = Bench(make_scheduler(depth=1, num_blocks=4))
    request = make_request("A", 8, 4)
    bench.scheduler.add(request)
    first, second = bench.plan(), bench.plan()
    bench.end(request)
    pool = bench.scheduler.pool

    assert (pool.num_free, pool.num_fenced) == (1, 3)
    bench.settle(first.step)
    assert (pool.num_free, pool.num_fenced) == (1, 3)
    bench.settle(second.step)
    assert (pool.num_free, pool.num_fenced) == (4, 0)


def test_results_that_come_in_another_order_are_settled_in_the_order_of_plans() -> None:
    bench = Bench(make_scheduler(depth=2))
    request = make_request("A", 4, 9)
    bench.scheduler.add(request)
    first, second, third = (bench.plan() for _ in range(3))

    assert not len(bench.settle(third.step))
    assert not len(bench.settle(second.step))
    emissions = bench.settle(first.step)

    assert [emission.token_id for emission in emissions] == undisturbed(request)[:3]


@pytest.mark.parametrize("settled", [True, False], ids=["after-its-step-was-settled", "beside-the-first-one"])
def test_a_result_that_comes_twice_is_dropped_and_counted(settled: bool) -> None:  # noqa: FBT001
    bench = Bench(make_scheduler(depth=1))
    bench.scheduler.add(make_request("A", 4, 9))
    first, second = bench.plan(), bench.plan()
    again = bench.results[first.step] if settled else bench.results[second.step]
    bench.settle(first.step if settled else second.step)

    emissions = bench.scheduler.update(again, 0)

    assert (len(emissions), bench.scheduler.stale_results_total) == (0, 1)


def test_a_penalised_decode_waits_until_the_host_knows_its_last_token() -> None:
    bench = Bench(make_scheduler(depth=2))
    bench.scheduler.add(make_request("A", 4, 9, penalty=0.5))
    plan = bench.plan()

    assert bench.scheduler.must_drain_first() == "host_tokens"
    bench.settle(plan.step)
    assert bench.scheduler.must_drain_first() is None


def test_nobody_in_flight_is_preempted() -> None:
    bench = Bench(make_scheduler(depth=1, num_blocks=5))
    for name in "AB":
        bench.scheduler.add(make_request(name, 7, 12))
    drained: list[StepPlan] = []
    while not bench.scheduler.preemptions_total:
        plan = bench.plan()
        drained += [plan] if plan.drain_reason == "preemption" else []
        if plan.is_empty or bench.scheduler.must_drain_first():
            bench.settle(min(bench.results))

    assert drained, "the steps in flight were settled first"
    assert not bench.results


def test_blocks_stranded_by_optimism_close_the_window() -> None:
    bench = Bench(make_scheduler(depth=1, num_blocks=12))
    for name in "AB":
        bench.scheduler.add(make_request(name, 8, 20))
    first = bench.plan()
    second = bench.plan()

    assert second.optimistic_blocks == 2
    bench.settle(first.step)
    assert bench.scheduler.must_drain_first() == "stranded_blocks"
    bench.settle(second.step)
    assert bench.scheduler.must_drain_first() is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_loop_gives_the_same_with_every_depth(depth: int) -> None:
    scheduler = make_scheduler(depth=depth, num_blocks=12)
    ticks = iter(range(0, 1 << 62, 1000))
    loop = EngineLoop(scheduler, Device(12, 4), lambda: next(ticks))
    requests = [make_request(str(i), 4 + i, 12, arrival_us=i, stops=i % 3 == 0) for i in range(6)]
    told: dict[str, list[int | None]] = {}
    for request in requests:
        loop.add(request)
    while loop.has_work:
        for emission in loop.step():
            told.setdefault(emission.request.id, []).append(emission.token_id)

    for request in requests:
        expected: list[int | None] = [*undisturbed(request)]
        if request.outcome is Outcome.STOP:
            expected[-1] = None
        assert told[request.id] == expected
    assert loop.step_started_us == 0


class _FailsOnce(Device):
    """Its third step fails."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise MemoryError("out of memory")
        return super().execute(plan)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_fails_ends_its_requests_once_and_what_was_planned_behind_it_harms_nobody(depth: int) -> None:
    scheduler = make_scheduler(depth=depth)
    ticks = iter(range(0, 1 << 62, 1000))
    loop = EngineLoop(scheduler, _FailsOnce(64, 4), lambda: next(ticks))
    told: list[Emission] = []
    for name in "AB":
        loop.add(make_request(name, 4, 12))
    while loop.failed_steps_total == 0:
        told += loop.step()
    later = make_request("C", 4, 12)
    loop.add(later)
    while loop.has_work:
        told += loop.step()

    ends = {emission.request.id: emission.outcome for emission in told if emission.outcome is not None}
    assert ends == {"A": Outcome.FAILED, "B": Outcome.FAILED, "C": Outcome.LENGTH}
    assert len([emission for emission in told if emission.outcome is not None]) == 3
    assert later.tokens[4:] == undisturbed(later)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


class Window(RuleBasedStateMachine):
    """Any order of arriving, leaving, planning, and results: late, in another order, twice, of steps unknown."""

    @initialize(
        depth=st.integers(0, 2),
        num_blocks=st.integers(3, 30),
        block_tokens=st.sampled_from([1, 4, 16]),
        max_sequences=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk=st.none() | st.integers(1, 20),
        per_request=st.none() | st.integers(1, 10),
        policy=st.sampled_from(get_args(Policy)),
        victim=st.sampled_from(get_args(VictimPolicy)),
        prefix=st.booleans(),
        host_blocks=st.sampled_from([0, 6, 30]),
        drafts=st.sampled_from([0, 1, 3, 8]),
        vocab=st.sampled_from([2, 3, VOCAB]),
    )
    def start(self, vocab: int, **options: Any) -> None:
        self.vocab = vocab
        self.bench = Bench(make_scheduler(**options), vocab)
        self.scheduler = self.bench.scheduler
        self.all: list[Request] = []
        self.seen: list[StepResult] = []

    @rule(
        prompt=st.integers(1, 90),
        max_tokens=st.integers(1, 30),
        stops=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
        priority=st.integers(0, 8),
        tenant=st.sampled_from(["", "a", "b"]),
        shared=st.sampled_from([0, 20]),
        first=st.none() | st.integers(1, 5000),
        finish=st.none() | st.integers(1, 10_000),
    )
    def add(
        self,
        prompt: int,
        max_tokens: int,
        stops: bool,  # noqa: FBT001
        penalty: float,
        priority: int,
        tenant: str,
        shared: int,
        first: int | None,
        finish: int | None,
    ) -> None:
        now = self.bench.now_us
        request = make_request(
            str(len(self.all)),
            prompt,
            max_tokens,
            arrival_us=now,
            stops=stops,
            penalty=penalty,
            priority=priority,
            tenant=tenant,
            shared=shared,
            first_us=None if first is None else now + first * 1000,
            finish_us=None if finish is None else now + finish * 1000,
        )
        if self.scheduler.add(request) is None:
            self.all.append(request)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.end(data.draw(st.sampled_from(self.all)))

    @rule(ms=st.integers(0, 3000))
    def pass_time(self, ms: int) -> None:
        self.bench.now_us += ms * 1000

    @rule(times=st.integers(1, 4))
    def plan(self, times: int) -> None:
        for _ in range(times):
            if self.scheduler.must_drain_first() is not None:
                return
            self.bench.now_us += 1000
            self.check_plan(self.bench.plan())

    @precondition(lambda self: self.bench.results)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.bench.results)))
        self.seen.append(self.bench.results[step])
        self.bench.settle(step)

    @precondition(lambda self: self.bench.results)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.bench.results)))
        self.bench.results[step] = StepResult.failed(step, "the device is on fire")
        self.bench.settle(step)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        stale = self.scheduler.stale_results_total
        assert not len(self.scheduler.update(data.draw(st.sampled_from(self.seen)), self.bench.now_us))
        assert self.scheduler.stale_results_total == stale + 1

    def check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert plan.num_tokens + plan.tokens_left == limits.token_budget or plan.drain_reason
        assert plan.num_tokens <= limits.token_budget
        if limits.prefill_chunk_tokens is not None:
            assert plan.prefill_tokens <= limits.prefill_chunk_tokens
        assert plan.prefill_tokens == sum(chunk.num_tokens for chunk in plan.chunks)
        slots = [entry.slot for entry in plan.scheduled]
        assert len(set(slots)) == len(slots) <= limits.max_sequences
        for entry in plan.scheduled:
            assert entry.start + entry.num_tokens <= entry.request.peak_tokens
        assert not plan.is_empty or plan.idle_reason or plan.drain_reason, "an empty plan has a reason"
        if plan.preempted:
            assert not len(self.scheduler.window) or len(self.scheduler.window) == 1, "victims were not in flight"

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "bench"):
            check_invariants(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.drain()
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_blocks
        guesses = self.scheduler.drafts
        assert guesses is None or 0 <= guesses.accepted_total <= guesses.proposed_total
        for request in self.all:
            emissions = self.bench.told[request.id]
            assert [e.outcome is not None for e in emissions].count(True) == 1, "ends exactly once"
            assert emissions[-1].outcome is request.outcome
            told = [e.token_id for e in emissions if e.token_id is not None]
            expected = undisturbed(request, self.vocab)
            if request.outcome is Outcome.STOP:
                expected = expected[:-1]
            if request.outcome in {Outcome.STOP, Outcome.LENGTH}:
                assert told == expected, "no token twice, none lost, none of another"
            else:
                assert told == expected[: len(told)]
                assert request.outcome in {Outcome.ABORTED, Outcome.EXPIRED, Outcome.FAILED}


TestWindow = Window.TestCase
TestWindow.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
