"""Runs: every request ends once, equal seeds give equal bytes, and clients, gate and router do what they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.scenes import document, found, outcome
from sluice_engine import codec
from sluice_engine.core.steptime import StepTable
from sluice_sidecar.errors import Refusal
from sluice_simulator import report, scenario
from sluice_simulator.call import Call, Watch
from sluice_simulator.run import Finished, World

POISSON = "loads__0__arrivals__poisson__requestsPerSecond"
OVERLOADED = {POISSON: 60, "duration": "8s", "machine__kvCapacityTokens": 16_384}


def test_the_same_scenario_and_seed_give_the_same_bytes() -> None:
    changes = {"machine__noisePercent": 8, **OVERLOADED}

    first, second = (json.dumps(found(document(**changes))) for _ in range(2))

    assert first == second
    assert json.dumps(found(document(**changes, seed=8))) != first


def test_all_that_is_offered_to_a_pod_with_room_is_good() -> None:
    total = found(document())["total"]

    assert total["outcomes"] == {"finished": total["requests"]}
    assert total["good_percent"] == 100
    assert total["attempts"] == total["requests"] > 50


def test_an_overloaded_pod_refuses_and_keeps_the_promise_to_the_rest() -> None:
    report = found(document(**OVERLOADED))
    total = report["total"]

    assert total["refusals"]
    assert total["outcomes"]["refused"] > 0
    assert total["ttft_ms"]["p99"] <= 2000
    assert total["missed"] == {"ttft": 0, "itl": 0, "deadline": 0}


def test_without_a_gate_the_queue_grows_and_goodput_falls() -> None:
    gated, open_door = (found(document(**OVERLOADED, gate=gate))["total"] for gate in ("Enabled", "Disabled"))

    assert open_door["outcomes"] == {"finished": open_door["requests"]}
    assert open_door["missed"]["ttft"] > 0
    assert open_door["ttft_ms"]["p99"] > 2 * gated["ttft_ms"]["p99"]


@pytest.mark.parametrize("gate", ["Enabled", "Disabled"])
@pytest.mark.parametrize("router", ["RoundRobin", "LeastLoaded"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_request_ends_exactly_once_and_everything_drains(router: str, gate: str, data: st.DataObject) -> None:
    changed = document(
        **{
            POISSON: data.draw(st.sampled_from([2, 20, 80])),
            "duration": "3s",
            "seed": data.draw(st.integers(0, 1000)),
            "replicas": data.draw(st.integers(1, 3)),
            "router": router,
            "gate": gate,
            "machine__kvCapacityTokens": data.draw(st.sampled_from([4096, 65_536])),
            "machine__maxLengthTokens": 4096,
            "machine__noisePercent": data.draw(st.sampled_from([0, 20])),
            "loads__0__patience": data.draw(st.sampled_from([None, "100ms", "2s"])),
            "loads__0__deadline": data.draw(st.sampled_from([None, "300ms", "4s"])),
            "loads__0__maxTokens": data.draw(st.sampled_from([None, 64])),
            "loads__0__outputTokens": {"mean": 40, "most": 400},
            "promptBytesPerToken": data.draw(st.sampled_from([None, 4])),
            "admission__maxWait": data.draw(st.sampled_from(["0s", "1s"])),
        }
    )

    result = outcome(changed)

    load = result.tally.loads["chat"]
    assert sum(load.outcomes.values()) == load.requests
    assert load.good <= load.outcomes["finished"]
    for replica in result.replicas:
        scheduler = replica.loop.scheduler
        assert not scheduler.requests
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        if replica.gate is not None:
            assert not replica.gate.room.ledger.entries
            assert replica.gate.room.ledger.double_closes_total == 0
            assert replica.gate.waiting == 0


def test_a_closed_loop_never_has_more_in_flight_than_clients() -> None:
    arrivals = {"closedLoop": {"clients": 5, "thinkTime": "100ms"}}

    result = outcome(document(loads__0__arrivals=arrivals))

    assert result.tally.batch_most <= 5
    assert result.tally.loads["chat"].outcomes["finished"] > 50


def test_impatient_clients_leave_and_their_blocks_come_back() -> None:
    changes: dict[str, Any] = {**OVERLOADED, "gate": "Disabled", "loads__0__patience": "500ms"}
    changes["loads__0__retries"] = {"most": 0}

    total = found(document(**changes))["total"]

    assert total["outcomes"]["left"] > 0
    assert total["ttft_ms"]["max"] <= 500


def test_a_client_that_times_out_leaves_in_the_middle_of_its_answer_and_comes_again() -> None:
    changes: dict[str, Any] = {"loads__0__timeout": "700ms", "loads__0__retries": {"most": 1}}

    total = found(document(**changes))["total"]

    assert total["latency_ms"]["p50"] <= 700
    assert total["outcomes"]["left"] > 0
    assert total["attempts"] >= total["requests"] + total["outcomes"]["left"]


def test_a_client_that_has_left_for_good_does_not_come_again() -> None:
    result = outcome(document(loads__0__abandons={"percent": 30, "within": "2s"}))

    load = result.tally.loads["chat"]
    assert 0 < load.outcomes["left"] < 0.3 * load.requests
    assert load.attempts == load.requests
    (replica,) = result.replicas
    assert replica.gate is not None
    assert not replica.gate.room.ledger.entries
    assert replica.loop.scheduler.pool.num_free == replica.loop.scheduler.pool.num_blocks


def test_an_engine_is_slow_for_a_while_and_for_that_while_only() -> None:
    slow = [{"at": "5s", "lasting": "5s", "factor": 4}]

    plain, slowed = (outcome(document(**changes)) for changes in ({}, {"machine__slowdowns": slow}))

    def decodes(finished: Finished, from_s: int, to_s: int) -> int:
        line = finished.tally.timeline
        return sum(
            one.decode_tokens
            for index, one in enumerate(line.slices)
            if from_s * 1_000_000 <= index * line.width_us < to_s * 1_000_000
        )

    assert decodes(slowed, 0, 4) == decodes(plain, 0, 4)
    assert decodes(slowed, 5, 10) < 0.8 * decodes(plain, 5, 10)
    assert slowed.tally.loads["chat"].missed_itl > plain.tally.loads["chat"].missed_itl


def test_who_watches_is_told_of_every_refusal_and_every_end() -> None:
    class Counts(Watch):
        refusals = ends = good = 0

        def refused(self, call: Call, refusal: Refusal) -> None:
            self.refusals += 1

        def over(self, call: Call, outcome: str, *, good: bool) -> None:
            self.ends += 1
            self.good += good

    watch = Counts()
    result = World(scenario.parse(document(**OVERLOADED), "small.yaml"), watch=watch).happen()

    load = result.tally.loads["chat"]
    assert watch.refusals == load.refusals.total() > 0
    assert (watch.ends, watch.good) == (load.requests, load.good)


def test_an_answer_after_its_deadline_is_not_good() -> None:
    total = found(document(loads__0__deadline="1s"))["total"]

    late = total["missed"]["deadline"] + total["outcomes"].get("expired", 0)
    assert late > 0
    assert total["good"] + late == total["requests"]
    assert total["latency_ms"]["max"] <= 1000


def test_retries_are_made_as_often_as_the_client_makes_them() -> None:
    none, two = (
        found(document(**OVERLOADED, loads__0__retries={"most": most}))["total"]["attempts"] for most in (0, 2)
    )

    assert none == found(document(**OVERLOADED, loads__0__retries={"most": 0}))["total"]["requests"]
    assert two > none


def test_a_retry_budget_bounds_the_storm() -> None:
    rude: dict[str, Any] = {"most": 50, "initial": "100ms", "honourRetryAfter": False}

    storm, bounded = (
        found(document(**OVERLOADED, loads__0__retries={**rude, **budget}))["total"]
        for budget in ({}, {"budgetPercent": 20})
    )

    assert storm["attempts"] > 3 * storm["requests"]
    assert bounded["attempts"] <= 1.2 * bounded["requests"] + 11


def test_more_replicas_serve_more() -> None:
    changes = {**OVERLOADED, "loads__0__retries": {"most": 0}}
    one, three = (found(document(**changes, replicas=replicas))["total"]["good"] for replicas in (1, 3))

    assert three > 1.3 * one


def test_the_least_loaded_replica_is_chosen() -> None:
    result = outcome(document(replicas=4, router="LeastLoaded", **{POISSON: 0.5}))

    steps = [replica.loop.scheduler.step for replica in result.replicas]
    assert steps[0] == max(steps), "of equals the first: most of the time all are idle"
    assert steps[3] < steps[0] / 4


def test_what_came_in_the_warm_up_is_not_counted() -> None:
    whole, late = (found(document(warmup=warmup))["total"]["requests"] for warmup in ("0s", "10s"))

    assert 0 < late < 0.8 * whole


def test_a_trace_is_replayed_with_its_shared_heads(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100 * number, "input_length": 1100, "output_length": 4, "hash_ids": [1, number + 2, number + 100]}
        for number in range(40)
    ]
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, lines)))
    load = {"name": "m", "arrivals": {"trace": {"format": "Mooncake", "file": "mooncake.jsonl", "speedUp": 2}}}

    total = found(document(loads=[load], duration=None), tmp_path)["total"]

    assert total["outcomes"] == {"finished": 40}
    assert total["requests_per_second"] == pytest.approx(20, rel=0.05)


def test_requests_of_a_trace_that_had_failed_are_left_out_and_told(tmp_path: Path) -> None:
    rows = [f"{second},GPT-4,100,{second % 2},100,API log" for second in range(10)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (tmp_path / "burst.csv").write_text("\n".join([header, *rows]))
    load = {"name": "b", "arrivals": {"trace": {"format": "BurstGPT", "file": "burst.csv"}}}

    told = found(document(loads=[load], duration=None), tmp_path)

    assert told["left_out"] == {"b": 5}
    assert told["total"]["requests"] == 5
    assert any("5 requests of the trace of b" in line for line in report.text(told))


def test_a_slower_machine_takes_longer_than_its_table_says(tmp_path: Path) -> None:
    """It stays as slow as it is said to be, however much the engine learns of it."""
    cells = (20_000, 20_000, 90_000, 90_000, 30_000, 30_000, 100_000, 100_000)
    table = StepTable(decode_axis=(0, 64), prefill_axis=(0, 2048), context_axis=(0, 65_536), median_us=cells)
    (tmp_path / "table.json").write_text(codec.to_json(table))
    machine = {"machine__stepTimes__table": "table.json", "machine__noisePercent": 0, "duration": "60s"}
    usual, slow = (
        found(document(**machine, machine__slowdown=by), tmp_path)["total"]["itl_ms"]["p50"] for by in (1.0, 2.0)
    )

    assert slow == pytest.approx(2 * usual, rel=0.1)


def test_a_larger_chunk_lengthens_gaps_and_shortens_first_tokens() -> None:
    changes = {
        POISSON: 3,
        "gate": "Disabled",
        "machine__kvCapacityTokens": 262_144,
        "scheduling__maxSequences": 64,
        "loads__0__promptTokens": {"distribution": "Fixed", "tokens": 6000},
    }
    small, large = (
        found(document(**changes, slo__enforcement="Observe", scheduling__prefillChunkTokens=chunk))["total"]
        for chunk in (512, 8192)
    )

    assert large["itl_ms"]["p99"] > 1.5 * small["itl_ms"]["p99"]
    assert large["ttft_ms"]["p50"] < small["ttft_ms"]["p50"]
