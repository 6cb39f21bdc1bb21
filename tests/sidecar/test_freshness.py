from __future__ import annotations

import pytest

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import EngineState, RequestState
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.freshness import STOPPED_US, Sight
from sluice_sidecar.capacity.ledger import LEASE_US
from sluice_sidecar.capacity.look import Look
from sluice_sidecar.capacity.room import Room

S = 1_000_000


def sight() -> Sight:
    return Sight(stale_after_us=S // 2, blind_after_us=5 * S)


def room(state: EngineState | None = None) -> Room:
    """A room that has just seen a state, at second 100."""
    found = Room(live_config(), stale_after_us=S // 2, blind_after_us=5 * S)
    found.observe(state or ready_state(), 100 * S, 100 * S)
    return found


@pytest.mark.parametrize(
    ("age_us", "freshness"),
    [
        pytest.param(0, "fresh", id="a-new-state"),
        pytest.param(S // 2, "fresh", id="half-a-second-is-fresh"),
        pytest.param(S // 2 + 1, "stale", id="more-is-stale"),
        pytest.param(5 * S, "stale", id="five-seconds-are-stale"),
        pytest.param(5 * S + 1, "blind", id="more-is-blind"),
    ],
)
def test_how_far_a_state_is_trusted(age_us: int, freshness: str) -> None:
    found = sight()
    assert found.freshness(0) == "none"

    found.saw(ready_state(), 10 * S, 10 * S)

    assert found.freshness(10 * S + age_us) == freshness


def test_a_state_from_the_future_is_of_now() -> None:
    found = sight()
    found.saw(ready_state(), 99 * S, 10 * S)

    assert found.age_us(11 * S) == S


def test_a_clock_that_went_back_does_not_keep_a_state_fresh() -> None:
    found = sight()
    found.saw(ready_state(), 3_600 * S, 3_600 * S)

    assert found.age_us(10 * S) == 0
    assert found.freshness(16 * S) == "blind"


@pytest.mark.parametrize(
    ("then_us", "jumped"),
    [
        pytest.param(200_000, False, id="a-poll-later"),
        pytest.param(STOPPED_US, False, id="polls-that-were-very-slow"),
        pytest.param(STOPPED_US + 1, True, id="a-machine-that-slept"),
        pytest.param(-1, True, id="a-clock-that-went-back"),
    ],
)
def test_a_gate_that_did_not_run_for_a_while_notices(then_us: int, jumped: bool) -> None:  # noqa: FBT001  # a table
    found = sight()
    assert not found.looked(100 * S)

    assert found.looked(100 * S + then_us) is jumped
    assert found.faults["clock_jump"] == jumped


def test_another_boot_is_a_reset_and_the_first_one_is_none() -> None:
    found = room()
    found.observe(ready_state(boot_id="boot-2"), 101 * S, 101 * S)
    found.observe(ready_state(boot_id="boot-2"), 102 * S, 102 * S)

    assert dict(found.sight.faults) == {"reset": 1}


@pytest.mark.parametrize("absent", ["pool", "derived", "step_cost"])
def test_a_missing_part_is_not_zero_the_last_state_stays_and_grows_old(absent: str) -> None:
    found = room()
    limits = found.limits

    found.observe(ready_state(**{absent: None}), 106 * S, 106 * S)

    assert found.limits is limits
    assert found.sight.faults["missing"] == 1
    assert found.freshness(106 * S) == "blind"


def test_no_lease_ends_because_the_machine_slept() -> None:
    found = room()
    permit = found.reserve("a", Cost((ChoiceCost(10, 10),)), Look(0), 100 * S)
    awake_us = 100 * S + 2 * LEASE_US

    found.observe(ready_state(), awake_us, awake_us)
    found.ledger.expire(awake_us)

    assert permit.open


def test_stale_and_blind_have_less_room_than_fresh() -> None:
    found = room()
    for name in "abcd":
        found.reserve(name, Cost((ChoiceCost(10, 10),)), Look(0), 100 * S)
    ages_us = (0, S, 6 * S)

    assert [found.freshness(100 * S + age_us) for age_us in ages_us] == ["fresh", "stale", "blind"]
    assert [found.sequences(100 * S + age_us) for age_us in ages_us] == [4, 3, 2]
    assert [found.ceiling_blocks(100 * S + age_us) for age_us in ages_us] == [95, 76, 76]


def test_while_a_state_grows_old_the_prefill_it_told_of_is_taken_to_go_on() -> None:
    found = room()
    found.reserve("a", Cost((ChoiceCost(1_000, 10),)), Look(0), 100 * S)
    found.observe(ready_state(seq=2), 100 * S, 100 * S)
    assert found.limits is not None
    asked = Cost((ChoiceCost(100, 10),))
    at = [found.predicted_ttft_us(found.limits, asked, 100 * S + ms * 1_000) for ms in (0, 20, 400)]

    # 1,000 tokens in two steps, then the own ones; later than all of the queue's time there is only oneself.
    assert at[1] == at[0] - 20_000
    assert at[2] == found.limits.prefill_us(0, 100, 1)


def test_what_entered_since_the_state_is_not_taken_to_have_gone_on() -> None:
    found = room()
    found.reserve("a", Cost((ChoiceCost(1_000, 10),)), Look(0), 100 * S)
    assert found.limits is not None

    asked = Cost((ChoiceCost(100, 10),))
    assert found.predicted_ttft_us(found.limits, asked, 100 * S + 400_000) == found.limits.prefill_us(1_000, 100, 1)


def test_a_state_that_stands_still_brings_nobody_back_who_has_left_since() -> None:
    found = room()
    permit = found.reserve("a", Cost((ChoiceCost(10, 10),)), Look(0), 100 * S)
    listed = RequestState(
        id="a", choice=0, status="running", prompt_tokens=10, computed_tokens=10, output_tokens=1, max_tokens=10,
        blocks=1, incarnation=0, preemptions=0,
    )  # fmt: skip
    frozen = ready_state(seq=2, running_requests=1, requests=(listed,))
    found.observe(frozen, 101 * S, 101 * S)
    permit.completed = True
    permit.close(102 * S)
    for at_s in (102, 105, 106):
        found.observe(frozen, 101 * S, at_s * S)

        assert found.inside(at_s * S) == 0
        assert found.state_age_us(at_s * S) == (at_s - 101) * S
