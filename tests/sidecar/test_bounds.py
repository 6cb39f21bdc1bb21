"""Bounds in the headers of gateways and clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from sluice_engine.core.terms import Terms
from sluice_sidecar.bounds import HEADERS, MOST_US, added, for_answer

S = 1_000_000


def bounded(*headers: tuple[str, str], **terms: int) -> Terms:
    found = added(Terms(**terms), CIMultiDict(headers))  # type: ignore[arg-type]
    assert found.unreadable == ()
    return found.terms


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        pytest.param("x-envoy-expected-rq-timeout-ms", "15000", {"finish_us": 15 * S}, id="envoy-cuts-the-whole"),
        pytest.param("X-Envoy-Expected-Rq-Timeout-Ms", "0", {}, id="envoy-without-a-timeout"),
        pytest.param("grpc-timeout", "10S", {"finish_us": 10 * S}, id="grpc-seconds"),
        pytest.param("grpc-timeout", "1500m", {"finish_us": 1_500_000}, id="grpc-milliseconds"),
        pytest.param("grpc-timeout", "2M", {"finish_us": 120 * S}, id="grpc-minutes"),
        pytest.param("grpc-timeout", "999n", {"finish_us": 0}, id="grpc-that-is-over"),
        pytest.param("grpc-timeout", "99999999H", {}, id="grpc-for-eleven-thousand-years"),
        pytest.param("x-llm-d-slo-ttft-ms", "500", {"promise_us": 500_000}, id="an-slo-is-a-promise-no-deadline"),
        pytest.param("x-slo-ttft-ms", "200.5", {"promise_us": 200_500}, id="the-older-name-of-an-slo"),
        pytest.param("x-llm-d-slo-ttft-ms", "0", {}, id="no-slo"),
        pytest.param("x-llm-d-inference-ttl", "1500ms", {"door_us": 1_500_000}, id="a-ttl-bounds-the-door-only"),
        pytest.param("x-llm-d-inference-ttl", "1m0.5s", {"door_us": 60_500_000}, id="a-ttl-in-parts"),
        pytest.param("x-llm-d-inference-ttl", "0", {}, id="no-ttl"),
        pytest.param("x-llm-d-inference-ttl", "0s", {}, id="no-ttl-either"),
        pytest.param("x-stainless-read-timeout", "600", {"silence_us": 600 * S}, id="the-openai-clients-default"),
        pytest.param("x-stainless-read-timeout", "2.5", {"silence_us": 2_500_000}, id="a-reader-in-a-hurry"),
        pytest.param("x-envoy-expected-rq-timeout-ms", "86400001", {}, id="more-than-a-day-is-for-ever"),
        pytest.param("x-llm-d-slo-tpot-ms", "20", {}, id="no-request-has-a-pace-of-its-own"),
    ],
)
def test_each_header_has_its_own_meaning(header: str, value: str, expected: dict[str, int]) -> None:
    assert bounded((header, value)) == Terms(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-envoy-expected-rq-timeout-ms", "-1"),
        ("x-envoy-expected-rq-timeout-ms", "15s"),
        ("x-envoy-expected-rq-timeout-ms", "1e400"),
        ("x-envoy-expected-rq-timeout-ms", "9" * 13),
        ("grpc-timeout", "10"),
        ("grpc-timeout", "123456789S"),
        ("grpc-timeout", "1D"),
        ("x-llm-d-slo-ttft-ms", "NaN"),
        ("x-llm-d-inference-ttl", "-1s"),
        ("x-llm-d-inference-ttl", "5"),
        ("x-llm-d-inference-ttl", ""),
        ("x-stainless-read-timeout", "None"),
    ],
)
def test_what_cannot_be_read_bounds_nothing_and_is_named(header: str, value: str) -> None:
    found = added(Terms(), CIMultiDict([(header, value)]))

    assert found.terms == Terms()
    assert found.unreadable == (header,)


def test_one_that_contradicts_itself_is_not_obeyed() -> None:
    found = added(Terms(), CIMultiDict([("grpc-timeout", "1S"), ("grpc-timeout", "2S")]))

    assert (found.terms, found.unreadable) == (Terms(), ("grpc-timeout",))
    assert bounded(("grpc-timeout", "1S"), ("grpc-timeout", "1S")).finish_us == S


def test_of_two_bounds_with_one_meaning_the_tighter_holds() -> None:
    headers = (("x-envoy-expected-rq-timeout-ms", "15000"), ("grpc-timeout", "20S"))

    assert bounded(*headers, finish_us=60 * S).finish_us == 15 * S
    assert bounded(*headers, finish_us=5 * S).finish_us == 5 * S


def test_there_is_no_one_minimum_over_all() -> None:
    found = bounded(
        ("x-envoy-expected-rq-timeout-ms", "60000"),
        ("x-llm-d-slo-ttft-ms", "500"),
        ("x-llm-d-inference-ttl", "100ms"),
        first_token_us=5 * S,
    )

    assert found == Terms(first_token_us=5 * S, finish_us=60 * S, promise_us=500_000, door_us=100_000)
    assert found.bound_us == 5 * S, "neither the promise nor the wait at the door is a deadline"


@pytest.mark.parametrize(
    ("streamed", "expected"), [(True, {"door_us": 20 * S}), (False, {"finish_us": 20 * S})], ids=["stream", "whole"]
)
def test_a_silence_bounds_a_whole_answer_and_of_a_stream_only_its_beginning(
    expected: dict[str, int], *, streamed: bool
) -> None:
    terms = for_answer(Terms(silence_us=20 * S), streamed=streamed)

    assert terms == Terms(silence_us=20 * S, **expected)  # type: ignore[arg-type]


@given(st.sampled_from(HEADERS), st.text(st.characters(codec="latin-1"), max_size=30))
def test_no_text_whatever_breaks_it_and_every_bound_lies_within_a_day(header: str, value: str) -> None:
    terms = added(Terms(), CIMultiDict([(header, value)])).terms

    for bound_us in (terms.finish_us, terms.promise_us, terms.door_us, terms.silence_us):
        assert bound_us is None or 0 <= bound_us <= MOST_US
