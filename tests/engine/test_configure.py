"""Another `live.json` while requests run and wait: nobody is lost, and the new numbers hold from the next step on."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.ordering import SERVICE, ids, step_us, waiter
from engine.scripted import ScriptedRunner, check_invariants, make_request
from engine.serving import LIVE, HeldRunner, make_loaded, served, until
from sluice_engine.codec import digest
from sluice_engine.config import (
    CacheConfig,
    EngineConfig,
    FairnessUnit,
    ModelConfig,
    ModelSource,
    Policy,
    SchedulerConfig,
)
from sluice_engine.core.assemble import Assembled, assemble
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.policy import Policies, order_for, reorder
from sluice_engine.core.order.service import Service
from sluice_engine.core.step_limits import Capacity
from sluice_engine.core.steptime import PlanningProfile
from sluice_engine.live_config import AdmissionConfig, LiveConfig, LiveSchedulingConfig, SLOConfig, TenantConfig
from sluice_engine.serving.publication import LoadedEngine

CAPACITY = Capacity(
    num_blocks=64, block_tokens=8, max_length_tokens=400, max_decode_requests=16, max_prefill_tokens=4096
)


def live(itl_ms: int = 150, chunk: int | None = None, aging_s: int = 20, **weights: int) -> LiveConfig:
    return LiveConfig(
        slo=SLOConfig(time_to_first_token_us=10_000_000, inter_token_latency_us=itl_ms * 1000),
        scheduling=LiveSchedulingConfig(prefill_chunk_tokens=chunk, aging_interval_us=aging_s * 1_000_000),
        admission=AdmissionConfig(tenants=tuple(TenantConfig(name=name, weight=w) for name, w in weights.items())),
    )


def core_of(policy: Policy = "FirstComeFirstServed", first: LiveConfig | None = None) -> Assembled:
    unit: FairnessUnit | None = "Tokens" if policy == "WeightedFair" else None
    config = EngineConfig(
        model=ModelConfig(source=ModelSource(path="/unused"), served_name="m"),
        cache=CacheConfig(capacity_bytes=1),
        scheduling=SchedulerConfig(policy=policy, fairness_unit=unit),
    )
    return assemble(config, first or live(), PlanningProfile(), CAPACITY)


def test_a_set_chunk_binds_from_the_next_step_on_and_is_reported() -> None:
    core = core_of()
    loop = EngineLoop(core.scheduler, ScriptedRunner(8), lambda: 0, tuning=core.tuning)
    assert loop.add(make_request("long", 300, 5)) is None
    core.tuning.configure(live(chunk=64))

    loop.step()

    assert loop.last_plan is not None
    assert loop.last_plan.prefill_tokens == 64
    assert core.tuning.current.derived.chunk_ceiling_tokens == 64
    assert core.tuning.live == live(chunk=64)


def test_a_promise_that_cannot_be_kept_is_obeyed_as_well_as_it_can_and_said_to_be_infeasible() -> None:
    core = core_of()
    core.tuning.configure(live(itl_ms=5))
    assert not core.tuning.current.derived.feasible
    core.tuning.configure(live())
    assert core.tuning.current.derived.feasible


def test_fewer_places_than_requests_that_run_close_the_entry_and_end_nobody() -> None:
    core = core_of()
    runner = ScriptedRunner(8)
    loop = EngineLoop(core.scheduler, runner, lambda: 0, tuning=core.tuning)
    for number in range(12):
        assert loop.add(make_request(f"r{number}", 8, 20, arrival_us=number)) is None
    loop.step()
    assert len(core.scheduler.running) == 12
    core.tuning.configure(live(itl_ms=5))  # no batch keeps it: one at a time
    assert core.scheduler.limits.max_sequences == 1
    assert loop.add(make_request("late", 8, 2, arrival_us=99)) is None

    loop.step()

    assert len(core.scheduler.running) == 12
    assert core.scheduler.preemptions_total == 0
    while loop.has_work:
        loop.step()
    assert {end.outcome for end in loop.finished} == {"length"}
    assert len(loop.finished) == 13


def test_those_that_wait_are_sorted_anew_by_the_scheduler_that_holds_them() -> None:
    core = core_of("Priority", live(aging_s=0))
    core.scheduler.waiting.push(waiter("background", priority=8))
    core.scheduler.waiting.push(waiter("critical", priority=0, arrival_s=10))
    assert ids(core.scheduler.waiting.candidates(0)) == ["critical", "background"]

    core.tuning.configure(live(aging_s=1))

    assert ids(core.scheduler.waiting.candidates(0)) == ["background", "critical"], "ten levels older is more urgent"


ORDERS = ["FirstComeFirstServed", "ShortestJobFirst", "Priority", "EarliestDeadline", "WeightedFair"]
WAITERS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 400), st.integers(0, 8), st.sampled_from("abc")),
    min_size=1, max_size=12,
)  # fmt: skip


@given(order=st.sampled_from(ORDERS), waiters=WAITERS, aging_s=st.integers(0, 60), weight=st.integers(1, 9))
def test_those_that_wait_stand_as_if_the_new_numbers_had_been_there_all_the_time(
    order: Any, waiters: list[tuple[int, int, int, str]], aging_s: int, weight: int
) -> None:
    def queue(policies: Policies, service: Service) -> Any:
        waiting = order_for(policies, service)
        for number, (arrival_s, prompt, priority, tenant) in enumerate(waiters):
            waiting.push(
                waiter(f"r{number}", arrival_s=arrival_s, prompt=prompt, priority=priority, tenant=tenant, finish_s=900)
            )
        return waiting

    new = replace(Policies(order=order), aging_interval_us=aging_s * 1_000_000, weights={"a": weight})
    service = Service(step_us, 16)
    changed = queue(Policies(order=order), service)
    next(changed.candidates(0), None)  # a pass that was left, with one taken off the heap

    service.prefill_step_tokens = 128
    reorder(changed, new, service)

    assert ids(changed.candidates(0)) == ids(queue(new, Service(step_us, 128)).candidates(0))


def test_a_weight_that_changes_keeps_what_was_used_and_books_anew_what_is_not() -> None:
    fair = order_for(Policies(order="WeightedFair", weights={"a": 1}), SERVICE)
    running = waiter("a0", tenant="a", prompt=10, output=10)
    fair.push(running)
    fair.remove(running)
    fair.charge(running, starts=1)
    fair.charge(running, tokens=9)
    order: Any = fair._order
    booked = order.service("a")

    reorder(fair, Policies(order="WeightedFair", weights={"a": 5}), SERVICE)
    fair.charge(running, tokens=10)
    fair.remove(running)

    assert booked == 19_000_000
    assert order.service("a") == 9_000_000 + 10_000_000 // 5


class Reconfigured(RuleBasedStateMachine):
    """Steps, arrivals, departures and changes in any order: every request ends once, no step breaks its limits."""

    def __init__(self) -> None:
        super().__init__()
        self.core = core_of("WeightedFair")
        self.core.scheduler.strict = True
        self.runner = ScriptedRunner(8)
        self.loop = EngineLoop(self.core.scheduler, self.runner, lambda: 0, tuning=self.core.tuning)
        self.added = 0
        self.max_running = 0
        """Those that run may be more than the limit that came after them, and become no more."""

    @rule(prompt=st.integers(1, 120), output=st.integers(1, 30), tenant=st.sampled_from("abc"))
    def arrives(self, prompt: int, output: int, tenant: str) -> None:
        request = make_request(f"r{self.added}", prompt, output, arrival_us=self.added)
        request.tenant = tenant
        assert self.loop.add(request) is None
        self.added += 1

    @precondition(lambda self: self.core.scheduler.requests)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        self.loop.abort(data.draw(st.sampled_from(sorted(self.core.scheduler.requests))))

    @rule(itl_ms=st.integers(5, 600), chunk=st.none() | st.integers(8, 300), aging_s=st.integers(0, 99),
          weight=st.integers(1, 9))  # fmt: skip
    def changes(self, itl_ms: int, chunk: int | None, aging_s: int, weight: int) -> None:
        self.core.tuning.configure(live(itl_ms, chunk, aging_s, a=weight))

    @precondition(lambda self: self.loop.has_work)
    @rule()
    def steps(self) -> None:
        limits = self.core.scheduler.limits
        self.max_running = max(limits.max_sequences, len(self.core.scheduler.running))
        self.loop.step()
        plan = self.loop.last_plan
        assert plan is not None
        assert len(plan.decodes) + plan.prefill_tokens <= limits.token_budget
        assert plan.prefill_tokens <= limits.prefill_budget(len(plan.decodes), plan.context_tokens)

    @invariant()
    def nothing_is_lost(self) -> None:
        check_invariants(self.core.scheduler, self.max_running)
        assert len(self.core.scheduler.requests) + len(self.loop.finished) == self.added

    def teardown(self) -> None:
        while self.loop.has_work:
            self.loop.step()
        assert len(self.loop.finished) == self.added
        assert self.core.scheduler.pool.num_free == CAPACITY.num_blocks


TestReconfigured = Reconfigured.TestCase
TestReconfigured.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("while_loading", [False, True])
async def test_the_engine_takes_a_change_while_it_idles_and_one_that_came_while_it_loaded(
    *, while_loading: bool
) -> None:
    changed = replace(LIVE, slo=replace(LIVE.slo, inter_token_latency_us=77_000))
    may_load = threading.Event()

    def load(_progress: object) -> LoadedEngine:
        assert may_load.wait(30)
        return make_loaded(HeldRunner())

    async with served(load) as engine:
        if while_loading:
            engine.service.configure(changed)
        may_load.set()
        await engine.service.ready()
        loaded = engine.service.loaded()
        if not while_loading:
            engine.service.configure(changed)

        await until(lambda: loaded.tuning.live == changed)
        async with engine.http.get("/state") as response:
            state = await response.json()
    assert state["live_config_hash"] == digest(changed)
    assert state["live_config_refused"] == ""
