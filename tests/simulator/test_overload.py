"""The experiments of benchmarks/overload.py in small: what each is about holds, and its control fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from experiments import aborts, faults, metastable, plots, retry_after, seeds, steady
from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, chat, scene


def test_of_several_seeds_the_worst_counts() -> None:
    found = []
    for seed, goodput, missed in ((1, 0.9, 0.5), (2, 1.1, 0.0), (3, 1.0, 2.0)):
        findings = Findings(data={"of": seed})
        findings.bar("goodput", goodput, "", 0.95)
        findings.most("missed", missed, "%", 1.0)
        found.append((seed, findings))

    whole = seeds.merged(found)

    assert [(bar.name, bar.value, bar.median, bar.ok) for bar in whole.bars] == [
        ("goodput", 0.9, 1.0, False),
        ("missed", 2.0, 0.5, False),
    ]
    assert whole.data["of"] == 1
    assert whole.data["seeds"]["missed"] == {"seed 1": 0.5, "seed 2": 0.0, "seed 3": 2.0}


def test_what_was_found_is_drawn(tmp_path: Path) -> None:
    curve = {"rate": [1.0, 2.0], "gate": [1.0, 1.5], "no gate": [1.0, 0.0]}
    data = {"steady": {"curve": curve}, "metastable": {"half speed": {"gate": [100.0], "no gate": [0.0]}, "seeds": {}}}

    written = plots.draw(data, tmp_path / "images")

    assert [path.name for path in written] == ["overload-goodput.png", "overload-half-speed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_scene_has_the_seed_that_is_set() -> None:
    load = chat([(1.0, 1)])

    with seeds.using(7):
        assert scene([load], 1)["seed"] == 7
    assert scene([load], 1)["seed"] == seeds.SEEDS[0]


def test_a_gate_keeps_the_promise_at_twice_the_capacity_where_a_queue_keeps_none() -> None:
    # One late step is five late answers: in half a minute that is more than one in a hundred.
    gated, queue = (steady.at(2 * CHAT_CAPACITY, 90, gate=gate, retries=False) for gate in (True, False))

    assert gated.goodput > 0.85 * CHAT_CAPACITY
    assert gated.missed_percent <= 1
    assert queue.goodput < 0.2 * CHAT_CAPACITY
    assert gated.leftovers == queue.leftovers == 0


@pytest.mark.slow
def test_a_spike_is_over_when_it_is_over() -> None:
    gated, queue = (metastable.happens("spike", 60, gate=gate) for gate in (True, False))

    from_s = metastable.TRIGGER_S + metastable.TRIGGER_LASTS_S + metastable.BACK_WITHIN_S
    assert gated.watched.good_percent(from_s, from_s + 40) >= 95
    assert queue.watched.good_percent(from_s, from_s + 40) < 20


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_leaves_nothing_over(name: str) -> None:
    one = faults.happens(faults.FAULTS[name][0])

    assert one.leftovers == 0
    assert one.load.missed_ttft == 0
    assert one.preemptions <= faults.DECLARED_PER_MINUTE * 2


@pytest.mark.slow
def test_thresholds_over_a_state_that_hangs_in_a_flood_lose_what_the_ledger_keeps() -> None:
    until_s = faults.AT_S + 2 * faults.LASTS_S * faults.HANGS
    plain, gate, control = (
        faults.hangs(fault=fault, thresholds=thresholds).watched.good_per_second(faults.AT_S, until_s)
        for fault, thresholds in ((False, False), (True, False), (True, True))
    )

    assert gate >= 0.7 * plain
    assert control <= 0.6 * plain


@pytest.mark.slow
def test_what_a_client_held_is_free_within_a_second_of_its_leaving() -> None:
    one, leavers = aborts.happens(20, tells_engine=True)
    _, control = aborts.happens(20, tells_engine=False)

    assert one.leftovers == 0
    assert max(leavers.freed_us) < 1_000_000 < max(control.freed_us)


def test_a_suggested_wait_is_judged_by_the_size_of_what_was_refused() -> None:
    asked = retry_after.Asked(lambda _: True)
    # Of a small one a room within the first second counts as a second; a large one is told half of what it takes.
    asked.waits = {
        "chat": [retry_after.Wait(100 + size, 20_000, 400_000) for size in range(90)],
        "long": [retry_after.Wait(9_000 + size, 3_000_000, 6_000_000) for size in range(10)],
    }

    errors = [retry_after.median_error(tenth) for tenth in asked.tenths()]

    assert errors == [0.0] * 9 + [50.0]
    assert retry_after.median_error(asked.all) == 0.0
    assert retry_after.median_error(asked.waits["chat"], int) == 95.0


@pytest.mark.slow
def test_a_crowd_that_was_sent_away_comes_back_spread() -> None:
    spread, narrow = (retry_after.returning(30, spread=spread) for spread in (True, False))

    assert max(spread) <= 2 * sum(spread) / len(spread)
    assert max(narrow) > 2 * sum(narrow) / len(spread)
