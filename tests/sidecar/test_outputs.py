"""How long an answer is expected to be, from how long others were."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sidecar.estimates.outputs import (
    LEAST_ANSWERS,
    MOST_TENANTS,
    QUANTILE,
    TENANT_ANSWERS,
    Answers,
    LengthBias,
    Outputs,
)


def learned(lengths: list[int], *, tenant: str = "a", cut_off: bool = False) -> Outputs:
    outputs = Outputs()
    for length in lengths:
        outputs.learn(tenant, length, cut_off=cut_off)
    return outputs


def test_before_anything_is_known_all_that_is_asked_for_is_expected() -> None:
    outputs = learned([10] * (LEAST_ANSWERS - 1))

    assert outputs.expected("a", 500) == 500

    outputs.learn("a", 10, cut_off=False)
    assert outputs.expected("a", 500) == 10


@pytest.mark.parametrize(
    ("produced", "expected"),
    [
        pytest.param(0, 80, id="eight-of-ten-end-by-eighty"),
        pytest.param(50, 90, id="of-those-that-pass-fifty-eight-of-ten-end-by-ninety"),
        pytest.param(80, 96, id="near-the-end-it-is-a-little-more"),
        pytest.param(100, 1000, id="what-has-outlived-them-all-is-expected-to-use-all-it-may"),
    ],
)
def test_what_is_expected_depends_on_what_was_produced(produced: int, expected: int) -> None:
    assert learned(list(range(1, 101))).expected("a", 1000, produced) == expected


def test_no_more_is_expected_than_was_asked_for() -> None:
    assert learned(list(range(1, 101))).expected("a", 30) == 30


def test_a_tenants_small_limit_is_not_taken_for_short_answers() -> None:
    outputs = learned([300] * 40)
    for _ in range(40):
        outputs.learn("a", 16, cut_off=True)

    assert outputs.expected("a", 16) == 16
    assert outputs.expected("a", 1000) == 300, "all that is known of those forty is that they are longer than 16"


def test_answers_that_were_all_cut_off_tell_of_no_length() -> None:
    assert learned([16] * 100, cut_off=True).expected("a", 1000) == 1000


def test_a_tenant_has_its_own_history_once_it_is_long_enough() -> None:
    outputs = learned([10] * 100, tenant="terse")
    for _ in range(LEAST_ANSWERS - 1):
        outputs.learn("chatty", 400, cut_off=False)

    assert outputs.expected("stranger", 1000) == outputs.expected("chatty", 1000)
    outputs.learn("chatty", 400, cut_off=False)
    assert outputs.expected("terse", 1000) == 10
    assert outputs.expected("chatty", 1000) == 400


def test_a_tenant_whose_answers_change_is_followed() -> None:
    outputs = learned([10] * TENANT_ANSWERS)
    for _ in range(TENANT_ANSWERS):
        outputs.learn("a", 200, cut_off=False)

    assert outputs.expected("a", 1000) == 200


def test_tenants_are_bounded_and_the_one_unheard_of_longest_is_forgotten() -> None:
    outputs = learned([10] * 100, tenant="first")
    for index in range(MOST_TENANTS):
        outputs.learn(f"t{index}", 5, cut_off=False)

    assert len(outputs._tenants) == MOST_TENANTS
    assert "first" not in outputs._tenants


def test_an_answer_that_its_client_left_before_the_first_token_says_nothing() -> None:
    outputs = learned([0] * 100, cut_off=True)

    assert not outputs._tenants


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=LEAST_ANSWERS, max_size=120),
    st.integers(1, 80),
)
def test_the_more_was_produced_the_more_is_expected_and_always_something(
    answers: list[tuple[int, bool]], max_tokens: int
) -> None:
    outputs = Outputs()
    for tokens, cut_off in answers:
        outputs.learn("a", tokens, cut_off=cut_off)
    expected = [outputs.expected("a", max_tokens, produced) for produced in range(max_tokens)]

    assert all(produced < tokens <= max_tokens for produced, tokens in enumerate(expected))
    assert all(before <= after for before, after in pairwise(expected))


def by_definition(answers: list[tuple[int, bool]], share: float, produced: int) -> int | None:
    """The product-limit estimator as it is written down, over the answers that were longer than `produced`."""
    longer = 1.0
    for length in sorted({tokens for tokens, cut_off in answers if not cut_off and tokens > produced}):
        at_risk = sum(tokens >= length for tokens, _ in answers)
        longer *= 1 - sum(answer == (length, False) for answer in answers) / at_risk
        if longer <= 1 - share + 1e-9:
            return length
    return None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=60), st.integers(0, 31))
def test_the_quantile_is_that_of_the_product_limit_estimator(answers: list[tuple[int, bool]], produced: int) -> None:
    window = Answers(100)
    for tokens, cut_off in answers:
        window.add(tokens, cut_off=cut_off)

    assert window.quantile(QUANTILE, produced) == by_definition(answers, QUANTILE, produced)


def test_eight_of_ten_answers_stay_within_what_was_expected_of_them_though_limits_cut_half_of_them() -> None:
    source = random.Random(7)
    outputs, within, judged = Outputs(), 0, 0
    for index in range(3000):
        length = max(1, round(source.lognormvariate(5.4, 1.0)))
        limit = source.choice((64, 4096))
        if index > 500 and limit == 4096:
            judged += 1
            within += min(length, limit) <= outputs.expected("a", limit)
        outputs.learn("a", min(length, limit), cut_off=length > limit)

    assert within / judged == pytest.approx(QUANTILE, abs=0.04)


def test_answers_that_are_predicted_well_have_no_bias() -> None:
    bias = LengthBias()
    for tokens in (50, 150, 100):
        bias.learn(200, tokens)
    bias.suspect([(200, 210)])

    assert bias.factor == 1.0


def test_answers_that_outgrow_what_was_predicted_are_told_from_one_that_does() -> None:
    one, many = LengthBias(), LengthBias()
    one.learn(10, 80)
    for _ in range(200):
        many.learn(10, 80)

    # Four as predicted stand beside the evidence of one: (4 × 10 + 80) / (4 × 10 + 10).
    assert one.factor == pytest.approx(2.4)
    assert many.factor == pytest.approx(8.0, rel=0.1)


def test_the_bias_of_answers_spread_as_those_of_chats_hardly_moves_by_chance() -> None:
    source = random.Random(7)
    lengths = [min(1024, round(source.lognormvariate(5.7, 0.8))) for _ in range(5000)]
    bias, found = LengthBias(), []
    for length in lengths:
        bias.learn(10, length)
        found.append(bias.factor * 10 * len(lengths) / sum(lengths))

    # The peak is made of it: an eighth too much or too little would be a sixteenth of a pool that is half answers.
    assert 0.88 < min(found[1000:]) < max(found[1000:]) < 1.12


def test_those_that_are_longer_already_count_at_once_and_can_only_tell_of_more() -> None:
    bias = LengthBias()
    for _ in range(50):
        bias.learn(10, 80)
    learned = bias.factor

    bias.suspect([(10, 11)] * 500)
    assert bias.factor == learned
    bias.suspect([(10, 300)] * 50)
    assert bias.factor > 2 * learned
