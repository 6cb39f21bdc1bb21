"""What the engine publishes of a call is what the gate's ledger follows: both real, without a socket between."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.serving import HeldRunner, make_loaded
from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.fit import MAX_CHOICES
from sluice_engine.core.terms import Terms
from sluice_engine.protocol.completions import parse_completion
from sluice_engine.serving.counters import Counters
from sluice_engine.serving.intake import completion_prompts, requests_of
from sluice_engine.serving.publication import LoadedEngine, publication_of
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.ledger import UNSEEN_GRACE_US, Ledger
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.capacity.prefixes import CHUNK_BYTES
from sluice_sidecar.estimates import estimate
from sluice_sidecar.estimates.pricing import Pricing


def limits() -> Limits:
    found = Limits.from_state(ready_state(), live_config())
    assert found is not None
    return found


def cost_of(body: dict[str, Any]) -> Cost:
    return Pricing().price(estimate.parse(json.dumps(body).encode(), "completions"), limits())


def submit(engine: LoadedEngine, body: dict[str, Any], request_id: str) -> None:
    call = parse_completion(json.dumps(body).encode())
    prompts = completion_prompts(call, engine.tokenizer)
    for request in requests_of(
        prompts, call.generation, engine, request_id=request_id, terms=Terms(), arrival_us=0, draw_seed=lambda: 1
    ):
        assert engine.loop.add(request) is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"prompt": ["say:a", "say:bb", "say:ccc"]}, id="three-prompts"),
        pytest.param({"prompt": ["say:a", "say:bb"], "n": 2}, id="two-prompts-of-two-choices"),
    ],
)
def test_every_prompt_of_a_list_is_followed_to_its_end(body: dict[str, Any]) -> None:
    engine, ledger = make_loaded(HeldRunner()), Ledger()
    ledger.apply(ready_state(), limits(), 0)
    body = {"model": "tiny", "max_tokens": 20} | body
    permit = ledger.reserve("req-1", cost_of(body), 0)
    permit.forwarded(0)
    submit(engine, body, "req-1")
    engine.loop.step()
    now_us = 2 * UNSEEN_GRACE_US

    ledger.apply(ready_state(requests=publication_of(engine.loop, Counters(), 1).requests), limits(), now_us)

    choices = len(permit.entry.choices)
    assert [choice.seen for choice in permit.entry.choices] == [True] * choices
    assert ledger.strangers == []
    assert sorted(choice.prompt_tokens for choice in ledger.live()) == sorted(
        request.num_prompt for request in engine.loop.scheduler.requests.values()
    )
    assert len(list(ledger.live())) == choices

    while engine.loop.has_work:
        engine.loop.step()
    ledger.apply(ready_state(finished=publication_of(engine.loop, Counters(), 2).finished), limits(), now_us)
    assert list(ledger.live()) == []


def test_all_choices_that_the_engine_may_take_are_charged() -> None:
    body = {"model": "tiny", "prompt": ["a"] * 32, "n": 4, "max_tokens": 5}

    assert parse_completion(json.dumps(body).encode()).generation.n == 4
    assert len(cost_of(body).choices) == MAX_CHOICES


def test_the_engine_finds_what_the_gate_credits() -> None:
    """Two prompts that begin alike: the second is credited with blocks, and the engine finds as many tokens."""
    engine, pricing = make_loaded(HeldRunner(), num_blocks=400, max_length=1500), Pricing()
    limits = Limits.from_state(ready_state(max_length_tokens=1500), live_config())
    assert limits is not None
    text = "say:x and then a long story of the same words, over and over again, " * 12

    def observe(seq: int) -> None:
        seen = publication_of(engine.loop, Counters(), seq)
        pricing.observe(ready_state(prefix=seen.prefix, requests=seen.requests, finished=seen.finished), seq)

    credited = []
    for number, end in enumerate(("Who?", "And when?")):
        body = {"model": "tiny", "prompt": text + end, "max_tokens": 4}
        observe(2 * number)
        cost = pricing.price(estimate.parse(json.dumps(body).encode(), "completions"), limits)
        pricing.admitted(f"req-{number}", cost)
        submit(engine, body, f"req-{number}")
        while engine.loop.has_work:
            engine.loop.step()
        observe(2 * number + 1)
        credited.append(cost.choices[0].cached_tokens)

    # The tokenizer of the test has a token for each byte; the credit is as long as whole chunks of text are.
    assert credited == [0, len(text) // CHUNK_BYTES * CHUNK_BYTES // 16 * 16]
    assert pricing.prefixes.found_tokens_total == pricing.prefixes.credited_tokens_total > 0
