"""Who gives way when blocks run out."""

from __future__ import annotations

import pytest

from engine.scripted import make_limits, make_loop, make_request, make_scheduler
from sluice_engine.core.preemption import choose_victim
from sluice_engine.core.request import Request


def running(request_id: str, computed: int, *, arrival: int = 0, preempted: int = 0, protected: int = 0) -> Request:
    request = make_request(request_id, 50, 50, arrival_us=arrival)
    request.num_computed, request.num_preemptions, request.protected_until = computed, preempted, protected
    return request


@pytest.mark.parametrize(
    ("others", "victim"),
    [
        pytest.param([running("B", 10), running("C", 30)], "B", id="the-least-computed"),
        pytest.param([running("B", 10, arrival=1), running("C", 10, arrival=2)], "C", id="the-latest-among-equals"),
        pytest.param([running("B", 40)], "A", id="the-needing-one-itself-when-it-has-least-to-lose"),
        pytest.param([running("B", 5, protected=6), running("C", 15)], "C", id="not-one-that-resumed-without-progress"),
        pytest.param([running("B", 6, protected=6), running("C", 15)], "B", id="one-that-made-progress-may-be-chosen"),
        pytest.param([running("B", 5, preempted=3), running("C", 15)], "C", id="not-one-at-the-cap-of-preemptions"),
        pytest.param([], None, id="nobody-when-it-runs-alone"),
    ],
)
def test_choice_of_a_victim(others: list[Request], victim: str | None) -> None:
    needing = running("A", 20)

    chosen = choose_victim([needing, *others], needing, max_preemptions=3)

    assert (chosen.id if chosen else None) == victim


def test_when_nobody_may_be_chosen_the_latest_goes_so_that_the_oldest_gets_on() -> None:
    needing = running("A", 20, preempted=3)
    others = [running("B", 5, arrival=1, preempted=3), running("C", 30, arrival=2, preempted=3)]

    chosen = choose_victim([needing, *others], needing, max_preemptions=3)

    assert chosen is not None
    assert chosen.id == "C"


def test_a_resumed_request_is_protected_until_a_new_token_has_come_of_it() -> None:
    scheduler = make_scheduler(make_limits(chunk=4), num_blocks=8)
    loop = make_loop(scheduler)
    loop.add(make_request("A", 16, 10))
    young = make_request("B", 10, 10, arrival_us=1)
    loop.add(young)
    while not young.num_preemptions:
        loop.step()
    known = young.num_tokens

    while young not in scheduler.running:
        loop.step()

    assert young.protected_until == known
    assert young.num_computed < known, "its input comes in chunks, so it is protected now"
