"""What adapters and media take of the budgets, and what no step can ever take."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scripted import make_limits, make_request
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.request import Media, Request, RequestStatus
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile


def make_scheduler(**budgets: int) -> Scheduler:
    limits = make_limits(token_budget=100)
    return Scheduler(
        limits, BlockPool(200, limits.block_tokens), PlanningProfile(), max_length_tokens=400, budgets=budgets
    )


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0)
    scheduler.update(StepResult(plan.step, np.full(plan.num_sampling, 7)), 0)
    return plan


def with_media(name: str, prompt: int, *items: tuple[int, int]) -> Request:
    request = make_request(name, prompt, 2)
    request.media = tuple(Media(*item) for item in items)
    return request


def with_adapter(name: str, adapter: str, *, arrival_us: int) -> Request:
    request = make_request(name, 4, 3, arrival_us=arrival_us)
    request.adapter = adapter
    return request


def shares(plan: StepPlan) -> dict[str, int]:
    return {chunk.request.id: chunk.num_tokens for chunk in plan.chunks}


def test_a_prompt_is_cut_before_the_item_that_the_step_cannot_encode() -> None:
    scheduler = make_scheduler(encoder_tokens=100)
    scheduler.add(with_media("A", 40, (10, 60), (20, 60), (30, 30)))

    assert [shares(step(scheduler)) for _ in range(2)] == [{"A": 20}, {"A": 20}]


def test_items_are_counted_over_all_prompts_of_a_step() -> None:
    scheduler = make_scheduler(media_items=1)
    for name in "AB":
        scheduler.add(with_media(name, 10, (4, 9)))

    assert shares(step(scheduler)) == {"A": 10, "B": 4}
    assert shares(step(scheduler)) == {"B": 6}


@pytest.mark.parametrize(
    ("request_", "budgets", "reason"),
    [
        pytest.param(with_media("A", 9, (1, 50)), {"encoder_tokens": 49}, "50 encoder tokens", id="too-large-an-item"),
        pytest.param(with_media("A", 9, (1, 5)), {"media_items": 0}, "no media", id="media-where-none-is-taken"),
        pytest.param(
            with_adapter("A", "x", arrival_us=0), {"adapters": 0}, "no adapter", id="an-adapter-where-none-is"
        ),
    ],
)
def test_what_no_step_can_ever_take_is_refused_at_once(request_: Request, budgets: dict[str, int], reason: str) -> None:
    assert reason in (make_scheduler(**budgets).add(request_) or "")


def test_an_adapter_that_is_in_use_costs_nothing_and_another_waits_without_blocking_others() -> None:
    scheduler = make_scheduler(adapters=1)
    for at, (name, adapter) in enumerate((("A", "x"), ("B", "y"), ("C", "x"), ("D", ""))):
        scheduler.add(with_adapter(name, adapter, arrival_us=at))

    plan = step(scheduler)

    assert set(shares(plan)) == {"A", "C", "D"}
    assert plan.waiting_reasons == (("adapters_in_use", 1),)
    while "A" in scheduler.requests or "C" in scheduler.requests:
        step(scheduler)
    assert set(shares(step(scheduler))) == {"B"}, "the last user of the other one has left"


def test_many_that_wait_for_an_adapter_do_not_hide_who_waits_for_none() -> None:
    scheduler = make_scheduler(adapters=1)
    scheduler.add(with_adapter("A", "x", arrival_us=0))
    for at in range(1, 21):
        scheduler.add(with_adapter(f"B{at}", "y", arrival_us=at))
    scheduler.add(with_adapter("C", "", arrival_us=30))

    plan = step(scheduler)

    assert set(shares(plan)) == {"A", "C"}
    assert plan.waiting_reasons == (("adapters_in_use", 20),)


def test_an_adapter_that_never_rests_does_not_keep_another_out_for_ever() -> None:
    """After a number of overtakes nobody with an adapter passes; whoever has none does not prolong the wait."""
    scheduler = make_scheduler(adapters=1)
    scheduler.add(with_adapter("X0", "x", arrival_us=0))
    step(scheduler)
    scheduler.add(with_adapter("Y", "y", arrival_us=1))
    at = 2
    while scheduler.requests["Y"].status is not RequestStatus.RUNNING:
        assert at < 200, "Y starves"
        scheduler.add(with_adapter(f"X{at}", "x", arrival_us=at))
        scheduler.add(with_adapter(f"N{at}", "", arrival_us=at))
        step(scheduler)
        at += 1
    overtakers = [name for name, request in scheduler.requests.items() if request.status is RequestStatus.WAITING]
    assert overtakers, "those of x that came later wait now"
    assert not [name for name in overtakers if name.startswith("N")], "who has no adapter passed all the time"
