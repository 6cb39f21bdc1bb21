"""The price of a call: what was learned from earlier ones, and how the engine's state teaches it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import EngineState, FinishedState, PrefixState, RequestState
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.ledger import Ledger
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.estimates import estimate
from sluice_sidecar.estimates.estimate import Route
from sluice_sidecar.estimates.outputs import LEAST_ANSWERS
from sluice_sidecar.estimates.pricing import Pricing

SECOND = 1_000_000
PREFIX = PrefixState(
    enabled=True, hits_total=0, queried_tokens_total=0, hit_tokens_total=0, resumed_tokens_total=0,
    dropped_blocks_total=0,
)  # fmt: skip


def state(*requests: RequestState, finished: tuple[FinishedState, ...] = (), **changes: Any) -> EngineState:
    return ready_state(requests=requests, finished=finished, **({"prefix": PREFIX} | changes))


def running(name: str, *, choice: int = 0, prompt: int = 200, cached: int = 0, output: int = 1) -> RequestState:
    return RequestState(
        id=name, choice=choice, status="running", prompt_tokens=prompt, computed_tokens=prompt if output else cached,
        output_tokens=output, max_tokens=50, blocks=6, incarnation=0, preemptions=0, cached_tokens=cached,
    )  # fmt: skip


def ended(name: str, output: int, outcome: str = "stop", *, choice: int = 0, **changes: Any) -> FinishedState:
    return FinishedState(
        id=name, choice=choice, outcome=outcome, prompt_tokens=200, output_tokens=output, **changes
    )  # fmt: skip


def limits() -> Limits:
    found = Limits.from_state(ready_state(), live_config())
    assert found is not None
    return found


class Learner:
    """A price list that takes calls through an engine."""

    def __init__(self) -> None:
        self.pricing = Pricing()
        self.ledger = Ledger()
        self.now_us = 0
        self.calls = 0
        self.pricing.observe(state(), 0)
        self.ledger.apply(state(), limits(), 0)

    def cost(self, body: Any, tenant: str = "a", route: Route = "chat", exact: int | None = None) -> Cost:
        return self.pricing.price(estimate.parse(json.dumps(body).encode(), route), limits(), tenant, exact)

    def enter(self, body: Any, tenant: str = "a", route: Route = "chat") -> str:
        self.calls += 1
        name = f"req-{self.calls}"
        cost = self.cost(body, tenant, route)
        self.ledger.reserve(name, cost, self.now_us)
        self.pricing.admitted(name, cost)
        return name

    def see(self, *requests: RequestState, finished: tuple[FinishedState, ...] = (), **changes: Any) -> None:
        self.pricing.observe(state(*requests, finished=finished, **changes), self.now_us)

    def leave(self, name: str, *, listed: bool = True, completed: bool = True) -> None:
        entry = self.ledger.entries[name]
        self.ledger.release(entry, completed=completed, now_us=self.now_us)
        self.pricing.left(entry, self.now_us, listed=listed, completed=completed)

    def answer(self, output: int, outcome: str = "stop", tenant: str = "a") -> None:
        """One whole call."""
        name = self.enter(chat("hi"), tenant)
        self.leave(name)
        self.see(finished=(ended(name, output, outcome),))


@pytest.fixture
def learner() -> Learner:
    return Learner()


def chat(*texts: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], "max_tokens": 40, **body}


def test_the_output_is_expected_as_the_tenants_answers_were(learner: Learner) -> None:
    for _ in range(LEAST_ANSWERS):
        learner.answer(12)

    cost = learner.cost(chat("hi", n=2))

    assert [(choice.output_tokens, choice.max_tokens) for choice in cost.choices] == [(12, 40)] * 2
    assert (cost.decode_tokens, cost.expected_output_tokens) == (24, 12)


def test_what_cannot_end_before_is_not_expected_to(learner: Learner) -> None:
    for _ in range(LEAST_ANSWERS):
        learner.answer(12)

    def expected(**body: Any) -> int:
        return learner.cost(chat("hi", **body)).choices[0].output_tokens

    assert expected(min_tokens=5) == 12
    assert expected(min_tokens=30) == 30
    assert expected(min_tokens=90) == 40, "the engine refuses it"
    assert expected(ignore_eos=True) == 40
    assert expected(ignore_eos=True, stop=["x"]) == expected(ignore_eos=True, stop_token_ids=[3]) == 12
    assert expected(min_tokens="many", ignore_eos="yes") == 12


def test_only_the_first_choice_of_a_prompt_computes_it(learner: Learner) -> None:
    learner.see()
    cost = learner.cost({"prompt": [list(range(100)), list(range(7))], "n": 3, "max_tokens": 5}, route="completions")

    assert [choice.cached_tokens for choice in cost.choices] == [0, 96, 96, 0, 0, 0], "whole blocks of 16"
    assert [bool(choice.prefix_key) for choice in cost.choices] == [False, True, True, False, False, False]
    assert cost.prefill_tokens == 100 + 4 + 4 + 3 * 7
    other = learner.cost({"prompt": list(range(100)), "n": 2, "max_tokens": 5}, route="completions")
    assert other.choices[1].prefix_key != cost.choices[1].prefix_key, "two calls share nothing thereby"

    learner.see(prefix=None)
    alone = learner.cost({"prompt": list(range(100)), "n": 2, "max_tokens": 5}, route="completions")
    assert [choice.cached_tokens for choice in alone.choices] == [0, 0], "an engine that shares nothing"


def test_what_one_adapter_computed_is_no_credit_for_another_nor_for_the_model(learner: Learner) -> None:
    """The engine's own name, and none, are one and the same."""
    text = "x" * 4096
    name = learner.enter(chat(text, model="sql"))
    learner.see(running(name, prompt=1000))

    def credit(**body: Any) -> int:
        return learner.cost(chat(text, **body)).choices[0].cached_tokens

    assert credit(model="sql") > 0
    assert (credit(), credit(model="tiny"), credit(model="law")) == (0, 0, 0)

    learner.see(running(learner.enter(chat(text)), prompt=1000))
    assert credit() == credit(model="tiny") > 0
    assert credit(model="law") == 0
    assert learner.cost(chat(text, model=["sql"])).choices[0].cached_tokens > 0, "no name: the engine says so"


def test_an_answer_is_learned_once_however_often_the_engine_lists_it(learner: Learner) -> None:
    name = learner.enter(chat("hi"))
    for _ in range(LEAST_ANSWERS):
        learner.see(finished=(ended(name, 12),))

    assert learner.cost(chat("hi")).expected_output_tokens is None


def test_each_choice_of_a_call_is_an_answer(learner: Learner) -> None:
    name = learner.enter(chat("hi", n=LEAST_ANSWERS))
    learner.leave(name)
    learner.see(finished=tuple(ended(name, 9, choice=index) for index in range(LEAST_ANSWERS)))

    assert learner.cost(chat("hi")).expected_output_tokens == 9


@pytest.mark.parametrize("outcome", ["length", "aborted", "expired"])
def test_an_answer_that_was_cut_off_is_known_to_be_longer(learner: Learner, outcome: str) -> None:
    for _ in range(LEAST_ANSWERS):
        learner.answer(12, outcome)

    assert learner.cost(chat("hi")).expected_output_tokens is None


def test_an_answer_that_failed_teaches_nothing(learner: Learner) -> None:
    for _ in range(LEAST_ANSWERS):
        learner.answer(12, "failed")

    assert len(learner.pricing.outputs._all) == 0


def test_where_the_engine_lists_no_request_the_gates_own_count_is_the_length(learner: Learner) -> None:
    for index in range(2 * LEAST_ANSWERS):
        name = learner.enter(chat("hi"))
        learner.ledger.entries[name].choices[0].output_tokens = 12 if index % 2 else 40
        learner.leave(name, listed=False)

    assert learner.cost(chat("hi")).expected_output_tokens is None, "half reached their limit of 40"
    assert learner.pricing.outputs.expected("a", 1000) == 1000
    assert learner.pricing.outputs.expected("a", 1000, 0) > 12


def test_a_call_that_the_engine_never_tells_of_is_forgotten(learner: Learner) -> None:
    name = learner.enter(chat("hi"))
    learner.leave(name, completed=False)
    assert learner.pricing._admitted

    learner.now_us += 11 * SECOND
    learner.see()

    assert not learner.pricing._admitted
    assert not learner.pricing._left


LONG = "The quick brown fox jumps over the lazy dog. " * 20


def computed(learner: Learner, body: Any, *, prompt: int = 200, tenant: str = "a", **changes: Any) -> str:
    name = learner.enter(body, tenant)
    learner.see(running(name, prompt=prompt), **changes)
    return name


def test_a_prompt_that_begins_like_one_computed_before_is_credited_with_whole_blocks(learner: Learner) -> None:
    computed(learner, chat(LONG))

    (choice,) = learner.cost(chat(LONG, "And then?")).choices

    assert 100 < choice.cached_tokens < 200
    assert choice.cached_tokens % 16 == 0
    assert choice.prefix_key
    assert learner.cost(chat(LONG, "And then?")).choices[0].prefix_key == choice.prefix_key


def test_what_follows_a_known_beginning_is_all_that_is_estimated(learner: Learner) -> None:
    unknown = learner.cost(chat(LONG)).choices[0].prompt_tokens
    computed(learner, chat(LONG), prompt=200)

    assert learner.cost(chat(LONG)).choices[0].prompt_tokens < 270 < unknown


@pytest.mark.parametrize(
    ("other", "tenant"),
    [
        pytest.param(chat(LONG), "b", id="another-tenants"),
        pytest.param(chat("x", LONG), "a", id="another-beginning"),
        pytest.param(chat(LONG, tools=[{"type": "function"}]), "a", id="tools-change-the-prompt"),
        pytest.param({"messages": [{"role": "system", "content": LONG}]}, "a", id="another-role"),
        pytest.param({"messages": [{"role": "user", "content": [{"type": "image"}, LONG]}]}, "a", id="a-picture"),
    ],
)
def test_what_is_not_the_same_is_not_credited(learner: Learner, other: Any, tenant: str) -> None:
    computed(learner, chat(LONG))

    assert learner.cost(other, tenant).choices[0].cached_tokens == 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"prefix": None}, id="an-engine-that-does-not-say"),
        pytest.param({"prefix": PrefixState(enabled=False, hits_total=0, queried_tokens_total=0, hit_tokens_total=0,
                                            resumed_tokens_total=0, dropped_blocks_total=0)}, id="switched-off"),
        pytest.param({"boot_id": "boot-2"}, id="a-restart"),
    ],
)  # fmt: skip
def test_nothing_is_credited_where_nothing_can_be_found(learner: Learner, changes: Any) -> None:
    computed(learner, chat(LONG))
    assert learner.cost(chat(LONG)).choices[0].cached_tokens > 0

    learner.see(**changes)

    assert learner.cost(chat(LONG)).choices[0].cached_tokens == 0


def test_a_prompt_is_no_beginning_before_it_is_computed(learner: Learner) -> None:
    name = learner.enter(chat(LONG))
    learner.see(running(name, output=0))
    assert learner.cost(chat(LONG)).choices[0].cached_tokens == 0

    learner.see(finished=(ended(name, 1),))
    assert learner.cost(chat(LONG)).choices[0].cached_tokens > 0


def test_a_credit_that_the_engine_does_not_honour_is_withdrawn(learner: Learner) -> None:
    computed(learner, chat(LONG))
    for _ in range(60):
        name = learner.enter(chat(LONG))
        learner.see(running(name, cached=0))

    assert learner.pricing.prefixes.share < 0.1
    assert learner.cost(chat(LONG)).choices[0].cached_tokens == 0


def test_only_the_first_choice_of_a_prompt_says_what_was_there_before(learner: Learner) -> None:
    computed(learner, chat(LONG))
    name = learner.enter(chat(LONG, n=3))
    learner.see(*(running(name, choice=index, cached=0 if index else 176) for index in range(3)))

    assert learner.pricing.prefixes.share == 1.0


def test_token_ids_are_known_by_their_beginning_too(learner: Learner) -> None:
    body = {"prompt": list(range(200)), "max_tokens": 5}
    name = learner.enter(body, route="completions")
    learner.see(running(name, prompt=200))

    (choice,) = learner.cost({"prompt": [*range(200), 7], "max_tokens": 5}, route="completions").choices

    assert (choice.prompt_tokens, choice.cached_tokens) == (201, 192)
    assert learner.cost({"prompt": [10**30] * 200}, route="completions").choices[0].cached_tokens == 0


def test_the_text_of_a_call_that_was_let_in_is_not_kept(learner: Learner) -> None:
    name = learner.enter(chat(LONG))

    assert learner.ledger.entries[name].cost.matches[0].beginning._text == b""


def test_what_became_of_the_expectations_is_counted(learner: Learner) -> None:
    for _ in range(LEAST_ANSWERS):
        learner.answer(12)
    assert learner.pricing.answers_total == {"within": 0, "longer": 0}, "nothing was expected of these"

    learner.answer(10)
    learner.answer(12)
    learner.answer(13)
    learner.answer(40, "length")
    learner.answer(5, "aborted")

    assert learner.pricing.answers_total == {"within": 2, "longer": 2}


def test_an_answer_that_came_whole_is_as_long_as_it_says(learner: Learner) -> None:
    for _ in range(LEAST_ANSWERS):
        name = learner.enter(chat("hi", n=2))
        learner.pricing.told(name, 12, 14)
        learner.leave(name, listed=False)

    assert learner.cost(chat("hi")).expected_output_tokens == 7, "of two choices"


def test_an_answer_that_says_nothing_and_was_not_seen_teaches_nothing(learner: Learner) -> None:
    name = learner.enter(chat("hi"))
    learner.pricing.told(name, None, None)
    learner.leave(name, listed=False)

    assert len(learner.pricing.outputs._all) == 0


def test_the_length_of_a_prompt_is_learned_from_the_answer_where_no_state_lists_it(learner: Learner) -> None:
    for _ in range(8):
        learner.pricing.told(learner.enter(chat(LONG)), 40 + 180, 5)
        learner.pricing.told(
            learner.enter({"prompt": [LONG, "x"], "max_tokens": 5}, route="completions"), 5000, 5
        )  # of two prompts together

    assert learner.pricing.ratio.tokens_per_byte == pytest.approx(180 / len(LONG))


def test_what_is_left_of_a_block_is_no_wrong_credit(learner: Learner) -> None:
    computed(learner, chat(LONG), prompt=197)
    for _ in range(30):
        cached = learner.cost(chat(LONG, "And then?")).choices[0].cached_tokens
        learner.see(running(learner.enter(chat(LONG, "And then?")), prompt=210, cached=cached))

    assert learner.pricing.prefixes.share == 1.0
    assert learner.cost(chat(LONG, "And then?")).choices[0].cached_tokens == cached > 100
