"""Who gives way when blocks run out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import make_limits, make_loop, make_request, make_scheduler
from sluice_engine.config import VictimPolicy
from sluice_engine.core.preemption import Rank, choose_outranked, choose_victim, rank_for
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


def ranked(policy: VictimPolicy) -> Rank:
    """Ten µs a computed token, blocks of four, a second to the end of each output token."""
    return rank_for(
        policy,
        price_us=lambda request: request.num_computed * 10,
        freed_blocks=lambda request: len(request.blocks),
        latest_us=lambda request: request.finish_deadline_us,
    )


def holding(request: Request, blocks: int) -> Request:
    request.blocks = list(range(blocks))
    return request


def due(request: Request, slack_us: int) -> Request:
    request.finish_deadline_us = slack_us
    return request


def at_level(request: Request, level: int) -> Request:
    request.priority = level
    return request


@pytest.mark.parametrize(
    ("policy", "requests", "victim"),
    [
        pytest.param("Last", [running("B", 1), running("C", 90, arrival=9)], "C", id="last-takes-the-latest-arrival"),
        pytest.param(
            "LeastComputed", [running("B", 1), running("C", 90, arrival=9)], "B", id="least-computed-loses-least-work"
        ),
        pytest.param(
            "MostBlocksPerMillisecond",
            [holding(running("B", 10), 3), holding(running("C", 40), 20)],
            "C",
            id="blocks-per-millisecond-takes-a-large-one-when-it-frees-more-for-its-price",
        ),
        pytest.param(
            "MostBlocksPerMillisecond",
            [holding(running("B", 10), 5), holding(running("C", 40), 20)],
            "B",
            id="blocks-per-millisecond-takes-the-least-computed-of-two-that-are-worth-the-same",
        ),
        pytest.param(
            "MostBlocksPerMillisecond",
            [holding(running("B", 10), 0), holding(running("C", 40), 1)],
            "C",
            id="blocks-per-millisecond-spares-one-whose-blocks-are-all-shared",
        ),
        pytest.param(
            "LowestPriority",
            [at_level(running("B", 1), 4), at_level(running("C", 90), 8)],
            "C",
            id="lowest-priority-takes-the-least-urgent-however-much-it-computed",
        ),
        pytest.param(
            "LowestPriority",
            [at_level(running("B", 30), 8), at_level(running("C", 29), 8)],
            "C",
            id="lowest-priority-takes-the-least-computed-of-one-class",
        ),
        pytest.param(
            "MostSlack",
            [due(running("B", 1), 100), due(running("C", 90), 5000)],
            "C",
            id="most-slack-takes-the-one-that-can-wait-longest",
        ),
        pytest.param(
            "MostSlack",
            [due(running("B", 1), 5000), running("C", 90)],
            "C",
            id="most-slack-takes-one-without-a-deadline-first",
        ),
        pytest.param(
            "MostSlack",
            [due(running("B", 1), -500), due(running("C", 90), 100)],
            "C",
            id="most-slack-does-not-take-one-that-is-late-for-one-that-is-not",
        ),
    ],
)
def test_victim_policies(policy: VictimPolicy, requests: list[Request], victim: str) -> None:
    needing = at_level(due(holding(running("A", 50), 1), 1), 0)

    chosen = choose_victim([needing, *requests], needing, ranked(policy), max_preemptions=3)

    assert chosen is not None
    assert chosen.id == victim


POLICIES: tuple[VictimPolicy, ...] = (
    "Last",
    "LeastComputed",
    "MostBlocksPerMillisecond",
    "LowestPriority",
    "MostSlack",
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("position", range(6))
def test_the_victim_may_stand_anywhere_and_the_walked_list_stays_as_it_is(policy: VictimPolicy, position: int) -> None:
    requests = [at_level(due(holding(running(name, 40, arrival=i), 3), 10), 2) for i, name in enumerate("ABCDEF")]
    victim = at_level(due(holding(running("victim", 20, arrival=99), 30), 9999), 8)
    requests[position] = victim
    before = list(requests)

    chosen = choose_victim(requests, requests[(position + 1) % 6], ranked(policy), max_preemptions=3)

    assert chosen is victim
    assert requests == before


@pytest.mark.parametrize("policy", POLICIES)
def test_the_caps_are_the_same_under_every_policy(policy: VictimPolicy) -> None:
    needing = at_level(due(holding(running("A", 40), 9), 10), 2)
    tired = at_level(due(holding(running("tired", 20, arrival=98, preempted=3), 30), 9999), 8)
    resumed = at_level(due(holding(running("resumed", 20, arrival=99, protected=21), 30), 9999), 8)
    other = at_level(due(holding(running("other", 39, arrival=1), 9), 11), 3)

    chosen = choose_victim([tired, needing, resumed, other], needing, ranked(policy), max_preemptions=3)

    assert chosen is other


@given(
    st.permutations(range(8)),
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(0, 9),
            st.integers(0, 9),
            st.none() | st.integers(-99, 99),
            st.integers(0, 3),
        ),
        min_size=8,
        max_size=8,
    ),
    st.sampled_from(POLICIES),
)
def test_the_choice_depends_on_the_requests_and_not_on_where_they_stand(
    shuffle: list[int], numbers: list[tuple[int, int, int, int | None, int]], policy: VictimPolicy
) -> None:
    requests = []
    for index, (computed, blocks, level, slack, preempted) in enumerate(numbers):
        request = at_level(holding(running(str(index), computed, arrival=index, preempted=preempted), blocks), level)
        request.finish_deadline_us, request.place = slack, index
        requests.append(request)
    shuffled = [requests[i] for i in shuffle]

    first = choose_victim(requests, requests[0], ranked(policy), max_preemptions=3)
    second = choose_victim(shuffled, requests[0], ranked(policy), max_preemptions=3)

    assert first is second
    assert first is not None
    if any(request.num_preemptions < 3 for request in requests):
        assert first.num_preemptions < 3


@pytest.mark.parametrize(
    ("entering", "requests", "needed", "victims"),
    [
        pytest.param(0, [(4, 9)], 1, ["0"], id="a-critical-request-takes-the-place-of-a-standard-one"),
        pytest.param(3, [(4, 9)], 1, [], id="one-level-is-a-callers-own-order-and-takes-no-place"),
        pytest.param(4, [(4, 9), (2, 9)], 1, [], id="nobody-takes-the-place-of-an-equal-or-a-more-urgent-one"),
        pytest.param(0, [(4, 1), (8, 9)], 1, ["1"], id="the-lowest-class-goes-first-however-much-it-computed"),
        pytest.param(0, [(8, 30), (8, 10)], 1, ["1"], id="inside-a-class-the-rank-decides"),
        pytest.param(0, [(8, 1), (6, 9), (2, 9)], 2, ["0", "1"], id="as-many-go-as-are-needed"),
        pytest.param(0, [(8, 1), (6, 9)], 3, [], id="nobody-goes-when-all-of-them-would-not-do"),
    ],
)
def test_who_gives_way_to_a_more_urgent_request(
    entering: int, requests: list[tuple[int, int]], needed: int, victims: list[str]
) -> None:
    others = [at_level(running(str(i), computed), level) for i, (level, computed) in enumerate(requests)]

    chosen = choose_outranked(
        others,
        at_level(running("A", 0), entering),
        max_preemptions=3,
        enough=lambda gone: len(gone) >= needed,
    )

    assert [request.id for request in chosen] == victims


def test_a_request_at_its_cap_keeps_its_place_against_the_most_urgent() -> None:
    tired = at_level(running("B", 9, preempted=3), 8)
    urgent = at_level(running("A", 0), 0)

    assert choose_outranked([tired], urgent, max_preemptions=3, enough=bool) == []


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
