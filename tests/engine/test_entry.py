"""Who enters: past those that cannot be placed, but not for ever; and no prompt takes a whole step from the others."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scripted import make_limits, make_request, make_scheduler
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.entry import LOOK_PAST, MAX_OVERTAKEN
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.prefix_cache import PrefixCache, PrefixHit
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0)
    scheduler.update(StepResult(plan.step, np.full(plan.num_sampling, 7)), 0)
    return plan


def full_but_for(num_blocks: int) -> Scheduler:
    """A scheduler with one prompt that is computed for a long time, and so many blocks of four tokens left."""
    scheduler = make_scheduler(make_limits(max_sequences=64, token_budget=1000, chunk=4), num_blocks=40)
    scheduler.add(make_request("runner", 4 * (40 - num_blocks), 1))
    step(scheduler)
    return scheduler


def names(scheduler: Scheduler) -> list[str]:
    return [request.id for request in scheduler.running if request.id != "runner"]


def test_who_fits_enters_past_one_who_does_not() -> None:
    scheduler = full_but_for(4)
    for at, (name, prompt) in enumerate((("big", 40), ("small", 4)), start=1):
        scheduler.add(make_request(name, prompt, 1, arrival_us=at))

    plan = step(scheduler)

    assert names(scheduler) == ["small"]
    assert [(held.request_id, held.reason) for held in plan.held_back] == [("big", "no_free_blocks")]
    assert plan.waiting_reasons == (("no_free_blocks", 1),)


def test_only_a_few_are_looked_past() -> None:
    scheduler = full_but_for(4)
    for at in range(LOOK_PAST + 3):
        scheduler.add(make_request(f"big {at}", 40, 1, arrival_us=at))
    scheduler.add(make_request("small", 4, 1, arrival_us=99))

    plan = step(scheduler)

    assert not names(scheduler)
    assert len(plan.held_back) == LOOK_PAST + 1
    assert dict(plan.waiting_reasons) == {"no_free_blocks": LOOK_PAST + 1, "behind_others": 3}


def test_one_who_was_overtaken_often_enough_is_passed_by_nobody() -> None:
    scheduler = full_but_for(8)
    scheduler.add(make_request("big", 60, 1, arrival_us=1))
    entered = 0
    for at in range(MAX_OVERTAKEN + 5):
        scheduler.add(make_request(f"small {at}", 4, 1, arrival_us=2 + at))
        before = set(names(scheduler))
        plan = step(scheduler)
        new = set(names(scheduler)) - before
        entered += len(new)
        for name in new:
            scheduler.end(name, Outcome.ABORTED)

    assert entered == MAX_OVERTAKEN
    assert plan.held_back[0].request_id == "big"
    assert dict(plan.waiting_reasons)["behind_others"] == 5


def family(*names: str, prompt: int = 40) -> list[Request]:
    """The choices of one prompt: the first leads."""
    tokens = [index % 997 for index in range(prompt)]
    choices: list[Request] = []
    for index, name in enumerate(names):
        sampling = SamplingParams(max_tokens=3, temperature=0.0, choice=index)
        choices.append(Request(name, list(tokens), prompt, sampling, 0, leader=choices[0] if choices else None))
    return choices


def sharing(*, enabled: bool = True) -> Scheduler:
    pool = BlockPool(64, 4)
    return Scheduler(
        make_limits(max_sequences=8, token_budget=1000, chunk=16),
        pool,
        PlanningProfile(),
        max_length_tokens=400,
        prefix=PrefixCache(pool, enabled=enabled),
    )


def test_choices_wait_for_the_first_to_compute_their_prompt_and_others_pass() -> None:
    scheduler = sharing()
    for request in family("first", "second", "third"):
        scheduler.add(request)
    scheduler.add(make_request("other", 8, 1, arrival_us=9))

    plan = step(scheduler)
    assert {entry.request.id for entry in plan.chunks} == {"first", "other"}
    assert dict(plan.waiting_reasons) == {"shared_prompt": 2}
    computed = sum(entry.num_tokens for entry in plan.chunks if entry.request.id != "other")
    while scheduler.has_work:
        plan = step(scheduler)
        computed += sum(entry.num_tokens for entry in plan.chunks)
        assert not plan.is_empty, "somebody always gets on"
    assert computed == 40 + 4 + 4, "the others computed their last block only"


def test_what_a_waiting_choice_would_find_is_looked_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    match = PrefixCache.match

    def counted(prefix: PrefixCache, request: Request) -> PrefixHit:
        looked_up.append(request.id)
        return match(prefix, request)

    scheduler = sharing()
    for request in family("first", "second", prompt=48):
        scheduler.add(request)
    step(scheduler)
    monkeypatch.setattr(PrefixCache, "match", counted)

    assert dict(step(scheduler).waiting_reasons) == {"shared_prompt": 1}
    assert looked_up == ["second"]
    step(scheduler)
    assert {entry.request.id for entry in step(scheduler).chunks} == {"second"}
    assert looked_up == ["second"] * 3, "in the step in which it enters, too"


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_choices_whose_first_is_gone_compute_for_themselves(how: str) -> None:
    scheduler = sharing()
    for request in family("first", "second", "third"):
        scheduler.add(request)
    step(scheduler)
    scheduler.end("first", Outcome.ABORTED if how == "aborted" else Outcome.FAILED)

    assert {entry.request.id for entry in step(scheduler).chunks} >= {"second"}
    while scheduler.has_work:
        assert not step(scheduler).is_empty


def test_without_a_prefix_cache_choices_enter_at_once() -> None:
    scheduler = sharing(enabled=False)
    for request in family("first", "second"):
        scheduler.add(request)
    assert {entry.request.id for entry in step(scheduler).chunks} == {"first", "second"}


def test_a_long_prompt_leaves_half_of_a_step_to_the_ones_behind_it() -> None:
    scheduler = make_scheduler(make_limits(token_budget=100, chunk=16), num_blocks=200)
    scheduler.add(make_request("long", 200, 2))
    scheduler.add(make_request("short", 6, 2, arrival_us=1))
    scheduler.add(make_request("other", 60, 2, arrival_us=2))

    plan = step(scheduler)

    shares = {chunk.request.id: chunk.num_tokens for chunk in plan.chunks}
    # Half for the long one; of the rest, the short one takes half, which the last one shares; what is left returns.
    assert shares == {"long": 8, "short": 4, "other": 4}
    assert {chunk.request.id: chunk.num_tokens for chunk in step(scheduler).chunks} == {
        "long": 8,
        "short": 2,
        "other": 6,
    }


def test_what_the_others_do_not_want_goes_to_the_long_prompt() -> None:
    scheduler = make_scheduler(make_limits(token_budget=100, chunk=16), num_blocks=200)
    for at, (name, prompt) in enumerate((("long", 200), ("short", 3))):
        scheduler.add(make_request(name, prompt, 2, arrival_us=at))

    plan = step(scheduler)

    assert {chunk.request.id: chunk.num_tokens for chunk in plan.chunks} == {"long": 13, "short": 3}


def test_half_is_kept_for_nobody_who_cannot_enter() -> None:
    scheduler = make_scheduler(make_limits(max_sequences=1, token_budget=100, chunk=16), num_blocks=200)
    for at, name in enumerate(("long", "waits")):
        scheduler.add(make_request(name, 100, 2, arrival_us=at))

    plan = step(scheduler)

    assert [(chunk.request.id, chunk.num_tokens) for chunk in plan.chunks] == [("long", 16)]


def test_blocks_of_a_prefix_that_nobody_holds_are_not_counted_as_free_twice() -> None:
    """Six blocks: three of a prompt that was here before and is cached, three of somebody who runs."""
    limits = make_limits(token_budget=100)
    pool = BlockPool(6, limits.block_tokens)
    scheduler = Scheduler(limits, pool, PlanningProfile(), max_length_tokens=400, prefix=PrefixCache(pool))
    scheduler.add(make_request("A", 12, 1))
    step(scheduler)
    scheduler.add(make_request("B", 9, 4, arrival_us=1))
    step(scheduler)
    again = make_request("A", 12, 1, arrival_us=2)
    again.tokens += [1]
    again.num_prompt += 1
    scheduler.add(again)

    plan = step(scheduler)

    assert (pool.num_free, pool.num_cached) == (3, 3)
    assert plan.held_back[0].reason == "no_free_blocks", "its own block would have to drop one of those it shares"
