"""An impossible state ends the request that it is about, is counted and told; the others go on. In tests it raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.scripted import ScriptedRunner, make_limits, make_request
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.request import Outcome, Request
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile


def make_loop(*, strict: bool = False) -> EngineLoop:
    limits = make_limits()
    pool = BlockPool(64, limits.block_tokens)
    scheduler = Scheduler(limits, pool, PlanningProfile(), max_length_tokens=400, strict=strict)
    ticks = iter(range(0, 1 << 62, 1000))
    return EngineLoop(scheduler, ScriptedRunner(limits.block_tokens), lambda: next(ticks))


def freed_behind_its_back(loop: EngineLoop, request: Request) -> None:
    loop.scheduler.pool.release(list(request.blocks))


def listed_twice(loop: EngineLoop, request: Request) -> None:
    request.blocks.append(request.blocks[0])


@pytest.mark.parametrize("breaking", [freed_behind_its_back, listed_twice])
def test_a_request_with_impossible_blocks_ends_and_the_others_go_on(
    breaking: Callable[[EngineLoop, Request], None],
) -> None:
    loop = make_loop()
    bad, good = make_request("bad", 4, 20), make_request("good", 4, 20, arrival_us=1)
    for request in (bad, good):
        loop.add(request)
    loop.step()
    breaking(loop, bad)
    loop.abort("bad")
    while loop.has_work:
        loop.step()

    assert good.outcome is Outcome.LENGTH
    assert loop.scheduler.faults_total == 1
    assert "request bad: RuntimeError: blocks freed twice" in loop.scheduler.faults[0]


def test_a_request_that_cannot_enter_as_it_was_promised_fails_and_gives_back_all_it_took() -> None:
    loop = make_loop()
    scheduler = loop.scheduler
    bad, good = make_request("bad", 8, 20), make_request("good", 4, 20, arrival_us=1)
    for request in (bad, good):
        loop.add(request)
    enter, calls = scheduler.rows.enter, iter([True])

    def broken(request: Request) -> None:
        if next(calls, False):
            raise IndexError("no slot is left")
        enter(request)

    scheduler.rows.enter = broken  # type: ignore[method-assign]
    told = [emission for emission in loop.step() if emission.outcome is not None]
    while loop.has_work:
        loop.step()

    assert [(emission.request.id, emission.outcome) for emission in told] == [("bad", Outcome.FAILED)]
    assert bad.error is not None
    assert "no slot is left" in bad.error
    assert good.outcome is Outcome.LENGTH
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_request_whose_result_cannot_be_settled_fails_alone() -> None:
    loop = make_loop()
    bad, good = make_request("bad", 4, 20), make_request("good", 4, 20, arrival_us=1)
    for request in (bad, good):
        loop.add(request)
    settle = loop.scheduler.prefix.settle

    def broken(request: Request, num_tokens: int) -> None:
        if request is bad:
            raise KeyError("no such block")
        settle(request, num_tokens)

    loop.scheduler.prefix.settle = broken  # type: ignore[method-assign]
    told = [emission for emission in loop.step() if emission.outcome is not None]
    while loop.has_work:
        loop.step()

    assert [(emission.request.id, emission.outcome) for emission in told] == [("bad", Outcome.FAILED)]
    assert good.outcome is Outcome.LENGTH
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_blocks


def test_in_tests_it_raises() -> None:
    loop = make_loop(strict=True)
    request = make_request("A", 4, 20)
    loop.add(request)
    loop.step()
    freed_behind_its_back(loop, request)

    with pytest.raises(RuntimeError, match="freed twice"):
        loop.abort("A")
