from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest

from sluice_engine.errors import InvalidRequest, ModelUnavailable
from sluice_engine.text.chat_template import MAX_PROMPT_CHARACTERS, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi <b> é"}]


def render(source: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 3, 4, tzinfo=UTC))
    return template.render(messages, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        pytest.param(
            "{{ bos_token }}{{ messages[0].content }}", "<s>hi <b> é", id="special tokens and content as they are"
        ),
        pytest.param(
            "{{ messages[0] | tojson }}", '{"role": "user", "content": "hi <b> é"}', id="tojson does not escape"
        ),
        pytest.param("{{ strftime_now('%Y-%m-%d') }}", "2026-03-04", id="strftime_now takes the clock that was given"),
        pytest.param("{% generation %}{{ 1 }}{% endgeneration %}", "1", id="the generation tag renders its body"),
        pytest.param("{% for m in messages %}{% break %}{% endfor %}x", "x", id="loop controls"),
        pytest.param("{% if tools %}T{% endif %}{% if add_generation_prompt %}G{% endif %}", "G", id="no tools"),
        pytest.param("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb", id="blocks are trimmed as Hugging Face does"),
    ],
)
def test_a_template_renders(source: str, prompt: str) -> None:
    assert render(source) == prompt


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param("{{ raise_exception('roles must\\nalternate') }}", "roles must alternate", id="raise_exception"),
        pytest.param("{{ messages[3].content }}", "no element 3", id="a message that is not there"),
        pytest.param("{{ messages.append(1) }}", "unsafe", id="messages are not changed"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="no way to Python's insides"),
        pytest.param("{{ 'x' * 70000000 }}", "beyond all bounds", id="a prompt beyond the size"),
        pytest.param("{{ 1 / 0 }}", "division by zero", id="any error of the program"),
    ],
)
def test_a_template_that_refuses_is_the_callers_error(source: str, says: str) -> None:
    assert MAX_PROMPT_CHARACTERS < 70_000_000
    with pytest.raises(InvalidRequest, match=says) as caught:
        render(source)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "chat_template_error")
    assert "\n" not in caught.value.message


def test_a_template_that_takes_too_long_is_stopped() -> None:
    ticks = itertools.count()
    template = ChatTemplate("{% for i in range(99999) %}x{% endfor %}", {})

    with pytest.raises(InvalidRequest, match="beyond all bounds"):
        template.render(MESSAGES, clock=lambda: float(next(ticks)))
    assert next(ticks) < 10


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", id="silent loops"),
        pytest.param("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
                     id="a macro that calls itself twice"),
        pytest.param("{{ 9 ** 999999999 }}", id="a power"),
        pytest.param("{% set x = 9 ** 64 %}{% set x = x ** 64 %}{% set x = x ** 64 %}", id="a power of a power"),
        pytest.param("{% set ns = namespace(x=9) %}{% for i in range(16) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
                     id="a product of products"),
        pytest.param("{{ ['a'] * 10 ** 12 }}", id="a long list"),
        pytest.param("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
                     id="doubling"),
    ],
)  # fmt: skip
def test_a_template_that_says_nothing_and_goes_on_is_stopped(source: str) -> None:
    ticks = itertools.count()
    template = ChatTemplate(source, {})

    with pytest.raises(InvalidRequest, match="beyond all bounds"):
        template.render(MESSAGES, clock=lambda: next(ticks) / 100)


def test_a_loop_over_all_messages_is_no_bomb() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ m.content * 2 }}{% else %}-{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": "a"}] * 3) == "<s>aaaaaa"


def test_a_broken_template_is_a_broken_model() -> None:
    with pytest.raises(ModelUnavailable, match="does not compile") as caught:
        ChatTemplate("{% for %}", {})
    assert caught.value.code == "ModelCorrupt"
