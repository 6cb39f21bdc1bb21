"""Deadlines of running requests: the first token's until it has come, then the last one's."""

from __future__ import annotations

import pytest

from engine.ordering import ids, waiter
from engine.scripted import ScriptedRunner, make_limits, make_request
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.deadlines import Deadlines
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile

SECOND = 1_000_000


def began(request: Request) -> Request:
    request.tokens.append(7)
    return request


@pytest.mark.parametrize(
    ("request_", "now_us", "missed"),
    [
        pytest.param(waiter("a"), 10**15, [], id="no-deadline-is-never-missed"),
        pytest.param(waiter("a", first_s=5), 5 * SECOND, [], id="at-the-very-moment-it-is-in-time"),
        pytest.param(waiter("a", first_s=5), 5 * SECOND + 1, ["a"], id="a-first-token-that-did-not-come"),
        pytest.param(began(waiter("a", first_s=5)), 9 * SECOND, [], id="a-first-token-that-came-has-kept-its-own"),
        pytest.param(began(waiter("a", first_s=5, finish_s=8)), 9 * SECOND, ["a"], id="then-the-last-ones-counts"),
        pytest.param(waiter("a", first_s=9, finish_s=5), 6 * SECOND, ["a"], id="the-earlier-of-the-two"),
        pytest.param(waiter("a", prompt=10**6, finish_s=5), 4 * SECOND, [], id="running-work-is-not-given-up-early"),
    ],
)  # fmt: skip
def test_missed(request_: Request, now_us: int, missed: list[str]) -> None:
    deadlines = Deadlines()
    deadlines.watch(request_)

    assert ids(deadlines.passed(now_us)) == missed
    assert deadlines.passed(now_us) == [], "each is named once"


def test_after_the_first_token_the_request_is_still_watched() -> None:
    deadlines, request = Deadlines(), waiter("a", first_s=5, finish_s=8)
    deadlines.watch(request)
    began(request)

    assert deadlines.passed(6 * SECOND) == []
    assert ids(deadlines.passed(8 * SECOND + 1)) == ["a"]


def test_who_left_is_not_named() -> None:
    deadlines, request = Deadlines(), waiter("a", first_s=5)
    deadlines.watch(request)
    deadlines.forget(request)

    assert deadlines.passed(9 * SECOND) == []


@pytest.mark.parametrize(
    ("first_us", "finish_us", "outcome"),
    [
        pytest.param(None, 60_000, Outcome.EXPIRED, id="its-last-token-would-come-too-late"),
        pytest.param(3_000_000, 60_000, Outcome.EXPIRED, id="the-earlier-of-both-counts"),
        pytest.param(60_000, None, Outcome.LENGTH, id="a-first-token-in-time-frees-it-of-that-deadline"),
    ],
)
def test_the_deadline_of_a_running_request_decides_how_it_ends(
    first_us: int | None, finish_us: int | None, outcome: Outcome
) -> None:
    limits = make_limits()
    scheduler = Scheduler(limits, BlockPool(64, limits.block_tokens), PlanningProfile(), max_length_tokens=400)
    now = iter(range(0, 1 << 40, 5_000))
    loop = EngineLoop(scheduler, ScriptedRunner(limits.block_tokens), lambda: next(now))
    request = make_request("A", 4, 12)
    request.first_token_deadline_us = first_us
    request.finish_deadline_us = finish_us
    request.expected_output_tokens = 1
    loop.add(request)
    while loop.has_work:
        loop.step()

    assert request.outcome is outcome
    assert request.num_output == 12 if outcome is Outcome.LENGTH else 0 < request.num_output < 12
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
