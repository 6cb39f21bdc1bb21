from __future__ import annotations

from dataclasses import replace

import pytest
from multidict import CIMultiDict

from sluice_sidecar.retries.attempts import MEMORY_US, MOST_ATTEMPTS, Attempt, Attempts, body_key, told

S = 1_000_000
KEY = body_key("team-a", b"hello")


@pytest.mark.parametrize(
    ("headers", "number"),
    [
        pytest.param([], 0, id="who-says-nothing-is-the-first"),
        pytest.param([("x-stainless-retry-count", "0")], 0, id="an-sdk-counts-from-nought"),
        pytest.param([("X-Stainless-Retry-Count", "2")], 2, id="an-sdks-second-retry"),
        pytest.param([("x-envoy-attempt-count", "1")], 0, id="envoy-counts-from-one"),
        pytest.param([("x-envoy-attempt-count", "3")], 2, id="envoys-second-retry"),
        pytest.param([("x-envoy-attempt-count", "0")], 0, id="an-envoy-that-counts-wrongly-is-no-negative-number"),
        pytest.param([("x-envoy-is-timeout-retry", "true")], 1, id="envoy-after-a-timeout"),
        pytest.param([("x-envoy-is-timeout-retry", "false")], 0, id="envoy-not-after-a-timeout"),
        pytest.param([("grpc-previous-rpc-attempts", "1")], 1, id="grpc-names-those-before"),
        pytest.param([("amz-sdk-request", "attempt=1; max=3")], 0, id="aws-counts-from-one"),
        pytest.param([("amz-sdk-request", "ttl=20260101T000000Z; attempt=2; max=3")], 1, id="awss-second-attempt"),
        pytest.param([("amz-sdk-request", "max=3")], 0, id="aws-without-a-count"),
        pytest.param(
            [("x-stainless-retry-count", "2"), ("x-envoy-attempt-count", "1")], 2, id="the-largest-counts-of-all"
        ),
        pytest.param([("x-stainless-retry-count", "999999999")], MOST_ATTEMPTS, id="an-absurd-count-is-cut"),
    ],
)
def test_each_header_counts_in_its_own_way(headers: list[tuple[str, str]], number: int) -> None:
    found = told(CIMultiDict(headers))

    assert (found.number, found.unreadable) == (number, ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-stainless-retry-count", "-1"),
        ("x-stainless-retry-count", "often"),
        ("x-stainless-retry-count", "1" * 20),
        ("x-envoy-attempt-count", "1.5"),
        ("grpc-previous-rpc-attempts", ""),
        ("x-envoy-is-timeout-retry", "perhaps"),
        ("amz-sdk-request", "attempt=x"),
    ],
)
def test_what_cannot_be_read_counts_as_nothing_and_is_named(name: str, value: str) -> None:
    found = told(CIMultiDict([(name, value)]))

    assert (found.number, found.unreadable) == (0, (name,))


def test_the_key_tells_tenants_and_bodies_apart() -> None:
    assert body_key("team-a", b"hello") == KEY
    assert body_key("team-b", b"hello") != KEY
    assert body_key("team-a", b"hello!") != KEY
    assert body_key("team-a\0", b"hello") != body_key("team-a", b"\0hello")


def turned_away(attempts: Attempts, attempt: Attempt, now_us: int) -> None:
    attempts.turned_away(replace(attempt, number=attempts.number(attempt, now_us)), now_us)


def test_a_loop_that_tells_nothing_is_known_by_its_body() -> None:
    attempts, silent = Attempts(), Attempt(0, KEY)

    for index in range(5):
        assert attempts.number(silent, index * S) == index
        attempts.turned_away(replace(silent, number=index), index * S)


def test_who_was_let_in_is_not_expected_again() -> None:
    attempts, silent = Attempts(), Attempt(0, KEY)
    turned_away(attempts, silent, 0)

    assert attempts.number(silent, 1 * S) == 1
    assert attempts.number(silent, 2 * S) == 0
    assert len(attempts) == 0


def test_of_equal_bodies_as_many_count_as_retries_as_were_refused() -> None:
    attempts, silent = Attempts(), Attempt(0, KEY)
    for _ in range(3):
        attempts.turned_away(silent, 0)

    assert [attempts.number(silent, 1 * S) for _ in range(5)] == [1, 1, 1, 0, 0]


def test_after_a_minute_it_is_a_new_request() -> None:
    attempts, silent = Attempts(), Attempt(0, KEY)
    turned_away(attempts, silent, 0)

    assert attempts.number(silent, MEMORY_US) == 0
    assert len(attempts) == 0


def test_a_retry_that_tells_its_number_is_not_expected_a_second_time() -> None:
    attempts = Attempts()
    turned_away(attempts, Attempt(0, KEY), 0)

    assert attempts.number(Attempt(1, KEY), 1 * S) == 1
    assert attempts.number(Attempt(0, KEY), 2 * S) == 0


def test_what_has_no_key_is_known_by_its_headers_only() -> None:
    attempts = Attempts()
    turned_away(attempts, Attempt(), 0)

    assert attempts.number(Attempt(), 1) == 0
    assert attempts.number(Attempt(2), 1) == 2


def test_the_memory_is_bounded_and_the_oldest_go_first() -> None:
    attempts = Attempts(kept=10)
    for index in range(25):
        attempts.turned_away(Attempt(0, bytes([index])), index)

    assert len(attempts) == 10
    assert attempts.number(Attempt(0, bytes([14])), 30) == 0
    assert attempts.number(Attempt(0, bytes([15])), 30) == 1
