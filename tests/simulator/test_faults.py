"""Faults on the way of the state: each leaves the gate with its expected mode, and nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.scenes import document
from sluice_sidecar.errors import Reason
from sluice_simulator import scenario
from sluice_simulator.errors import InvalidInput
from sluice_simulator.run import Finished, World

BUSY: dict[str, Any] = {
    "loads__0__arrivals__poisson__requestsPerSecond": 40,
    "loads__0__retries": {"most": 0},
    "machine__kvCapacityTokens": 16_384,
    "duration": "13s",
}


def run_with(fault: dict[str, Any], at_s: float, **changes: Any) -> tuple[Finished, str, Reason | None, int]:
    """The run, and what the gate thought at a moment: freshness, why it was shut, choices that may run."""
    world = World(scenario.parse(document(**{**BUSY, **changes}, faults=[fault]), "small.yaml"))
    (replica,) = world.replicas
    gate = replica.gate
    assert gate is not None
    seen: list[tuple[str, Reason | None, int]] = []

    def look() -> None:
        now_us = world.events.now_us
        seen.append((gate.room.freshness(now_us), gate.unavailable, gate.room.slots_for(100, now_us)))

    world.events.at(round(at_s * 1e6), look)
    finished = world.happen()
    return (finished, *seen[0])


def assert_all_is_released(finished: Finished) -> None:
    (replica,) = finished.replicas
    assert replica.gate is not None
    assert not replica.gate.room.ledger.entries
    assert replica.gate.room.ledger.double_closes_total == 0
    assert replica.gate.waiting == 0
    scheduler = replica.loop.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    load = finished.tally.loads["chat"]
    assert sum(load.outcomes.values()) == load.requests


@pytest.mark.parametrize(
    ("fault", "at_s", "freshness"),
    [
        pytest.param({"kind": "StateHangs", "lasting": "8s"}, 6.0, "stale", id="a-state-that-hangs-is-stale"),
        pytest.param({"kind": "StateHangs", "lasting": "8s"}, 10.5, "blind", id="for-long-it-is-blind"),
        pytest.param({"kind": "StateFails", "lasting": "8s"}, 10.5, "blind", id="an-error-is-no-state"),
        pytest.param({"kind": "StateNaN", "lasting": "8s"}, 10.5, "blind", id="a-number-that-is-none-is-no-state"),
        pytest.param({"kind": "StateHangs", "lasting": "2s"}, 12.0, "fresh", id="and-it-comes-back"),
        pytest.param({"kind": "StateDelayed", "lasting": "8s", "by": "2s"}, 11.0, "stale", id="an-old-state-is-stale"),
        pytest.param({"kind": "CountersReset"}, 6.0, "fresh", id="counters-that-begin-anew-are-no-fault"),
    ],
)
def test_the_gate_knows_how_far_to_trust_what_it_hears(fault: dict[str, Any], at_s: float, freshness: str) -> None:
    finished, seen, unavailable, slots = run_with({"at": "5s", **fault}, at_s)

    assert (seen, unavailable) == (freshness, None)
    assert slots >= 1
    assert finished.tally.loads["chat"].missed_ttft == 0
    assert_all_is_released(finished)


@pytest.mark.parametrize(
    ("at_s", "reason"),
    [
        pytest.param(5.4, Reason.ENGINE_DEAD, id="refused-at-once-while-it-is-down"),
        pytest.param(8.4, None, id="and-let-in-once-it-is-back"),
    ],
)
def test_an_engine_that_restarts_is_no_capacity_and_then_an_empty_one(at_s: float, reason: Reason | None) -> None:
    finished, _, unavailable, _ = run_with({"kind": "EngineRestarts", "at": "5s", "lasting": "3s"}, at_s)

    load = finished.tally.loads["chat"]
    assert unavailable is reason
    assert load.outcomes["failed"] > 0
    assert load.refusals[Reason.ENGINE_DEAD.value] > 50
    assert_all_is_released(finished)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"kind": "ClockJumps", "at": "5s", "by": "600s"}, id="the-clock-jumps"),
        pytest.param({"kind": "LoopStalls", "at": "5s", "lasting": "10s", "by": "500ms"}, id="the-loop-stalls"),
        pytest.param({"kind": "StateMissing", "at": "5s", "lasting": "10s"}, id="parts-of-the-state-are-missing"),
        pytest.param({"kind": "StateFrozen", "at": "5s", "lasting": "10s"}, id="the-state-stands-still"),
    ],
)
@pytest.mark.parametrize("patience", [None, "400ms"])
def test_whatever_happens_everything_is_given_back_once(fault: dict[str, Any], patience: str | None) -> None:
    finished, _, _, _ = run_with(fault, 5.1, loads__0__patience=patience, loads__0__retries={"most": 2})

    assert finished.tally.loads["chat"].good > 50
    assert_all_is_released(finished)


def test_a_gate_that_is_told_other_step_times_learns_how_far_they_are_off() -> None:
    factors: dict[float, float] = {}
    for told in (1.0, 0.25):
        changes = {**BUSY, "machine__toldFactor": told, "loads__0__promptTokens": {"mean": 1000}}
        world = World(scenario.parse(document(**changes), "small.yaml"))
        (replica,) = world.replicas
        assert replica.gate is not None
        world.happen()
        factors[told] = replica.gate.room.learned.bias.factor(world.tally.last_end_us)

    # Nearly all of what came is covered, not its mean alone: so the right times have a factor too.
    assert factors[1.0] < 1.5 < factors[0.25]


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        pytest.param({"kind": "StateLies", "at": "5s"}, "faults[0].kind: must be one of StateHangs,", id="kind"),
        pytest.param({"kind": "StateHangs", "at": "5s"}, "faults[0].lasting: is missing", id="no-end"),
        pytest.param({"kind": "ClockJumps", "at": "5s"}, "faults[0].by: is missing", id="no-measure"),
        pytest.param(
            {"kind": "StateHangs", "at": "5s", "lasting": "1s", "by": "1s"},
            "faults[0].by: is not a known key",
            id="a-measure-of-nothing",
        ),
    ],
)
def test_a_fault_that_breaks_a_rule_is_refused(fault: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem.replace("[", r"\[").replace("]", r"\]")):
        scenario.parse(document(faults=[fault]), "small.yaml")
