"""What is taken is given back, all of it, whatever it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scripted import make_limits, make_request
from sluice_engine.core.budgets import Budgets, Needs
from sluice_engine.core.rows import Rows
from sluice_engine.core.step import Step

LIMITS = {"tokens": 20, "prefill_tokens": 12, "encoder_tokens": 6, "adapters": 2}


def test_what_does_not_fit_is_named_by_its_budget() -> None:
    budgets = Budgets(LIMITS)

    assert budgets.lacking(Needs({"tokens": 20})) is None
    assert budgets.lacking(Needs({"tokens": 21})) == "tokens"
    assert budgets.lacking(Needs({"tokens": 5, "encoder_tokens": 7})) == "encoder_tokens"


def test_what_has_no_limit_here_is_not_counted() -> None:
    assert Budgets({"tokens": 4}).lacking(Needs({"media_items": 99}, {"adapters": "x"})) is None


def test_a_thing_that_is_shared_costs_one_however_many_use_it() -> None:
    budgets = Budgets({"adapters": 1})
    first, second = make_request("A", 1, 1), make_request("B", 1, 1)
    for request in (first, second):
        assert budgets.lacking(Needs({}, {"adapters": "x"})) is None
        budgets.take(request, Needs({}, {"adapters": "x"}))

    assert budgets.lacking(Needs({}, {"adapters": "y"})) == "adapters"
    budgets.take_back(first)
    assert budgets.lacking(Needs({}, {"adapters": "y"})) == "adapters", "another still uses it"
    budgets.take_back(second)
    assert budgets.lacking(Needs({}, {"adapters": "y"})) is None


def test_an_overdrawn_budget_is_an_impossible_state() -> None:
    budgets = Budgets({"tokens": 4})
    budgets.take(make_request("A", 1, 1), Needs({"tokens": 5}))

    with pytest.raises(AssertionError, match="budget tokens is overdrawn by 1"):
        budgets.check()


def step_with_a_decode_and_a_chunk() -> tuple[Step, Rows]:
    rows = Rows(4)
    for name in "AB":
        rows.enter(make_request(name, 8, 8))
        rows.start_decoding(rows.running()[-1].slot, 16)
    rows.start[:2] = [9, 11]
    step = Step(1, 0, make_limits(token_budget=20, chunk=12), {})
    step.set_decodes(rows.decodes(), rows.start[rows.decodes().slots])
    step.add_chunk(make_request("C", 30, 1), 10, 3)
    step.add_chunk(next(iter(step.chunks)), 10, 4)
    return step, rows


def test_a_decode_that_is_undone_gives_back_its_token_and_its_context() -> None:
    step, rows = step_with_a_decode_and_a_chunk()
    assert (step.context, step.budgets.left("tokens")) == (10 + 12, 20 - 2 - 7)

    step.take_back(rows.requests[0])

    assert (len(step.decodes), step.starts.tolist(), step.context) == (1, [11], 12)
    assert step.budgets.left("tokens") == 20 - 1 - 7
    step.budgets.check()


def test_a_chunk_that_is_undone_gives_back_both_budgets_whatever_parts_it_came_in() -> None:
    step, _rows = step_with_a_decode_and_a_chunk()
    assert (step.prefill, step.prior_pairs, step.budgets.left("prefill_tokens")) == (7, 70, 5)

    step.take_back(next(iter(step.chunks)))

    assert (step.prefill, step.prior_pairs, step.context, step.chunks) == (0, 0, 22, {})
    assert (step.budgets.left("tokens"), step.budgets.left("prefill_tokens")) == (18, 12)
    step.budgets.check()


def test_undoing_somebody_who_took_nothing_changes_nothing() -> None:
    step, _rows = step_with_a_decode_and_a_chunk()

    step.take_back(make_request("D", 4, 4))

    assert (len(step.decodes), step.prefill, step.budgets.left("tokens")) == (2, 7, 11)


class Taking(RuleBasedStateMachine):
    """Any order of taking and giving back keeps every budget's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets = Budgets(LIMITS)
        self.takers = [make_request(str(i), 1, 1) for i in range(4)]
        self.each: list[Needs] = []

    @rule(
        who=st.integers(0, 3),
        amounts=st.dictionaries(st.sampled_from([*list(LIMITS)[:3], "unlimited"]), st.integers(0, 9)),
        adapter=st.none() | st.sampled_from("xyz"),
    )
    def take(self, who: int, amounts: dict[str, int], adapter: str | None) -> None:
        needs = Needs(amounts, {} if adapter is None else {"adapters": adapter})
        if self.budgets.lacking(needs) is None:
            self.budgets.take(self.takers[who], needs)

    @rule(count=st.integers(0, 3))
    def take_for_each(self, count: int) -> None:
        needs = Needs({"tokens": 1})
        if self.budgets.left("tokens") >= count:
            self.budgets.take_for_each(count, needs)
            self.each += [needs] * count

    @precondition(lambda self: self.each)
    @rule(data=st.data())
    def take_some_back(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.each)))
        self.budgets.take_back_for_each(count, self.each[0])
        del self.each[:count]

    @rule(who=st.integers(0, 3))
    def take_back(self, who: int) -> None:
        self.budgets.take_back(self.takers[who])

    @invariant()
    def sums_hold(self) -> None:
        self.budgets.check()

    def teardown(self) -> None:
        for taker in self.takers:
            self.budgets.take_back(taker)
        if self.each:
            self.budgets.take_back_for_each(len(self.each), self.each[0])
        assert {name: self.budgets.left(name) for name in LIMITS} == LIMITS


TestTaking = Taking.TestCase
TestTaking.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_rows_are_written_anew_for_each_owner() -> None:
    rows = Rows(1)
    first, second = make_request("A", 8, 8), make_request("B", 4, 3)
    rows.enter(first)
    rows.start_decoding(0, 16)
    before = rows.decodes()
    rows.leave(first)
    rows.enter(second)

    assert not len(rows.decodes()), "who enters does not decode"
    assert (rows.start[0], rows.limit[0]) == (0, 6)
    assert rows.tenure[0] != before.tenures[0], "what is in flight for the last owner is stale"
    assert rows.decodes() is rows.decodes(), "the batch is shared until it changes"
    assert np.array_equal(before.slots, [0]), "and what was planned does not change"
