"""What the gate learns of sizes is worth it: the same engine, the same load, with and without what was learned."""

from __future__ import annotations

import pytest

from simulator.scenes import Document, document, outcome
from sluice_sidecar.capacity.prefixes import Prefixes
from sluice_sidecar.estimates import outputs
from sluice_sidecar.estimates.pricing import Pricing
from sluice_simulator import report
from sluice_simulator.run import Finished

CHATTY: Document = {
    "loads__0__arrivals__poisson__requestsPerSecond": 30,
    "loads__0__maxTokens": 1000,
    "machine__kvCapacityTokens": 32_768,
    "duration": "25s",
    "warmup": "5s",
}
SHARED: Document = {
    "loads__0__promptTokens": {"distribution": "Uniform", "least": 600, "most": 900},
    "loads__0__sharedPrefix": {"tokens": 512, "variants": 3},
    "duration": "15s",
}


def pricing(finished: Finished) -> Pricing:
    gate = finished.replicas[0].gate
    assert gate is not None
    return gate.room.pricing


def test_expected_outputs_let_in_what_max_tokens_would_keep_out(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = report.document(outcome(document(**CHATTY)))["total"]
    monkeypatch.setattr(outputs, "LEAST_ANSWERS", 10**9)
    reserved = report.document(outcome(document(**CHATTY)))["total"]

    assert learned["outcomes"]["finished"] > 1.3 * reserved["outcomes"]["finished"]
    assert learned["missed"] == {"ttft": 0, "itl": 0, "deadline": 0}


def test_eight_of_ten_answers_stay_within_what_was_expected() -> None:
    answers = pricing(outcome(document(**CHATTY))).answers_total

    share = answers["within"] / (answers["within"] + answers["longer"])
    assert sum(answers.values()) > 100
    assert share == pytest.approx(outputs.QUANTILE, abs=0.1)


def test_what_prompts_share_is_credited_and_found() -> None:
    learned = pricing(outcome(document(**SHARED)))

    prefixes = learned.prefixes
    assert prefixes.credited_tokens_total > 10_000
    assert prefixes.found_tokens_total >= 0.95 * prefixes.credited_tokens_total


def test_without_a_prefix_cache_nothing_is_credited() -> None:
    learned = pricing(outcome(document(**SHARED, service__spec__cache={"prefixCaching": "Disabled"})))

    assert learned.prefixes.credited_tokens_total == 0


def test_a_credit_is_what_the_first_token_needs_less_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of an engine that shares, a gate that credits nothing refuses what could have been served."""
    busy = SHARED | {
        "loads__0__promptTokens": {"distribution": "Uniform", "least": 1600, "most": 1800},
        "loads__0__sharedPrefix": {"tokens": 1536, "variants": 3},
        "loads__0__arrivals__poisson__requestsPerSecond": 60,
        "loads__0__outputTokens": {"mean": 4},
        "service__spec__slo__timeToFirstToken": "300ms",
        "service__spec__slo__referencePromptTokens": 1800,
    }
    credited = report.document(outcome(document(**busy)))["total"]
    monkeypatch.setattr(Prefixes, "credit", lambda *_: 0)
    blind = report.document(outcome(document(**busy)))["total"]

    assert credited["outcomes"]["finished"] > 1.1 * blind["outcomes"]["finished"]
    assert credited["missed"]["ttft"] <= 0.01 * credited["requests"]
