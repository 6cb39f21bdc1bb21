"""How clients retry: as the openai client does, held against that client's own code."""

from __future__ import annotations

import random
from dataclasses import dataclass

import httpx2
import openai
import pytest
from openai._models import FinalRequestOptions

from sluice_sidecar.errors import Reason, Refusal
from sluice_simulator.clients import BUDGET_LEAST_RETRIES, Retries, RetryBudget, retry_delay_us

SDK = Retries()


def headers_of(refusal: Refusal) -> httpx2.Response:
    return httpx2.Response(refusal.status, headers=refusal.headers())


@pytest.mark.parametrize("retry_after_us", [None, 1, 1_500, 1_000_000, 29_999_999, 120_000_000, 120_000_001])
@pytest.mark.parametrize(
    "reason", [Reason.SLOTS, Reason.DRAINING, Reason.CONTEXT_LENGTH_EXCEEDED, Reason.ENGINE_FAILED]
)
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_client_pauses_as_the_openai_client_does(
    monkeypatch: pytest.MonkeyPatch, retry_after_us: int | None, reason: Reason, attempt: int
) -> None:
    refusal = Refusal(reason, "busy", retry_after_us)
    client = openai.OpenAI(api_key="none", base_url="http://nowhere")
    monkeypatch.setattr("openai._base_client.random", lambda: 0.25)
    response = headers_of(refusal)
    expected_us = None
    if client._should_retry(response):
        options = FinalRequestOptions.construct(method="post", url="/")
        expected_us = round(
            client._calculate_retry_timeout(client.max_retries - attempt, options, response.headers) * 1e6
        )

    delay_us = retry_delay_us(SDK, attempt, refusal, _Fixed(0.25))

    assert delay_us == expected_us


def test_a_client_gives_up_after_two_retries() -> None:
    assert retry_delay_us(SDK, 2, Refusal(Reason.SLOTS, "busy"), random.Random(0)) is None


@dataclass
class _Answer:
    retry_after_us: int | None = 5_000_000
    should_retry: bool = False


class _Fixed(random.Random):
    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def random(self) -> float:
        return self._value


def test_a_rude_client_comes_back_at_once_whatever_it_is_told() -> None:
    rude = Retries(most=5, initial_us=0, longest_us=0, honour_retry_after=False)

    assert [retry_delay_us(rude, attempt, _Answer(), random.Random(0)) for attempt in range(6)] == [0] * 5 + [None]


def test_a_client_that_gave_up_waiting_tries_again_as_sdks_do_after_a_timeout() -> None:
    assert retry_delay_us(SDK, 0, None, _Fixed(0.0)) == 500_000
    assert retry_delay_us(Retries(after_patience=False), 0, None, _Fixed(0.0)) is None


def test_a_retry_budget_allows_a_share_of_the_first_attempts() -> None:
    budget = RetryBudget(10)
    taken = 0
    for _ in range(1000):
        budget.first_attempt()
        while budget.take():
            taken += 1

    assert taken == pytest.approx(100 + BUDGET_LEAST_RETRIES, abs=1)


def test_without_a_budget_nothing_is_held_back() -> None:
    assert all(RetryBudget(None).take() for _ in range(1000))
