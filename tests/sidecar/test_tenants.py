from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.live_config import TenantConfig
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.progress import Progress
from sluice_sidecar.estimates.work import work_of
from sluice_sidecar.waiting import tenants as module
from sluice_sidecar.waiting.tenants import MAX_IDLE, Tenants, expected_us, used_tokens, used_us
from sluice_sidecar.waiting.wishes import Wanted, Wishes

S = 1_000_000


def limits() -> Limits:
    found = Limits.from_state(ready_state(), live_config())
    assert found is not None
    return found


def test_whoever_has_had_least_for_its_weight_is_due_next() -> None:
    tenants = Tenants((TenantConfig(name="heavy", weight=3),))
    for name in ("heavy", "light"):
        tenants.waits(name)

    served = []
    for number in range(40):
        name = min(("heavy", "light"), key=tenants.virtual)
        tenants.start(name, str(number), 1_000, 0)
        served.append(name)

    assert served.count("heavy") == 30


def test_two_that_wait_all_the_time_never_part_by_more_than_one_request_each() -> None:
    tenants, source = Tenants(()), random.Random(1)
    names, had = ("a", "b", "c"), {"a": 0, "b": 0, "c": 0}
    for name in names:
        tenants.waits(name)

    for number in range(500):
        name = min(names, key=tenants.virtual)
        cost_us = source.randint(1, 1_000) * (10 if name == "c" else 1)
        tenants.start(name, str(number), cost_us, 0)
        had[name] += cost_us
        assert max(had.values()) - min(had.values()) <= 10_000 + 1_000


def test_a_tenant_that_comes_back_has_saved_up_nothing_and_is_next() -> None:
    tenants = Tenants(())
    for name in ("busy", "rare"):
        tenants.waits(name)
        tenants.start(name, f"{name} first", 1_000, 0)
    tenants.waits_no_more("rare")
    tenants.end("rare first", 1_000)
    for number in range(100):
        tenants.start("busy", str(number), 1_000, 0)

    tenants.waits("rare")

    assert tenants.virtual("rare") < tenants.virtual("busy")
    tenants.start("rare", "rare again", 1_000, 0)
    assert tenants.virtual("rare") >= tenants.virtual("busy"), "one request, and it has caught up"


def test_what_a_request_really_used_is_charged_when_it_leaves() -> None:
    tenants = Tenants(())
    for name in ("a", "b"):
        tenants.waits(name)
        tenants.start(name, name, 1_000, 0)

    tenants.end("a", 400)
    tenants.end("b", 3_000)

    assert tenants.virtual("b") - tenants.virtual("a") == 2_600 * 1000


def test_the_share_of_a_tenant_is_told_among_those_that_are_here() -> None:
    tenants = Tenants((TenantConfig(name="a", weight=2),))
    tenants.waits("a")
    tenants.start("a", "1", 3_000, 0)
    assert tenants.shares_percent("a") == (100, 100)
    tenants.waits("b")
    tenants.start("b", "2", 1_000, 0)

    assert tenants.shares_percent("a") == (75, 66)
    assert tenants.shares_percent("b") == (25, 33)
    assert tenants.shares_percent("c") == (0, 25)
    tenants.configure((TenantConfig(name="b", weight=3),))
    assert tenants.shares_percent("a") == (75, 25)


SHORT, LONG = (Cost((ChoiceCost(tokens, 10),)) for tokens in (100, 900))


def crowded() -> Tenants:
    """One has four fifths of what runs, two others a tenth each."""
    tenants = Tenants(())
    for name, booked_us in (("flood", 8_000), ("a", 1_000), ("b", 1_000)):
        tenants.start(name, name, booked_us, 0)
    return tenants


def test_who_has_more_than_its_share_leaves_room_for_what_the_others_ask_for() -> None:
    tenants = crowded()
    tenants.was_short(0, for_others=False)
    tenants.asked("a", SHORT, 0)
    tenants.asked("b", LONG, S // 2)
    tenants.asked("flood", LONG, S // 2)

    assert tenants.kept_from("flood", S // 2) == Wanted(2, 1_020), "what the flood itself asks for is not kept"
    assert tenants.kept_from("a", S // 2) is None, "who has less than its share leaves room for nobody"


def flooded(every_us: int, calls: int) -> Tenants:
    """Two with less than their share have asked at this distance, the last time at 0."""
    tenants = crowded()
    tenants.was_short(0, for_others=False)
    for number in reversed(range(calls)):
        tenants.asked("ab"[number % 2], SHORT, -number * every_us)
    return tenants


@pytest.mark.parametrize(
    ("every_us", "calls", "until_us"),
    [
        pytest.param(S // 20, 40, S, id="who-asks-often-and-stops-has-stopped-after-a-second"),
        pytest.param(S // 4, 40, 2 * S, id="four-a-second-pause-for-two-by-chance"),
        pytest.param(S, 10, 5 * S, id="once-a-second-room-is-kept-for-five"),
        pytest.param(S, 1, S, id="who-asked-once-has-no-habit"),
    ],
)
def test_a_pause_that_chance_explains_gives_no_share_away(every_us: int, calls: int, until_us: int) -> None:
    assert flooded(every_us, calls).kept_from("flood", until_us) is not None
    assert flooded(every_us, calls).kept_from("flood", until_us + 1) is None, "their share may be borrowed"


def test_what_a_flood_asked_for_while_it_was_alone_is_kept_from_nobody() -> None:
    tenants = Tenants(())
    for number in range(50):
        tenants.asked("flood", LONG, number * S // 50)
        tenants.start("flood", str(number), 1_000, number * S // 50)
    tenants.was_short(S, for_others=False)
    tenants.asked("new", SHORT, S)

    assert tenants.kept_from("flood", S) is None, "it is the only one that has anything"
    tenants.start("new", "new", 100, S)
    assert tenants.kept_from("flood", S) == Wanted(1, 110)


def test_a_burst_of_one_that_had_less_than_its_share_of_late_is_not_a_flood() -> None:
    tenants = Tenants(())
    for second in range(60):
        for name, engine_us in (("flood", 4_000), ("bursts", 500), ("b", 500)):
            tenants.start(name, f"{name} {second}", engine_us, second * S)
            tenants.end(f"{name} {second}", engine_us)
    for name, engine_us in (("flood", 4_500), ("bursts", 4_000), ("b", 500)):
        tenants.start(name, name, engine_us, 60 * S)

    assert tenants.is_over("flood")
    assert not tenants.is_over("bursts"), "as much as the flood has now, and little before"
    tenants.start("bursts", "more", 30_000, 60 * S)
    assert tenants.is_over("bursts"), "twice its share and more is too much whatever it had before"


def test_a_flood_that_begins_is_one_before_its_habit_is() -> None:
    tenants = Tenants(())
    for second in range(60):
        for name in ("a", "b", "c"):
            tenants.start(name, f"{name} {second}", 1_000, second * S)
            tenants.end(f"{name} {second}", 1_000)
    for name in ("a", "b", "c"):
        tenants.start(name, name, 1_000, 60 * S)

    tenants.start("flood", "flood", 4_000, 60 * S)

    assert tenants.is_over("flood")


def test_room_is_kept_only_while_there_is_not_enough_for_all() -> None:
    tenants = crowded()
    tenants.asked("a", SHORT, 0)
    assert tenants.kept_from("flood", 0) is None

    tenants.was_short(0, for_others=True)
    assert tenants.kept_from("flood", 0) is None, "what was kept is no proof that there is too little"
    tenants.was_short(0, for_others=False)
    tenants.was_short(9 * S, for_others=True)
    tenants.asked("a", SHORT, 19 * S)

    assert tenants.kept_from("flood", 19 * S) == Wanted(1, 110)
    tenants.asked("a", SHORT, 20 * S)
    assert tenants.kept_from("flood", 20 * S) is None


def test_room_is_kept_where_a_share_is_less_than_a_percent() -> None:
    tenants = crowded()
    tenants.was_short(0, for_others=False)
    for number in range(200):
        tenants.start(f"user-{number}", f"user-{number}", 20, 0)
    tenants.asked("late", SHORT, 0)
    assert tenants.shares_percent("late") == (0, 0)

    assert tenants.kept_from("flood", 0) == Wanted(1, 110)


def test_one_a_little_above_its_share_leaves_room_for_nobody_beside_one_with_far_more() -> None:
    tenants = Tenants(())
    for name, booked_us in (("flood", 50), ("a", 27), ("b", 11), ("c", 12)):
        tenants.start(name, name, booked_us, 0)

    assert tenants.is_over("flood")
    assert not tenants.is_over("a"), "it has more than a quarter, and about half of what the flood has"


def test_however_many_have_asked_a_decision_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = crowded()
    tenants.was_short(0, for_others=False)
    tenants.asked("a", SHORT, 0)
    for name in "cdef":
        tenants.start(name, name, 8_000, 0)
        tenants.asked(name, SHORT, 0)
    assert tenants.kept_from("flood", 0) is not None

    monkeypatch.setattr(module, "LOOKED_AT", 4)

    assert tenants.kept_from("flood", 0) is None


def test_the_fullest_two_seconds_of_the_last_thirty_count() -> None:
    wishes = Wishes()
    for second, calls in ((0, 5), (2, 2), (3, 1), (7, 4)):
        for _ in range(calls):
            wishes.add(SHORT, second * S)
        if second == 3:
            wishes.add(LONG, second * S)

    assert wishes.most(7 * S) == Wanted(5, 1_240), "requests of one second, tokens of two others on end"
    assert wishes.most(30 * S) == Wanted(4, 1_240)
    assert wishes.most(32 * S) == Wanted(4, 1_020), "of the two one is forgotten"
    assert wishes.most(37 * S) == Wanted()


def test_who_asked_long_ago_is_forgotten() -> None:
    tenants = Tenants(())
    for number in range(5_000):
        tenants.asked(f"user-{number}", SHORT, number * S // 100)

    assert len(tenants._recent) <= 101


def test_a_tenant_is_crowded_where_another_has_twice_its_own_share() -> None:
    tenants = crowded()
    assert tenants.is_crowded("a")
    assert tenants.is_crowded("new")
    assert not tenants.is_crowded("flood")
    tenants.end("flood", 8_000)
    assert not tenants.is_crowded("a"), "two that have the same"


def test_names_from_outside_do_not_fill_the_memory() -> None:
    tenants = Tenants(())
    for number in range(5 * MAX_IDLE):
        name = f"user-{number}"
        tenants.waits(name)
        tenants.start(name, name, 1_000, 0)
        tenants.waits_no_more(name)
        tenants.end(name, 10_000)

    assert len(tenants) <= MAX_IDLE
    assert tenants.shares_percent("another") == (0, 100)


def test_an_end_that_nobody_knows_changes_nothing() -> None:
    assert Tenants(()).end("never", 5) is None


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        # 1000 tokens at 50 µs; the pool of 1,600 tokens is held for one step of 10 ms only.
        pytest.param(1000, 1, 50_000 + 2_500, id="a-prompt-costs-the-engine-time"),
        # 13 blocks held on average, of 100, for 200 steps of 10 ms; by tokens it were 200 × 10 ms / 4.
        pytest.param(100, 200, 500_000 + 5_000, id="an-answer-shares-its-steps-with-others"),
        pytest.param(700, 200, 50 * (700 * 50 + 200 * 10_000) // 100, id="a-long-one-holds-the-cache"),
    ],
)
def test_a_call_costs_the_larger_of_its_tokens_and_its_cache(prompt: int, output: int, expected: int) -> None:
    assert expected_us(work_of(Cost((ChoiceCost(prompt, output),)), limits()), limits()) == expected


def test_what_was_used_goes_by_what_was_computed_and_how_long_it_stayed() -> None:
    half = Progress(800, 100, 100, 100, computed_tokens=400)
    whole = Progress(800, 100, 100, 100, computed_tokens=800, output_tokens=50)

    assert used_us((half,), 0, limits(), completed=False) == 400 * 50
    assert used_us((whole,), S, limits(), completed=True) == 52 * S // 100
    assert used_tokens((half,), completed=False) == 800
    assert used_tokens((Progress(800, 100, 100, 100),), completed=False) == 0
    assert used_tokens((whole, whole), completed=True) == 1_700


@given(prompt=st.integers(1, 1_500), output=st.integers(1, 1_500))
def test_a_call_that_goes_as_expected_costs_what_was_expected(prompt: int, output: int) -> None:
    found = limits()
    work = work_of(Cost((ChoiceCost(prompt, output),)), found)
    stay_us = prompt * 50 + output * 10_000
    went = Progress(prompt, output, output, output, computed_tokens=prompt, output_tokens=output)

    assert used_us((went,), stay_us, found, completed=True) == expected_us(work, found)
