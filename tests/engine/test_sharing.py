"""Prefix hits and swaps in the scheduler: who finds what, who is copied where, and that no tokens change by it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.paged import PagedRunner
from engine.scripted import make_limits
from sluice_engine.config import Resume
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.host_pool import HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.plan import StepPlan
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile
from sluice_engine.core.suspension import SwapSpace

BLOCK_TOKENS = 4
FAST_LINK = Link(0, 1000, 1000)


class Scene:
    """A scheduler with a prefix cache and a host pool, and the device that checks what it plans."""

    def __init__(
        self,
        num_blocks: int,
        *,
        host_blocks: int = 0,
        caching: bool = True,
        resume: Resume = "Auto",
        link: Link = FAST_LINK,
        depth: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        chunk: int | None = None,
        max_sequences: int = 8,
    ) -> None:
        pool = BlockPool(num_blocks, block_tokens)
        self.prefix = PrefixCache(pool, enabled=caching)
        self.host = HostPool(host_blocks, block_tokens)
        self.scheduler = Scheduler(
            make_limits(block_tokens=block_tokens, chunk=chunk, max_sequences=max_sequences),
            pool,
            PlanningProfile(),
            max_length_tokens=400,
            prefix=self.prefix,
            space=SwapSpace(self.host, link),
            policies=Policies(resume=resume),
            depth=depth,
        )
        ticks = iter(range(0, 1 << 62, 1000))
        self.device = PagedRunner(block_tokens)
        self.loop = EngineLoop(self.scheduler, self.device, lambda: next(ticks))

    def run(self, *requests: Request) -> None:
        """Run to the end; what is added now, and what ran before, ends by its length."""
        for request in requests:
            assert self.loop.add(request) is None
        expected = dict(self.scheduler.requests)
        while self.loop.has_work:
            self.loop.step()
            self.check()
        if self.device.always_works:
            assert {request.outcome for request in expected.values()} <= {Outcome.LENGTH}

    def until_preempted(self, *requests: Request) -> StepPlan:
        """Step until somebody was preempted; the plan that did it."""
        for request in requests:
            assert self.loop.add(request) is None
        while not self.scheduler.preemptions_total:
            self.loop.step()
            self.check()
        return self.device.plans[-1]

    def check(self) -> None:
        """Every block of either pool is in exactly one place."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        held = [block for request in scheduler.running for block in request.blocks]
        places = [*set(held), *pool.free_ids(), *pool.cached_ids(), *pool.fenced_ids()]
        assert sorted(places) == list(range(pool.num_blocks)), "a block is lost, or in two places"
        assert [held.count(block) for block in range(pool.num_blocks)] == pool._holders
        swapped = [block for request in scheduler.requests.values() for block in request.host_blocks]
        assert sorted([*swapped, *self.host.free_ids(), *self.host.fenced_ids()]) == list(range(self.host.num_blocks))
        for request in scheduler.waiting:
            assert not request.blocks
            assert bool(request.num_computed) == bool(request.host_blocks), "progress without state, or the reverse"


def ask(request_id: str, prompt: int, max_tokens: int, *, at: int = 0, tenant: str = "", first: int = 0) -> Request:
    """Prompts of one tenant begin alike when their `first` token is the same."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id, list(range(first, first + prompt)), prompt, sampling, at, tenant=tenant)


def expected_output(request: Request) -> list[int]:
    """What the script says after each history: what an undisturbed run gives."""
    tokens = request.tokens[: request.num_prompt]
    while len(tokens) < request.num_tokens:
        tokens.append((sum(tokens) * 31 + len(tokens)) % 1000 + 10)
    return tokens[request.num_prompt :]


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_differ() -> None:
    scene = Scene(32)
    scene.run(ask("A", 18, 3))
    second = ask("B", 18, 3, at=1)

    scene.run(second)

    (entry,) = scene.device.plans[3].scheduled
    assert (entry.start, entry.num_tokens) == (16, 2)
    assert second.num_cached_tokens == 16
    assert (scene.prefix.hits_total, scene.prefix.hit_tokens_total, scene.prefix.queried_tokens_total) == (1, 16, 36)
    assert second.tokens[18:] == expected_output(second)


def test_a_running_request_s_prompt_is_found_as_soon_as_it_is_settled_and_its_output_later() -> None:
    scene = Scene(32, chunk=8)
    first, second = ask("A", 18, 30), ask("B", 18, 30, at=1)
    scene.loop.add(first)
    scene.loop.step()
    scene.loop.add(second)
    scene.loop.step()

    assert second.num_cached_tokens == 8, "one chunk of the first was settled"
    while first.num_output < 12:
        scene.loop.step()
    history = first.tokens[:28]
    third = Request("C", history, 28, SamplingParams(max_tokens=1, temperature=0.0), 2)
    scene.loop.add(third)
    scene.loop.step()
    assert third.num_cached_tokens >= 24, "a conversation that goes on finds what was answered"


def test_requests_of_other_tenants_compute_their_own() -> None:
    scene = Scene(32)
    scene.run(ask("A", 18, 3, tenant="green"))
    other = ask("B", 18, 3, at=1, tenant="blue")

    scene.run(other)

    assert other.num_cached_tokens == 0


def test_cached_blocks_make_room_for_whoever_comes() -> None:
    scene = Scene(8)
    scene.run(ask("A", 24, 4))
    assert scene.scheduler.pool.num_cached > 0

    scene.run(ask("B", 29, 4, at=1, first=500))

    assert scene.scheduler.pool.dropped_total > 0
    assert scene.scheduler.preemptions_total == 0


def test_a_request_enters_when_what_it_shares_makes_it_fit() -> None:
    scene = Scene(10)
    scene.loop.add(ask("A", 25, 12))
    scene.loop.step()
    second = ask("B", 25, 3, at=1)
    scene.loop.add(second)

    scene.loop.step()

    assert second in scene.scheduler.running, "it needs 7 blocks, 3 are free, 6 are shared"
    scene.run()


def test_a_swapped_request_comes_back_to_where_it_was_and_nothing_is_computed_twice() -> None:
    scene = Scene(8, host_blocks=8, caching=False)
    old, young = ask("A", 12, 14), ask("B", 10, 14, at=1, first=50)
    plan = scene.until_preempted(old, young)

    (preemption,) = plan.preempted
    assert (preemption.request_id, preemption.choice, preemption.reason) == ("B", "swap", "cheaper")
    assert preemption.swap_us is not None
    assert preemption.swap_us < preemption.recompute_us
    assert len(plan.swap_out) == len(young.host_blocks) == -(-preemption.num_computed // BLOCK_TOKENS)
    assert young.num_computed == preemption.num_computed
    scene.run()

    back = next(plan for plan in scene.device.plans if plan.swap_in)
    entry = next(entry for entry in back.scheduled if entry.request is young)
    assert entry.start == preemption.num_computed
    assert len(back.swap_in) == len(plan.swap_out)
    assert scene.scheduler.recomputed_tokens_total == 0
    assert [r.tokens[r.num_prompt :] for r in (old, young)] == [expected_output(old), expected_output(young)]
    assert (scene.host.num_free, scene.host.swaps_total) == (8, 1)


def test_what_is_still_in_the_prefix_cache_is_not_copied_back() -> None:
    scene = Scene(8, host_blocks=8)
    scene.until_preempted(ask("A", 12, 14), ask("B", 10, 14, at=1, first=50))
    scene.run()

    out = sum(len(plan.swap_out) for plan in scene.device.plans)
    back = sum(len(plan.swap_in) for plan in scene.device.plans)
    assert 0 < back < out


@pytest.mark.parametrize(
    ("host_blocks", "resume", "link", "reason"),
    [
        pytest.param(0, "Auto", FAST_LINK, "no_host_pool", id="without-a-host-pool"),
        pytest.param(2, "Auto", FAST_LINK, "host_pool_full", id="when-the-host-pool-is-full"),
        pytest.param(8, "Recompute", FAST_LINK, "set", id="when-told-to"),
        pytest.param(8, "Auto", Link(0, 10**9, 10**9), "cheaper", id="when-the-link-is-slow"),
    ],
)
def test_state_is_computed_again(host_blocks: int, resume: Resume, link: Link, reason: str) -> None:
    scene = Scene(8, host_blocks=host_blocks, caching=False, resume=resume, link=link)
    requests = ask("A", 12, 14), ask("B", 10, 14, at=1, first=50)
    plan = scene.until_preempted(*requests)

    (preemption,) = plan.preempted
    assert (preemption.choice, preemption.reason, plan.swap_out) == ("recompute", reason, ())
    assert requests[1].num_computed == 0
    scene.run()
    assert scene.scheduler.recomputed_tokens_total == preemption.num_computed
    assert [r.tokens[r.num_prompt :] for r in requests] == [expected_output(request) for request in requests]


def test_one_that_ends_while_it_is_swapped_out_leaves_nothing_on_the_host() -> None:
    scene = Scene(8, host_blocks=8)
    scene.until_preempted(ask("A", 12, 14), ask("B", 10, 14, at=1, first=50))
    assert scene.host.num_free < 8

    scene.loop.abort("B")

    assert scene.host.num_free == 8
    scene.run()


def test_when_the_step_that_copied_it_out_failed_a_request_begins_again() -> None:
    scene = Scene(8, host_blocks=8, caching=False)
    scene.device.fails = lambda plan: bool(plan.swap_out)
    old, young = ask("A", 12, 14), ask("B", 10, 14, at=1, first=50)
    scene.until_preempted(old, young)

    assert old.outcome is Outcome.FAILED
    assert (young.num_computed, young.host_blocks, scene.host.num_free) == (0, [], 8)
    assert scene.scheduler.waiting.waiting_tokens == young.num_tokens
    scene.run()
    assert young.outcome is Outcome.LENGTH
    assert young.tokens[young.num_prompt :] == expected_output(young)


def test_blocks_of_one_that_left_are_had_again_only_when_the_step_that_writes_them_is_settled() -> None:
    scene = Scene(4, depth=1, caching=False)
    scene.loop.add(ask("A", 16, 1))
    scene.loop.step()
    assert len(scene.scheduler.window) == 1, "it is in flight"

    scene.loop.abort("A")
    second = ask("B", 16, 1, at=1)
    scene.loop.add(second)

    assert (scene.scheduler.pool.num_free, scene.scheduler.pool.num_fenced) == (0, 4)
    plan = scene.scheduler.schedule(0)
    assert (plan.scheduled, second.blocks) == ((), [])
    scene.run()
    assert second.outcome is Outcome.LENGTH


def test_what_a_failed_request_computed_is_found_by_nobody() -> None:
    scene = Scene(32)
    scene.device.fails = lambda plan: plan.step == 3
    scene.run(ask("A", 18, 9))
    second = ask("B", 18, 9, at=1)

    scene.run(second)

    assert second.num_cached_tokens == 0


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, ends, steps and failures, over prompts that often begin alike, under any sizes."""

    @initialize(
        num_blocks=st.integers(3, 16),
        host_blocks=st.integers(0, 12),
        block_tokens=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        resume=st.sampled_from(["Auto", "Recompute", "Swap"]),
        link=st.sampled_from([FAST_LINK, Link(0, 10**7, 10**7)]),
        depth=st.integers(0, 2),
        chunk=st.none() | st.integers(1, 12),
        max_sequences=st.integers(1, 6),
    )
    def start(
        self,
        num_blocks: int,
        host_blocks: int,
        block_tokens: int,
        caching: bool,  # noqa: FBT001
        resume: Resume,
        link: Link,
        depth: int,
        chunk: int | None,
        max_sequences: int,
    ) -> None:
        self.scene = Scene(
            num_blocks,
            host_blocks=host_blocks,
            caching=caching,
            resume=resume,
            link=link,
            depth=depth,
            block_tokens=block_tokens,
            chunk=chunk,
            max_sequences=max_sequences,
        )
        self.all: list[Request] = []

    @rule(
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 20),
        first=st.sampled_from([0, 0, 0, 100]),
        tenant=st.sampled_from(["", "green"]),
    )
    def add(self, prompt: int, max_tokens: int, first: int, tenant: str) -> None:
        number = len(self.all)
        request = ask(str(number), prompt, max_tokens, at=number, tenant=tenant, first=first)
        if self.scene.loop.add(request) is None:
            self.all.append(request)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scene.loop.abort(data.draw(st.sampled_from(self.all)).id)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.scene.loop.step()
            self.scene.check()

    @rule()
    def a_step_fails(self) -> None:
        self.scene.device.fails = lambda _plan: True
        self.scene.loop.step()
        self.scene.device.fails = lambda _plan: False
        self.scene.loop._failures_in_a_row = 0

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if hasattr(self, "scene"):
            self.scene.check()

    def teardown(self) -> None:
        if not hasattr(self, "scene"):
            return
        scene = self.scene
        for _ in range(20_000):
            if not scene.loop.has_work:
                break
            scene.loop.step()
        assert not scene.loop.has_work, "everything drains"
        assert scene.scheduler.pool.num_free == scene.scheduler.pool.num_blocks
        assert scene.host.num_free == scene.host.num_blocks
        for request in self.all:
            if request.outcome is Outcome.FAILED:
                assert request.error is not None
                assert "the device is gone" in request.error
            else:
                assert request.outcome in {Outcome.LENGTH, Outcome.ABORTED}
            assert request.tokens[request.num_prompt :] == expected_output(request)
            assert request.num_cached_tokens < request.num_prompt


TestSharing = Machine.TestCase
TestSharing.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
