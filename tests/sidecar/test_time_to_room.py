"""When there will be room in the KV cache for a call that finds none now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import PoolState
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.capacity.peak import FuturePeak, Growth
from sluice_sidecar.errors import Refusal

S = 1_000_000
BLOCK = 4

growths = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 5)).map(lambda sizes: Growth(*sizes))


def blocks(one: Growth, step: int) -> int:
    """What it holds so many steps after it entered."""
    if step > one.end:
        return 0
    return -(-(one.held + min(one.grows, max(0, step - one.prefill_steps))) // BLOCK)


def fits(inside: list[Growth], asking: list[Growth], at: int, ceiling: int) -> bool:
    """Whether these may enter at that step, right after whoever ends with it: by counting at every step."""
    left = [one for one in inside if one.end > at]
    last = max([one.end for one in left] + [at + one.end for one in asking])
    return all(
        sum(blocks(one, step) for one in left) + sum(blocks(one, step - at) for one in asking) <= ceiling
        for step in range(at + 1, last + 1)
    )


@settings(deadline=None)
@given(st.lists(growths, max_size=8), st.lists(growths, min_size=1, max_size=2), st.integers(25, 80))
def test_at_the_step_that_is_named_there_is_room(inside: list[Growth], asking: list[Growth], ceiling: int) -> None:
    peak = FuturePeak(BLOCK)
    for one in inside:
        peak.add(one)

    step = peak.steps_until_room(asking, ceiling)

    assert step == 0 or step in {one.end for one in inside}
    if fits([], asking, 0, ceiling):
        assert fits(inside, asking, step, ceiling)


def test_room_comes_with_the_end_that_makes_it() -> None:
    peak = FuturePeak(BLOCK)
    for one in (Growth(20, 10, 0), Growth(20, 40, 0), Growth(8, 4, 0)):
        peak.add(one)
    asking = [Growth(32, 4, 2)]

    assert peak.steps_until_room(asking, 100) == 0
    assert peak.steps_until_room(asking, 24) == 10, "the end at step 4 is not enough"
    assert peak.steps_until_room(asking, 10) == 40


def test_one_that_waits_for_blocks_is_told_more_than_the_rate_at_which_they_are_released() -> None:
    state = ready_state(pool=PoolState(block_tokens=16, total_blocks=40, free_blocks=40))
    state = replace(state, derived=replace(state.derived, max_sequences=16)) if state.derived else state
    door = Admission(
        live_config(ttft_us=60 * S, max_wait_us=0), stale_after_us=600 * S, blind_after_us=900 * S, draw=min
    )
    door.observe(state, 0, 0)
    door.set_unavailable(None, 0)
    now_us = 0
    for index in range(3):
        permit = enter(door, f"m{index}", now_us)
        assert isinstance(permit, Permit)
        now_us += S
        permit.completed = True
        permit.close(now_us)
    while isinstance(verdict := enter(door, f"r{now_us}", now_us), Permit):
        now_us += 1

    assert isinstance(verdict, Refusal)
    room = door.room
    rate_us = room.time_for(1, room.ledger_blocks(), now_us)
    assert rate_us is not None
    assert verdict.wait_us is not None
    assert verdict.wait_us >= rate_us


def enter(door: Admission, name: str, now_us: int) -> Any:
    return door.enter(name, Cost((ChoiceCost(64, 48),)), now_us, lambda _: None)
