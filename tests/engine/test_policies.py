"""Policies in the scheduler itself: who enters, who gives way, who is given up, what tenants get."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.scripted import ScriptedRunner, check_invariants, make_limits, make_request, make_scheduler, position_token
from sluice_engine.config import FairnessUnit, Policy, VictimPolicy
from sluice_engine.core.emissions import Emissions
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.scheduler import Scheduler

POLICIES: tuple[Policy, ...] = (
    "FirstComeFirstServed",
    "ShortestJobFirst",
    "Priority",
    "EarliestDeadline",
    "WeightedFair",
)
VICTIMS: tuple[VictimPolicy, ...] = ("Last", "LeastComputed", "MostBlocksPerMillisecond", "LowestPriority", "MostSlack")
UNITS: tuple[FairnessUnit, ...] = ("Starts", "Tokens", "DeviceTime", "KVByteSeconds")


class Run:
    """A loop under a clock that moves only while a step runs, by what the step is predicted to take."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.now_us = 0
        self.scheduler = scheduler
        self.runner = ScriptedRunner(scheduler.pool.block_tokens, position_token)
        execute = self.runner.execute

        def timed(plan: StepPlan) -> Any:
            self.now_us += plan.predicted_us
            return execute(plan)

        self.runner.execute = timed  # type: ignore[method-assign]
        self.loop = EngineLoop(scheduler, self.runner, lambda: self.now_us)
        self.ended: dict[str, Outcome] = {}

    def add(self, request: Request) -> Request:
        assert self.loop.add(request) is None
        return request

    def step(self) -> StepPlan:
        for emission in self.loop.step():
            if emission.outcome is not None:
                assert emission.request.id not in self.ended, "a request ended twice"
                self.ended[emission.request.id] = emission.outcome
        check_invariants(self.scheduler)
        assert self.loop.last_plan is not None
        return self.loop.last_plan

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    @property
    def running(self) -> list[str]:
        return [request.id for request in self.scheduler.running]


def request(name: str, prompt: int = 8, output: int = 8, *, arrival_us: int = 0, **fields: Any) -> Request:
    made = make_request(name, prompt, output, arrival_us=arrival_us)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def one_slot(**policies: Any) -> Run:
    return Run(make_scheduler(make_limits(max_sequences=1), **policies))


@pytest.mark.parametrize(
    ("policies", "order"),
    [
        pytest.param({"order": "FirstComeFirstServed"}, "long short urgent due", id="first-come-first-served"),
        pytest.param({"order": "ShortestJobFirst"}, "short due urgent long", id="shortest-job-first"),
        pytest.param({"order": "Priority"}, "urgent long short due", id="priority"),
        pytest.param({"order": "EarliestDeadline"}, "due long short urgent", id="earliest-deadline"),
        pytest.param(
            {"order": "WeightedFair", "fairness_unit": "Starts"}, "long urgent short due", id="equal-starts"
        ),
    ],
)  # fmt: skip
def test_entry_follows_the_policy(policies: dict[str, Any], order: str) -> None:
    run = one_slot(**policies)
    run.add(request("long", 40, 8))
    run.add(request("short", 4, 2, arrival_us=1))
    run.add(request("urgent", 30, 8, arrival_us=2, priority=0, tenant="b"))
    run.add(request("due", 8, 6, arrival_us=3, finish_deadline_us=60_000_000))

    run.drain()

    assert list(run.ended) == order.split()


def test_what_cannot_be_in_time_is_given_up_while_it_waits_and_never_computed() -> None:
    run = one_slot()
    run.add(request("inside", 8, 200))
    hopeless = run.add(request("hopeless", 8, 8, arrival_us=1, first_token_deadline_us=200_000))

    while "hopeless" not in run.ended:
        run.step()

    assert run.running == ["inside"], "no slot has come free meanwhile"
    assert run.ended["hopeless"] is Outcome.EXPIRED
    assert hopeless.num_computed == 0
    assert run.now_us <= 200_000 + 2 * 30_000, "it is found between two steps, and told with the next"
    assert all(entry.request is not hopeless for plan in run.runner.plans for entry in plan.scheduled)


@pytest.mark.parametrize(
    ("prompt", "deadlines", "told"),
    [
        pytest.param(8, {"finish_deadline_us": 500_000}, True, id="in-the-middle-of-its-answer"),
        pytest.param(400, {"first_token_deadline_us": 500_000}, False, id="in-the-middle-of-its-prompt"),
    ],
)
def test_a_running_request_is_ended_at_its_deadline_and_frees_what_it_held(
    prompt: int, deadlines: dict[str, int], told: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    limits = make_limits(chunk=8)
    run = Run(make_scheduler(limits, num_blocks=200))
    late = run.add(request("late", prompt, 200, **deadlines))
    # Alone in the pod 400 tokens would take a second in chunks of 8; that it started at all is the estimate's fault.
    run.scheduler.waiting._expiry.cancel(late)
    other = run.add(request("other", 8, 100, arrival_us=1))

    while "late" not in run.ended:
        run.step()

    assert run.ended["late"] is Outcome.EXPIRED
    assert 500_000 < run.now_us <= 500_000 + 3 * 30_280
    assert (late.num_output > 0) is told
    assert (late.blocks, run.running) == ([], ["other"])
    run.drain()
    assert other.num_output == 100


def test_a_critical_request_takes_the_slot_of_a_background_one() -> None:
    run = one_slot(order="Priority")
    background = run.add(request("background", 8, 50, priority=8))
    run.step()
    run.add(request("critical", 8, 8, arrival_us=1, priority=0))

    plan = run.step()

    assert run.running == ["critical"]
    assert [(each.request_id, each.beneficiary_id) for each in plan.preempted] == [("background", "critical")]
    run.drain()
    assert list(run.ended) == ["critical", "background"]
    assert background.num_preemptions == 1
    assert (run.scheduler.preemptions_total, run.scheduler.class_preemptions_total) == (0, 1)


@pytest.mark.parametrize(
    ("policies", "entering"),
    [
        pytest.param({"order": "Priority"}, 7, id="one-level-apart"),
        pytest.param({"order": "FirstComeFirstServed"}, 0, id="under-another-policy"),
        pytest.param({"order": "Priority", "max_preemptions_per_request": 0}, 0, id="where-nobody-may-be-preempted"),
    ],
)
def test_a_slot_is_not_taken(policies: dict[str, Any], entering: int) -> None:
    run = one_slot(**policies)
    run.add(request("background", 8, 50, priority=8))
    run.step()
    run.add(request("comes", 8, 8, arrival_us=1, priority=entering))

    run.drain()

    assert list(run.ended) == ["background", "comes"]


def test_as_many_give_way_as_the_blocks_of_the_higher_class_need_and_no_more() -> None:
    run = Run(make_scheduler(make_limits(max_sequences=8), num_blocks=12, order="Priority"))
    for name in "abc":
        run.add(request(name, 12, 4, priority=8))
    run.step()
    run.add(request("critical", 20, 4, arrival_us=1, priority=0))

    plan = run.step()

    assert len(plan.preempted) == 2
    assert "critical" in run.running
    run.drain()
    assert set(run.ended.values()) == {Outcome.LENGTH}


def test_nobody_gives_way_when_it_would_not_be_enough() -> None:
    run = Run(make_scheduler(make_limits(max_sequences=8), num_blocks=12, order="Priority"))
    run.add(request("a", 12, 4, priority=8))
    run.add(request("b", 28, 4, priority=0))
    run.step()
    run.add(request("critical", 24, 4, arrival_us=1, priority=0))

    plan = run.step()

    assert plan.preempted == ()
    assert sorted(run.running) == ["a", "b"]


def test_a_stream_of_critical_requests_takes_a_background_one_its_place_three_times_and_no_more() -> None:
    run = one_slot(order="Priority")
    background = run.add(request("background", 8, 40, priority=8))
    for index in range(8):
        for _ in range(6):  # one of them takes three, so the background request gets on in between
            run.step()
        run.add(request(f"critical-{index}", 4, 2, arrival_us=run.now_us, priority=0))

    run.drain()

    assert background.num_preemptions == 3
    assert set(run.ended.values()) == {Outcome.LENGTH}


def test_a_victim_of_the_lowest_class_gives_way_for_blocks_when_that_is_the_policy() -> None:
    for victim, gives_way in (("LowestPriority", "background"), ("LeastComputed", "young")):
        run = Run(make_scheduler(num_blocks=8, victim=victim))
        run.add(request("background", 12, 16, priority=8))
        run.add(request("young", 8, 16, arrival_us=1))
        while not (plan := run.step()).preempted:
            pass
        assert plan.preempted[0].request_id == gives_way, victim


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def feed(run: Run, names: dict[str, tuple[int, int]], depth: int) -> Iterator[None]:
    """Keep every tenant backlogged, with requests of its own size, for ever."""
    count = itertools.count()
    while True:
        waiting = Counter(request.tenant for request in run.scheduler.waiting)
        for tenant, (prompt, output) in names.items():
            for _ in range(depth - waiting[tenant]):
                run.add(request(f"{tenant}-{next(count)}", prompt, output, arrival_us=run.now_us, tenant=tenant))
        yield


@pytest.mark.parametrize("unit", UNITS)
def test_backlogged_tenants_of_unlike_sizes_get_equal_shares_of_the_unit(unit: FairnessUnit) -> None:
    """Jain's index over weighted use is at least 0.95, whatever the unit and however unlike the requests are."""
    sizes = {"chat": (4, 24), "documents": (48, 4), "agents": (24, 24)}
    run = Run(make_scheduler(make_limits(max_sequences=8, token_budget=64), num_blocks=256, order="WeightedFair",
                             fairness_unit=unit))  # fmt: skip
    used: defaultdict[str, int] = defaultdict(int)
    feeder = feed(run, sizes, 4)
    for _ in range(3000):
        next(feeder)
        before = run.now_us
        held = Counter[str]()
        plan = run.step()
        for each in run.scheduler.running:
            held[each.tenant] += len(each.blocks)
        entered = Counter(e.request.tenant for e in plan.scheduled if e.start == 0)
        for tenant in sizes:
            used[tenant] += {
                "Starts": entered[tenant],
                "Tokens": sum(e.num_tokens for e in plan.scheduled if e.request.tenant == tenant),
                "DeviceTime": 0,
                "KVByteSeconds": held[tenant] * (run.now_us - before),
            }[unit]
        if unit == "DeviceTime" and plan.scheduled:
            alone = run.scheduler.times.predict_us(plan.decode_requests, 0, 0) if plan.decode_requests else 0
            decode_part = alone if plan.prefill_tokens else plan.predicted_us
            for entry in plan.scheduled:
                is_chunk = entry in plan.chunks
                share = (
                    (plan.predicted_us - decode_part) * entry.num_tokens / plan.prefill_tokens
                    if is_chunk
                    else decode_part / plan.decode_requests
                )
                used[entry.request.tenant] += round(share)

    assert jain([float(used[tenant]) for tenant in sizes]) >= 0.95


def test_an_unused_share_is_borrowed_at_once_and_a_returning_tenant_gets_its_own_within_two_entries() -> None:
    run = Run(make_scheduler(make_limits(max_sequences=4), order="WeightedFair", fairness_unit="Tokens"))
    for index in range(20):
        run.add(request(f"busy-{index}", 8, 8, tenant="busy", arrival_us=index))
    run.step()
    assert len(run.running) == 4, "nobody else wants it"

    back = run.add(request("back", 8, 8, tenant="back", arrival_us=run.now_us))
    entered: list[str] = []
    while back.id not in run.running:
        before = set(run.running)
        run.step()
        entered += [name for name in run.running if name not in before]

    assert entered.index("back") <= 4, "among the first to enter when places fall free"


class AnyPolicy(RuleBasedStateMachine):
    """Any arrivals, departures and passing of time, under every policy: everything ends once, nothing is lost."""

    @initialize(
        order=st.sampled_from(POLICIES),
        unit=st.sampled_from(UNITS),
        victim=st.sampled_from(VICTIMS),
        interval=st.sampled_from([0, 100_000, 20_000_000]),
        cap=st.integers(0, 3),
        num_blocks=st.integers(6, 40),
        max_sequences=st.integers(1, 6),
        chunk=st.none() | st.integers(4, 20),
    )
    def start(self, order: Policy, unit: FairnessUnit, victim: VictimPolicy, interval: int, cap: int,
              num_blocks: int, max_sequences: int, chunk: int | None) -> None:  # fmt: skip
        self.pool_tokens = num_blocks * 4
        self.run = Run(
            make_scheduler(
                make_limits(max_sequences=max_sequences, chunk=chunk),
                num_blocks=num_blocks,
                order=order,
                fairness_unit=unit,
                weights={"a": 3},
                victim=victim,
                aging_interval_us=interval,
                max_preemptions_per_request=cap,
            )
        )
        self.added: list[str] = []

    @rule(
        prompt=st.integers(1, 30),
        output=st.integers(1, 30),
        level=st.integers(0, 9),
        tenant=st.sampled_from("abc"),
        first_ms=st.none() | st.integers(0, 2000),
        finish_ms=st.none() | st.integers(0, 5000),
        expected=st.none() | st.integers(1, 30),
    )
    def arrive(self, prompt: int, output: int, level: int, tenant: str, first_ms: int | None,
               finish_ms: int | None, expected: int | None) -> None:  # fmt: skip
        made = request(
            str(len(self.added)),
            prompt,
            output,
            arrival_us=self.run.now_us,
            priority=level,
            tenant=tenant,
            first_token_deadline_us=None if first_ms is None else self.run.now_us + first_ms * 1000,
            finish_deadline_us=None if finish_ms is None else self.run.now_us + finish_ms * 1000,
            expected_output_tokens=expected,
        )
        if prompt + output - 1 <= self.pool_tokens:
            self.run.add(made)
            self.added.append(made.id)

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.run.loop.has_work:
                self.run.step()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        live = sorted(self.run.scheduler.requests)
        if live:
            ended: Emissions = self.run.loop.abort(data.draw(st.sampled_from(live)))
            for emission in ended:
                assert emission.outcome is not None
                self.run.ended[emission.request.id] = emission.outcome

    @rule(ms=st.integers(0, 3000))
    def stand_still(self, ms: int) -> None:
        self.run.now_us += ms * 1000

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "run"):
            live = set(self.run.scheduler.requests)
            assert sorted([*live, *self.run.ended]) == sorted(self.added)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.drain()
            assert sorted(self.run.ended) == sorted(self.added)
            assert Outcome.FAILED not in self.run.ended.values()
            assert self.run.scheduler.pool.num_free == self.run.scheduler.pool.num_blocks


TestAnyPolicy = AnyPolicy.TestCase
TestAnyPolicy.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30), st.integers(1, 6)), min_size=5, max_size=40),
    st.sampled_from([50_000, 200_000]),
)
def test_under_priority_waiting_is_bounded_by_aging(jobs: list[tuple[int, int, int]], interval: int) -> None:
    """Whoever starts before a waiting request either came before it, or within its aging after it."""
    run = one_slot(order="Priority", aging_interval_us=interval, max_preemptions_per_request=0)
    arrived: dict[str, Request] = {}
    for index, (level, prompt, output) in enumerate(jobs):
        arrived[str(index)] = run.add(request(str(index), prompt, output, arrival_us=run.now_us, priority=level))
        waiting = list(run.scheduler.waiting)
        before = set(run.running)
        run.step()
        for name in set(run.running) - before:
            for other in waiting:
                if other is not arrived[name]:
                    within = (other.priority - arrived[name].priority) * interval
                    assert arrived[name].arrival_us - other.arrival_us <= within
    run.drain()
    assert list(run.ended.values()) == [Outcome.LENGTH] * len(jobs)
