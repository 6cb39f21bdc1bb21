from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import DerivedLimits, EngineState, FinishedState, PoolState, RequestState
from sluice_sidecar.admission import Admission, Ticket
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import LEASE_US, UNSEEN_GRACE_US, Entry, Ledger, Permit
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.errors import Refusal

COST = Cost((ChoiceCost(prompt_tokens=100, max_tokens=50),))


LIMITS = Limits.from_state(ready_state(), live_config())


def opened(*, lists_requests: bool = True) -> Ledger:
    """A ledger before an engine that has told its limits, and nothing else."""
    ledger = Ledger(lists_requests=lists_requests)
    apply(ledger, ready_state(), 0)
    return ledger


def apply(ledger: Ledger, state: EngineState, now_us: int) -> list[Entry]:
    assert LIMITS is not None
    return ledger.apply(state, LIMITS, now_us)


def listed(request_id: str, *, choice: int = 0, prompt: int = 80, computed: int = 80, output: int = 1) -> RequestState:
    return RequestState(
        id=request_id, choice=choice, status="running", prompt_tokens=prompt, computed_tokens=computed,
        output_tokens=output, max_tokens=50, blocks=6, incarnation=0, preemptions=0,
    )  # fmt: skip


def test_a_permit_gives_its_entry_back_once_and_a_second_close_is_harmless_and_counted() -> None:
    ledger = opened()
    permit = ledger.reserve("a", COST, 0)

    assert permit.open
    assert permit.close(1)
    assert not permit.close(2)
    assert (ledger.entries, ledger.releases_total, ledger.double_closes_total) == ({}, 1, 1)


def test_a_held_permit_closes_on_the_way_out_of_an_error() -> None:
    ledger = opened()

    def fail() -> None:
        with ledger.reserve("a", COST, 0).held(lambda: 7):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert not ledger.entries


def test_the_state_corrects_an_estimate_and_tells_that_it_did_once() -> None:
    ledger = opened()
    ledger.reserve("a", COST, 0)
    state = ready_state(requests=(listed("a"),))

    first, second = apply(ledger, state, 1), apply(ledger, state, 2)

    (progress,) = ledger.live()
    assert (progress.prompt_tokens, progress.computed_tokens, progress.output_tokens) == (80, 80, 1)
    assert [entry.id for entry in first] == ["a"]
    assert second == []


def test_what_the_engine_ended_holds_nothing_and_stays_until_its_stream_ends() -> None:
    ledger = opened()
    permit = ledger.reserve("a", COST, 0)
    apply(ledger, ready_state(requests=(listed("a"),)), 1)
    apply(ledger, ready_state(), 2)

    assert list(ledger.live()) == []
    assert permit.open


def test_the_ring_of_the_finished_ends_what_no_state_ever_listed() -> None:
    ledger = opened()
    ledger.reserve("a", COST, 0).forwarded(0)
    finished = FinishedState(id="a", choice=0, outcome="stop", prompt_tokens=80, output_tokens=3)

    learned = apply(ledger, ready_state(finished=(finished,)), 1)

    assert list(ledger.live()) == []
    assert [entry.choices[0].prompt_tokens for entry in learned] == [80]


def test_what_was_never_listed_counts_in_full_for_a_grace_and_then_not_at_all() -> None:
    ledger = opened()
    ledger.reserve("a", COST, 0).forwarded(0)

    apply(ledger, ready_state(), UNSEEN_GRACE_US)
    assert len(list(ledger.live())) == 1
    apply(ledger, ready_state(), UNSEEN_GRACE_US + 1)
    assert len(list(ledger.live())) == 0
    apply(ledger, ready_state(requests=(listed("a"),)), UNSEEN_GRACE_US + 2)
    assert len(list(ledger.live())) == 1


def test_a_request_that_no_entry_explains_counts_as_a_stranger_until_the_engine_drops_it() -> None:
    ledger = opened()
    apply(ledger, ready_state(requests=(listed("theirs"),)), 0)
    assert len(ledger.strangers) == 1

    apply(ledger, ready_state(), 1)
    assert ledger.strangers == []


def test_an_aborted_request_holds_its_blocks_until_a_state_says_they_are_free() -> None:
    ledger = opened()
    permit = ledger.reserve("a", COST, 0)
    apply(ledger, ready_state(requests=(listed("a"),)), 1)

    permit.close(2)
    assert len(list(ledger.live())) == 1
    apply(ledger, ready_state(), 3)
    assert list(ledger.live()) == []


def test_a_completed_request_is_free_at_once_though_the_last_state_still_lists_it() -> None:
    ledger = opened()
    permit = ledger.reserve("a", COST, 0)
    state = ready_state(requests=(listed("a"),))
    apply(ledger, state, 1)
    permit.completed = True
    permit.close(2)
    apply(ledger, state, 3)

    assert list(ledger.live()) == []


def test_each_choice_is_followed_by_its_own_index() -> None:
    ledger = opened()
    ledger.reserve("a", Cost(COST.choices * 2), 0)
    apply(ledger, ready_state(requests=(listed("a"), listed("a", choice=1, output=5))), 1)
    apply(ledger, ready_state(requests=(listed("a", choice=1, output=6),)), 2)

    assert [choice.output_tokens for choice in ledger.live()] == [6]


def test_a_lease_ends_what_its_owner_forgot_and_spares_what_moves() -> None:
    ledger = opened()
    lost, moving = ledger.reserve("lost", COST, 0), ledger.reserve("moving", COST, 0)
    moving.touch(LEASE_US)

    expired = ledger.expire(LEASE_US + 1)

    assert [entry.id for entry in expired] == ["lost"]
    assert ledger.leases_expired_total == 1
    assert not lost.close(LEASE_US + 2)
    assert moving.open


def test_what_the_engine_gets_on_with_keeps_its_lease_though_its_answer_is_not_streamed() -> None:
    ledger = opened()
    whole, stuck = ledger.reserve("whole", COST, 0), ledger.reserve("stuck", COST, 0)
    for minute in range(1, 20):
        states = (listed("whole", output=minute), listed("stuck"))
        apply(ledger, ready_state(requests=states), minute * 60_000_000)

    assert [entry.id for entry in ledger.expire(19 * 60_000_000)] == ["stuck"]
    assert whole.open
    assert not stuck.open


def test_a_dead_engine_holds_nothing_of_what_it_had() -> None:
    ledger = opened()
    ledger.reserve("a", COST, 0)
    apply(ledger, ready_state(requests=(listed("a"), listed("theirs"))), 1)

    ledger.forget_engine()

    assert list(ledger.live()) == []


def test_without_a_prediction_all_of_max_tokens_is_expected() -> None:
    assert ChoiceCost(100, 50) == ChoiceCost(100, 50, output_tokens=50, cached_tokens=0)


def test_the_cost_of_a_call_is_what_is_left_to_compute() -> None:
    cost = Cost((ChoiceCost(100, 50, output_tokens=10, cached_tokens=64), ChoiceCost(20, 50)))

    assert (cost.prompt_tokens, cost.prefill_tokens, cost.max_tokens, cost.decode_tokens) == (120, 56, 100, 60)


@pytest.mark.parametrize(("output_tokens", "cached_tokens"), [(0, 0), (51, 0), (5, 100), (5, -1)])
def test_a_cost_beyond_what_is_asked_for_is_a_bug(output_tokens: int, cached_tokens: int) -> None:
    with pytest.raises(AssertionError):
        ChoiceCost(100, 50, output_tokens, cached_tokens)


def test_a_credit_stands_until_the_engine_has_begun_and_then_what_it_found_counts() -> None:
    ledger = opened()
    ledger.reserve("a", Cost((ChoiceCost(100, 50, 20, cached_tokens=64, prefix_key=b"k"),)), 0)
    (progress,) = ledger.live()
    assert (progress.remaining_tokens, progress.expected_tokens) == (36, 20)

    waiting = replace(listed("a", prompt=100, computed=0, output=0), status="waiting")
    apply(ledger, ready_state(requests=(waiting,)), 1)
    assert (progress.remaining_tokens, progress.cached_tokens) == (36, 64)

    apply(ledger, ready_state(requests=(replace(waiting, status="running", computed_tokens=16, cached_tokens=16),)), 2)
    assert (progress.remaining_tokens, progress.cached_tokens) == (84, 16)


def test_no_more_is_shared_than_was_credited_though_the_engine_found_more() -> None:
    ledger = opened()
    ledger.reserve("a", Cost((ChoiceCost(100, 50, 20, cached_tokens=64, prefix_key=b"k"),)), 0)
    found = replace(listed("a", prompt=100, computed=96, output=0), cached_tokens=96)

    apply(ledger, ready_state(requests=(found,)), 1)

    (progress,) = ledger.live()
    assert (progress.remaining_tokens, progress.cached_tokens) == (4, 64)


def test_a_choice_leaves_the_sums_once() -> None:
    ledger = opened()
    permit = ledger.reserve("a", COST, 0)
    apply(ledger, ready_state(requests=(listed("a"),)), 1)
    ledger.forget_engine()

    permit.close(2)

    assert (ledger.inside.choices, ledger.inside.blocks, ledger.inside.peak_blocks()) == (0, 0, 0)


def test_where_the_engine_lists_nothing_tokens_are_counted_as_they_go_by() -> None:
    ledger = opened(lists_requests=False)
    permit = ledger.reserve("a", COST, 0)
    (progress,) = ledger.live()
    assert progress.prefilling

    permit.tokens(0, 2)
    permit.tokens(0, 1)
    permit.tokens(1, 1)  # the engine read another choice into the body than the gate did

    assert (progress.prefilling, progress.output_tokens, progress.known_tokens) == (False, 3, 103)


def test_where_the_engine_lists_its_requests_what_goes_by_changes_nothing() -> None:
    ledger = opened()
    ledger.reserve("a", COST, 0).tokens(0, 1)

    assert [progress.output_tokens for progress in ledger.live()] == [0]


def test_what_decoded_between_two_states_is_counted() -> None:
    ledger = opened()
    ledger.reserve("a", Cost(COST.choices * 3), 0)
    first = (listed("a", output=3), listed("a", choice=1, output=7), listed("a", choice=2, computed=0, output=0))
    then = (listed("a", output=13, computed=93), listed("a", choice=1, output=7, computed=0), listed("a", choice=2))
    apply(ledger, ready_state(requests=first), 1)

    apply(ledger, ready_state(requests=then), 2)

    # The second was preempted, and the third began only now.
    assert ledger.decoded == (10, 1)


@pytest.mark.parametrize("lists_requests", [True, False])
def test_an_answer_that_goes_on_past_what_was_expected_is_expected_anew(*, lists_requests: bool) -> None:
    ledger = opened(lists_requests=lists_requests)
    ledger.expect = lambda tenant, most, produced: min(most, 2 * produced) if tenant == "a" else most
    permit = ledger.reserve("a", Cost((ChoiceCost(80, 50, 10),), tenant="a"), 0)
    choice = permit.entry.choices[0]

    expected = []
    for produced in range(1, 51):
        if lists_requests:
            apply(ledger, ready_state(requests=(listed("a", output=produced),)), produced)
        else:
            permit.tokens(0, 1)
        expected.append(choice.expected_tokens)

    assert expected == [10] * 9 + [20] * 10 + [40] * 20 + [50] * 11


class Unwalkable(dict[str, Entry]):
    """Entries that are asked for by name and never walked through."""

    def values(self) -> NoReturn:
        """Whoever walks is told off."""
        raise AssertionError("a decision walks through nothing")

    items = __iter__ = keys = values


def test_a_decision_walks_through_nothing_however_many_are_inside() -> None:
    live = live_config(ttft_us=3_600_000_000)
    admission = Admission(live, stale_after_us=500_000, blind_after_us=5_000_000, draw=lambda lo, _: lo)
    derived = DerivedLimits(feasible=True, token_budget=512, max_sequences=5_000)
    pool = PoolState(block_tokens=16, total_blocks=1_000_000, free_blocks=1_000_000)
    state = ready_state(derived=derived, pool=pool)
    admission.observe(state, 0, 0)
    admission.set_unavailable(None, 0)
    for number in range(1_000):
        assert isinstance(admission.enter(f"in-{number}", COST, 0, lambda _: None), Permit)
    admission.observe(replace(state, seq=2, requests=tuple(listed(f"in-{n}") for n in range(1_000))), 1, 1)

    ledger = admission.room.ledger
    ledger.entries = Unwalkable(ledger.entries)
    permit = admission.enter("asking", COST, 2, lambda _: None)
    assert isinstance(permit, Permit)
    admission.room.first_token(permit, 3)
    permit.completed = True
    permit.close(4)
    admission.room.ceiling.share = 0.0
    assert isinstance(admission.enter("refused", COST, 5, lambda _: None), Refusal | Ticket)
