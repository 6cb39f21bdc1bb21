"""Class, tenant and bounds as headers: what is read, what is refused, what is passed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from sluice_engine.core.terms import CLASSES, InvalidTerms, Terms, parse


def headers(**values: str) -> CIMultiDict[str]:
    return CIMultiDict({f"X-Sluice-{name.replace('_', '-')}": value for name, value in values.items()})


@pytest.mark.parametrize(
    ("given_", "terms"),
    [
        pytest.param(headers(), Terms(), id="nothing-asked-is-standard-without-bounds"),
        pytest.param(headers(Class="batch"), Terms(service_class="batch"), id="a-class"),
        pytest.param(headers(tenant="team-a/prod"), Terms(tenant="team-a/prod"), id="a-tenant"),
        pytest.param(headers(ttft_ms="1500"), Terms(first_token_us=1_500_000), id="a-bound-on-the-first-token"),
        pytest.param(headers(timeout_ms=" 30000 "), Terms(finish_us=30_000_000), id="a-bound-on-the-whole"),
        pytest.param(headers(timeout_ms="0"), Terms(finish_us=0), id="no-time-at-all"),
        pytest.param(headers(timeout_ms="86400000"), Terms(finish_us=86_400_000_000), id="a-whole-day"),
    ],
)
def test_terms_of_a_trusted_peer(given_: CIMultiDict[str], terms: Terms) -> None:
    assert parse(given_, trusted=True) == terms


def test_who_is_not_trusted_may_bound_its_wait_and_nothing_else() -> None:
    asked = headers(Class="critical", tenant="somebody-else", ttft_ms="100", timeout_ms="200")

    assert parse(asked, trusted=False) == Terms(first_token_us=100_000, finish_us=200_000)


def test_what_is_not_believed_is_not_even_checked() -> None:
    assert parse(headers(Class="absurd", tenant="\x00"), trusted=False) == Terms()


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        pytest.param(headers(Class="urgent"), "x-sluice-class: must be one of critical, inter", id="an-unknown-class"),
        pytest.param(headers(Class="Critical"), "x-sluice-class", id="classes-are-lowercase"),
        pytest.param(headers(tenant=""), "x-sluice-tenant: must be 1 to 128", id="an-empty-tenant"),
        pytest.param(headers(tenant="x" * 129), "x-sluice-tenant", id="a-tenant-of-129-characters"),
        pytest.param(headers(tenant="a b"), "x-sluice-tenant", id="a-tenant-with-a-space"),
        pytest.param(headers(ttft_ms="-1"), "x-sluice-ttft-ms: must be a whole number", id="a-negative-bound"),
        pytest.param(headers(ttft_ms="1.5"), "x-sluice-ttft-ms", id="part-of-a-millisecond"),
        pytest.param(headers(ttft_ms="1e3"), "x-sluice-ttft-ms", id="a-power-of-ten"),
        pytest.param(headers(ttft_ms="٣"), "x-sluice-ttft-ms", id="a-digit-of-another-script"),
        pytest.param(headers(timeout_ms="NaN"), "x-sluice-timeout-ms", id="not-a-number"),
        pytest.param(headers(timeout_ms=""), "x-sluice-timeout-ms", id="an-empty-bound"),
        pytest.param(headers(timeout_ms="86400001"), "0 to 86400000, not '86400001'", id="more-than-a-day"),
        pytest.param(headers(timeout_ms="9" * 5000), "x-sluice-timeout-ms", id="a-number-of-5000-digits"),
        pytest.param(
            CIMultiDict([("x-sluice-timeout-ms", "5"), ("X-Sluice-Timeout-Ms", "9")]),
            "came 2 times",
            id="a-bound-that-came-twice",
        ),
    ],
)
def test_refused_by_name_and_limit(given_: CIMultiDict[str], problem: str) -> None:
    with pytest.raises(InvalidTerms, match=problem.replace("(", r"\(")) as caught:
        parse(given_, trusted=True)

    assert len(str(caught.value)) < 200, "a hostile value is not repeated at length"


@pytest.mark.parametrize(("index", "service_class"), list(enumerate(CLASSES)))
def test_a_caller_orders_its_own_requests_and_never_leaves_its_class(index: int, service_class: str) -> None:
    terms = Terms(service_class=service_class)

    assert terms.priority() == 2 * index
    assert 2 * index < terms.priority(behind=True) < 2 * (index + 1)


@given(
    st.builds(
        Terms,
        service_class=st.sampled_from(CLASSES),
        tenant=st.text("abc-./", max_size=9),
        first_token_us=st.none() | st.integers(0, 86_400_000).map(lambda ms: ms * 1000),
        finish_us=st.none() | st.integers(0, 86_400_000).map(lambda ms: ms * 1000),
    ),
    st.integers(0, 10**12),
)
def test_what_is_passed_on_is_read_again_less_what_was_waited(terms: Terms, waited_us: int) -> None:
    there = parse(CIMultiDict(terms.headers(waited_us)), trusted=True)

    assert (there.service_class, there.tenant) == (terms.service_class, terms.tenant)
    for before, after in ((terms.first_token_us, there.first_token_us), (terms.finish_us, there.finish_us)):
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            left = max(0, before - waited_us)
            assert left - 1000 < after <= left


def test_what_a_gate_expects_of_an_answer_is_read_from_a_gate_only() -> None:
    told = CIMultiDict(Terms(expected_output_tokens=70).headers())

    assert parse(told, trusted=True, by_gate=True).expected_output_tokens == 70
    assert parse(told, trusted=True).expected_output_tokens is None


@pytest.mark.parametrize("value", ["0", "-1", "many", "9" * 5000])
def test_an_expectation_is_a_whole_number(value: str) -> None:
    with pytest.raises(InvalidTerms, match="x-sluice-expected-output-tokens: must be a whole number of tokens"):
        parse(headers(expected_output_tokens=value), trusted=True, by_gate=True)


def test_waiting_is_useless_once_the_tighter_bound_has_passed() -> None:
    assert Terms().bound_us is None
    assert Terms(first_token_us=5, finish_us=9).bound_us == 5
    assert Terms(first_token_us=15, finish_us=9).bound_us == 9
