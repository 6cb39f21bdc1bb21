from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.bodies import MAX_PIECES
from sluice_sidecar.capacity.cost import ChoiceCost
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.errors import Reason, Refused
from sluice_sidecar.estimates import estimate, fitting
from sluice_sidecar.estimates.estimate import Route
from sluice_sidecar.estimates.pricing import Pricing
from sluice_sidecar.estimates.prompt import TokenRatio


def limits() -> Limits:
    found = Limits.from_state(ready_state(), live_config())
    assert found is not None
    return found


def priced(body: Any, route: Route = "chat") -> tuple[ChoiceCost, ...]:
    return Pricing().price(estimate.parse(json.dumps(body).encode(), route), limits()).choices


def chat(text: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **body}


@pytest.mark.parametrize(
    ("body", "route", "choices"),
    [
        pytest.param(chat("x" * 300, max_tokens=7), "chat", [(140, 7)], id="text-by-its-bytes-and-the-template"),
        pytest.param(chat("x" * 300, max_completion_tokens=7), "chat", [(140, 7)], id="the-newer-name-of-max-tokens"),
        pytest.param(
            chat("x" * 300, max_completion_tokens=7, max_tokens=9), "chat", [(140, 9)], id="the-longest-of-two-limits"
        ),
        pytest.param(
            chat("x" * 300, max_completion_tokens=None, max_tokens=9), "chat", [(140, 9)], id="null-is-no-limit"
        ),
        pytest.param(chat("x" * 300, max_tokens=1, n_predict=9), "chat", [(140, 9)], id="what-llama-cpp-goes-by"),
        pytest.param(chat("x" * 300, max_tokens=-1), "chat", [(140, 884)], id="below-zero-is-no-limit-to-llama-cpp"),
        pytest.param(chat("x", max_tokens=7, tools=["y" * 295]), "chat", [(252, 7)], id="tools-are-part-of-the-prompt"),
        pytest.param(
            {"messages": [{"role": "assistant", "tool_calls": ["y" * 296]}], "max_tokens": 7},
            "chat",
            [(140, 7)],
            id="and-so-are-the-calls-of-them",
        ),
        pytest.param(chat("x", max_tokens=7, tools=None), "chat", [(41, 7)], id="no-tools"),
        pytest.param(chat("x" * 300), "chat", [(140, 884)], id="no-max-tokens-is-what-fits"),
        pytest.param(chat("x", max_tokens=7, n=3), "chat", [(41, 7)] * 3, id="each-choice-has-its-own-prefill"),
        pytest.param(chat("x", max_tokens=7, n=10**9), "chat", [(41, 7)] * 128, id="n-is-bounded-before-it-is-used"),
        pytest.param({"prompt": "x" * 30, "max_tokens": 5}, "completions", [(11, 5)], id="a-completion"),
        pytest.param({"prompt": [1, 2, 3], "max_tokens": 5}, "completions", [(3, 5)], id="token-ids-are-exact"),
        pytest.param({"prompt": [[1, 2], [3]], "max_tokens": 5}, "completions", [(2, 5), (1, 5)], id="lists-of-ids"),
        pytest.param(
            {"prompt": ["x" * 30, "x" * 60], "max_tokens": 5, "n": 2},
            "completions",
            [(11, 5), (11, 5), (21, 5), (21, 5)],
            id="prompts-times-choices",
        ),
    ],
)
def test_price(body: Any, route: Route, choices: list[tuple[int, int]]) -> None:
    assert [(choice.prompt_tokens, choice.max_tokens) for choice in priced(body, route)] == choices


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"messages": 7, "n": "two", "max_tokens": -1}, id="wrong-types"),
        pytest.param({"messages": [7, None, {"content": {"text": 3}}]}, id="messages-of-anything"),
        pytest.param({"messages": [{"content": [{"type": "text", "text": "hi"}, 3]}], "max_tokens": True}, id="parts"),
        pytest.param({"prompt": [], "messages": []}, id="empty-lists"),
    ],
)
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_what_is_wrong_is_priced_as_little_and_left_to_the_engine(body: Any, route: Route) -> None:
    (choice,) = priced(body, route)

    assert 1 <= choice.prompt_tokens < 100


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"", "not valid JSON", id="an-empty-body"),
        pytest.param(b"{", "not valid JSON", id="half-an-object"),
        pytest.param(b"[]", "must be a JSON object", id="a-list"),
        pytest.param(b'{"a": "\xff"}', "not valid UTF-8 at byte 7", id="invalid-utf-8"),
        pytest.param(b"\xef\xbb\xbf{}", "byte order mark", id="a-byte-order-mark"),
        pytest.param(b"[" * 100_000, "nested too deep", id="nested-without-end"),
        pytest.param(b'{"n": ' + b"9" * 5000 + b"}", "more than 4300 digits", id="a-number-without-end"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused_with_a_sentence(body: bytes, says: str) -> None:
    with pytest.raises(Refused) as caught:
        estimate.parse(body, "chat")

    assert caught.value.refusal.reason is Reason.INVALID_JSON
    assert says in caught.value.refusal.message


def test_a_conversation_of_too_many_pieces_is_refused_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_told", None)
    body = json.dumps({"messages": [{"role": "user", "content": ""}] * (MAX_PIECES + 1)}).encode()
    with pytest.raises(Refused, match=f"Invalid 'messages': must hold at most {MAX_PIECES} messages") as caught:
        estimate.parse(body, "chat")

    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, "messages")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
bodies = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("messages", "prompt", "n", "max_tokens", "max_completion_tokens"), json_values)
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of the code's
@given(bodies, st.sampled_from(["chat", "completions"]))
def test_any_json_has_a_price_that_fits_or_a_reason_why_not(body: Any, route: Route) -> None:
    asked = estimate.parse(json.dumps(body).encode(), route)
    if fitting.refuse(asked, limits()) is not None:
        return
    for choice in Pricing().price(asked, limits()).choices:
        assert limits().unfit_reason(choice.prompt_tokens, choice.max_tokens) is None


def parsed(text: str, **body: Any) -> estimate.Asked:
    return estimate.parse(json.dumps(chat(text, **body)).encode(), "chat")


@pytest.mark.parametrize(
    ("asked", "counted", "refused"),
    [
        pytest.param(parsed("x" * 300, max_tokens=10), False, False, id="fits-by-any-measure"),
        pytest.param(parsed("x" * 700, max_tokens=10), True, False, id="a-quarter-of-what-fits-is-counted"),
        pytest.param(parsed("x" * 3_600, max_tokens=10), True, False, id="near-the-limit-is-counted"),
        pytest.param(parsed("x" * 16_500, max_tokens=10), True, True, id="far-beyond-is-refused-uncounted"),
        pytest.param(parsed("x", max_tokens=1_024), True, True, id="max-tokens-alone-is-the-whole-context"),
    ],
)
def test_only_what_may_fit_is_worth_counting(asked: estimate.Asked, *, counted: bool, refused: bool) -> None:
    assert (fitting.refuse(asked, limits()) is not None) is refused
    assert fitting.worth_counting(asked, limits(), TokenRatio()) is counted


def test_a_refusal_without_counting_says_so() -> None:
    refusal = fitting.refuse(parsed("x" * 32_000), limits())

    assert refusal is not None
    assert refusal.message.startswith("Prompt (at least 2000 tokens)")


def test_the_question_for_the_count_is_the_largest_prompt() -> None:
    body = json.dumps({"model": "m", "prompt": ["short", "the longest one"]}).encode()

    question = json.loads(estimate.tokenize_body(body, estimate.parse(body, "completions")))

    assert question == {"model": "m", "prompt": "the longest one"}


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_the_question_for_the_count_has_what_the_template_is_given(choice: str) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    body = json.dumps({"messages": [called], "tools": [{}], "tool_choice": choice, "stop": "x"}).encode()

    question = json.loads(estimate.tokenize_body(body, estimate.parse(body, "chat")))

    told = {"tool_choice": "none"} if choice == "none" else {}
    assert question == {"messages": [called], "tools": [{}], **told}


def test_the_ratio_is_learned_once_there_are_enough_samples() -> None:
    ratio = TokenRatio()
    for _ in range(7):
        ratio.learn(1_000, 200)
    assert ratio.tokens_per_byte == pytest.approx(1 / 3)

    ratio.learn(1_000, 220)

    assert ratio.tokens_per_byte == pytest.approx(0.22)


def test_a_tiny_prompt_teaches_nothing() -> None:
    ratio = TokenRatio(least_samples=1)
    ratio.learn(3, 40)

    assert ratio.tokens_per_byte == pytest.approx(1 / 3)


def test_other_scripts_cost_more_tokens_a_byte() -> None:
    (ascii_choice,), (chinese,) = priced(chat("x" * 300, max_tokens=1)), priced(chat("语" * 100, max_tokens=1))

    assert chinese.prompt_tokens > ascii_choice.prompt_tokens


@pytest.mark.parametrize(
    ("priority", "behind"),
    [(1, True), (10**30, True), (0, False), (-5, False), (True, False), ("9", False), (1.5, False), (None, False)],
)
def test_a_priority_above_zero_puts_it_behind_its_callers_others(priority: object, *, behind: bool) -> None:
    body = json.dumps({"messages": [], "priority": priority}).encode()

    assert estimate.parse(body, "chat").behind == behind


@pytest.mark.parametrize(
    ("body", "least"),
    [
        pytest.param({"messages": [{"role": "user", "content": "hello"}] * 100}, 0, id="few-messages"),
        pytest.param({"messages": [{"role": "user", "content": "hello"}] * 8_000}, 14, id="many-messages"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}] * 8_000}]},
            14,
            id="many-parts",
        ),
    ],
)
def test_a_body_of_very_many_parts_is_read_in_strides(body: dict[str, object], least: int) -> None:
    content = json.dumps(body).encode()
    read = []

    def strides() -> Iterator[None]:
        read.append((yield from estimate.parsing(content, "chat")))

    pauses = len(list(strides()))

    assert read == [estimate.parse(content, "chat")]
    assert least <= pauses <= least * 2


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "a" * 40}, {"role": 1}, {"role": "user", "name": "a"}])
def test_what_stands_beside_a_text_is_told_the_same_way_whatever_it_is(message: dict[str, object]) -> None:
    body = {"messages": [{"content": "hello", **message}]}

    (prompt,) = estimate.parse(json.dumps(body).encode(), "chat").prompts

    assert prompt.text.split(b"\x00")[1:] == [json.dumps(message, sort_keys=True).encode(), b"hello"]
