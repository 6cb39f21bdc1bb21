"""Calls are found wherever a text is cut, what is no call stays text, and nothing is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.protocol.tools import Tool, ToolUse
from sluice_engine.text.chat_template import ChatTemplate
from sluice_engine.text.tool_calls import ToolCalling, ToolCallReader
from sluice_engine.text.tool_format import SPECIAL, ToolFormat, ToolTemplate

NAMES = frozenset({"get", "look_up"})
HERMES = ToolFormat(family="hermes", opening="<tool_call>", closing="</tool_call>")
LIST = replace(HERMES, layout="list")
LLAMA = ToolFormat(family="llama", opening="<|python_tag|>", bare=True, key="parameters", opened=False)
MISTRAL = ToolFormat(family="mistral", opening="[TOOL_CALLS]", layout="list")
NAMED = ToolFormat(family="mistral", opening="[TOOL_CALLS]", layout="named", mark="[ARGS]")
FORMS = [HERMES, LIST, LLAMA, MISTRAL, NAMED]
A = '{"name": "get", "arguments": {"a": 1}}'
B = '{"name": "look_up", "arguments": {"b": [{}]}}'
P = '{"name": "get", "parameters": {"a": 1}}'


@dataclass
class Read:
    """An answer as a client puts it together."""

    text: str
    calls: list[tuple[str, str]]
    complete: bool
    full: bool


def reader_of(form: ToolFormat, *, special: tuple[str, ...] = (), most: int | None = None) -> ToolCallReader:
    ids = {mark: index for index, mark in enumerate(special)}
    return ToolCallReader(ToolCalling(form, ids, {}, NAMES, most))


def read(form: ToolFormat, pieces: list[str], *, special: tuple[str, ...] = (), most: int | None = None) -> Read:
    reader = reader_of(form, special=special, most=most)
    texts: list[str] = []
    calls: list[list[str]] = []
    for settled in [*map(reader.push, pieces), reader.finish()]:
        texts.append(settled.text)
        for delta in settled.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "each begins once, in its order"
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1, "nothing more comes of an earlier one"
            calls[-1][1] += delta.arguments
    assert reader.num_calls == len(calls)
    told = [(name, arguments) for name, arguments in calls]
    return Read("".join(texts), told, reader.all_complete, reader.is_full)


ONE = [("get", '{"a": 1}')]
TWO = [("get", '{"a": 1}'), ("look_up", '{"b": [{}]}')]
CASES: list[Any] = [
    # Hermes.
    pytest.param(HERMES, "Hello, <b>.\n", "Hello, <b>.\n", [], id="no call"),
    pytest.param(HERMES, "", "", [], id="nothing"),
    pytest.param(HERMES, f"<tool_call>\n{A}\n</tool_call>", "", ONE, id="a call"),
    pytest.param(HERMES, f"Wait.\n\n<tool_call>{A}</tool_call>\n", "Wait.", ONE, id="text before a call"),
    pytest.param(HERMES, f"<tool_call>\n{A}\n</tool_call>\n\nSo.\n", "So.\n", ONE, id="text after a call"),
    pytest.param(HERMES, f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>", "", TWO, id="two calls"),
    pytest.param(HERMES, f"a<tool_call>{A}</tool_call>b<tool_call>{B}</tool_call>c", "abc", TWO, id="text around two"),
    pytest.param(HERMES, f"<tool_call>{A}", "", ONE, id="no closing"),
    pytest.param(HERMES, f"<tool_call>{A[:-1]}", "", ONE, id="an end after the arguments"),
    pytest.param(HERMES, f"<tool_call>{A}\n</tool_c", "", ONE, id="half a closing"),
    pytest.param(HERMES, f"<tool_call>{A}\n<tool_call>{B}</tool_call>", "", TWO, id="a closing forgotten"),
    pytest.param(HERMES, f"<tool_call>{A}</tool_x>", "</tool_x>", ONE, id="another closing"),
    pytest.param(LIST, f"<tool_call>[{A}, {B}]</tool_call>", "", TWO, id="a list of two"),
    pytest.param(LIST, f"<tool_call>[{A}, {{", "{", ONE, id="a list that was cut"),
    pytest.param(LIST, f"<tool_call>[{A} x", "x", ONE, id="a list that is none"),
    pytest.param(HERMES, f"<tool_call>[{A},{B}]</tool_call>", "", TWO, id="a list where objects were taught"),
    pytest.param(HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "get"}</tool_call>', "", ONE,
                 id="arguments first"),
    pytest.param(HERMES, '<tool_call>{"type":"function","name":"get","arguments":{"a": 1},"id":"x"}</tool_call>', "",
                 ONE, id="more members"),
    pytest.param(HERMES, '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")], id="no arguments"),
    pytest.param(HERMES, '<tool_call>{ "name" : "\\u0067et" , "parameters" : {} }</tool_call>', "", [("get", "{}")],
                 id="the other word for arguments, and a name with an escape"),
    pytest.param(HERMES, '<tool_call>{"name": "get", "arguments": {"s": "}</tool_call>\\"{"}}</tool_call>', "",
                 [("get", '{"s": "}</tool_call>\\"{"}')], id="markers and brackets in a string"),
    pytest.param(HERMES, '<tool_call>{"name": "get", "arguments": {"s": "\\\\", "t": "}"}}</tool_call>', "",
                 [("get", '{"s": "\\\\", "t": "}"}')], id="a backslash at a string's end"),
    # What is none stays.
    pytest.param(HERMES, "Say <tool_call> and </tool_call>.", "Say <tool_call> and </tool_call>.", [], id="its name"),
    pytest.param(HERMES, "<tool_call", "<tool_call", [], id="half an opening"),
    pytest.param(HERMES, "<tool_call>", "<tool_call>", [], id="an opening"),
    pytest.param(HERMES, '<tool_call>{"na', '<tool_call>{"na', [], id="cut before the name"),
    pytest.param(HERMES, "<tool_call>{name: 1}", "<tool_call>{name: 1}", [], id="no JSON"),
    pytest.param(HERMES, "<tool_call>[1]", "<tool_call>[1]", [], id="a list of no calls"),
    pytest.param(HERMES, f"<tool_call>{A.replace('get', 'got')}</tool_call>",
                 f"<tool_call>{A.replace('get', 'got')}</tool_call>", [], id="a function that is not there"),
    pytest.param(HERMES, f"<tool_call>x<tool_call>{A}</tool_call>", "<tool_call>x", ONE, id="a call after none"),
    pytest.param(HERMES, f"<tool_call><tool_call>{A}</tool_call>", "<tool_call>", ONE, id="opened twice"),
    pytest.param(HERMES, '<tool_call>{"name": "get", "arguments": "{}"}',
                 '<tool_call>{"name": "get", "arguments": "{}"}', [], id="arguments as text"),
    pytest.param(HERMES, '<tool_call>{"arguments": {"a": }, "name": "get"}',
                 '<tool_call>{"arguments": {"a": }, "name": "get"}', [], id="arguments first, and no JSON"),
    pytest.param(HERMES, '<tool_call>{"x": {}}', '<tool_call>{"x": {}}', [], id="another member"),
    # Llama.
    pytest.param(LLAMA, P, "", ONE, id="a bare object"),
    pytest.param(LLAMA, f"\n{P}\n", "", ONE, id="a bare object and white space"),
    pytest.param(LLAMA, f"{P}; {P}", "", ONE * 2, id="two bare objects"),
    pytest.param(LLAMA, f"{P} done", "done", ONE, id="text after a bare object"),
    pytest.param(LLAMA, f"So: {P}", f"So: {P}", [], id="an object inside a text"),
    pytest.param(LLAMA, f"So: <|python_tag|>{P}", "So:", ONE, id="a tag inside a text"),
    pytest.param(LLAMA, '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', [], id="some other object"),
    pytest.param(LLAMA, '{"name": "get"}', '{"name": "get"}', [], id="an object with the name alone"),
    pytest.param(LLAMA, '{"type": "function", "name": "get", "parameters": {"a": 1}}', "", ONE, id="with its type"),
    pytest.param(LLAMA, "  text", "  text", [], id="white space before a text"),
    # Mistral.
    pytest.param(MISTRAL, f"[TOOL_CALLS] [{A}]", "", ONE, id="a list of one"),
    pytest.param(MISTRAL, f"Ok.[TOOL_CALLS][{A}, {B}]", "Ok.", TWO, id="a list without a space"),
    pytest.param(MISTRAL, f"[TOOL_CALLS]{A}", "", ONE, id="an object where a list was taught"),
    pytest.param(NAMED, '[TOOL_CALLS]get[ARGS]{"a": 1}', "", ONE, id="by name"),
    pytest.param(NAMED, '[TOOL_CALLS]get[CALL_ID]9x9x9x9x9[ARGS]{"a": 1}', "", ONE, id="by name, with an id"),
    pytest.param(NAMED, '[TOOL_CALLS]get{"a": 1}[TOOL_CALLS]look_up {"b": [{}]}', "", TWO, id="by name, no mark"),
    pytest.param(NAMED, '[TOOL_CALLS]got[ARGS]{"a": 1}', '[TOOL_CALLS]got[ARGS]{"a": 1}', [], id="by another name"),
    pytest.param(NAMED, "[TOOL_CALLS]get[ARG", "[TOOL_CALLS]get[ARG", [], id="half a mark"),
    pytest.param(NAMED, "[TOOL_CALLS]get it", "[TOOL_CALLS]get it", [], id="no arguments after a name"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_told_apart_from_text(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = read(form, [text])

    assert (whole.text, whole.calls) == (content, calls)
    assert whole.complete == bool(calls)
    assert read(form, list(text)) == whole, "character by character"


@pytest.mark.parametrize(
    ("arguments", "told", "rest"),
    [
        pytest.param('{"a": [1, "x', '{"a": [1, "x', "", id="cut"),
        pytest.param('{"a": ', '{"a": ', "", id="cut before a value"),
        pytest.param("{'a': 1}", "{'a': 1}", "", id="no JSON, but whole"),
        pytest.param('{"a": 1]}', '{"a": 1', "]}", id="brackets crossed"),
    ],
)
def test_a_call_that_began_is_told_as_far_as_it_goes_and_is_not_complete(arguments: str, told: str, rest: str) -> None:
    answer = read(HERMES, [f'<tool_call>{{"name": "get", "arguments": {arguments}'])

    assert answer == Read(rest, [("get", told)], complete=False, full=False)


def test_arguments_come_while_they_are_written() -> None:
    reader = reader_of(HERMES)
    pushed = [
        reader.push(text) for text in ("So.\n<tool_call>{", '"name": "ge', 't", "arguments"', ': {"a', '": 1', "}}")
    ]

    assert [settled.text for settled in pushed] == ["So.", "", "", "", "", ""]
    assert [[(call.name, call.arguments) for call in settled.calls] for settled in pushed] == [
        [], [], [], [("get", '{"a')], [(None, '": 1')], [(None, "}")]
    ]  # fmt: skip


def test_with_one_call_allowed_the_answer_is_full_after_it() -> None:
    answer = read(HERMES, [f"<tool_call>{A}", f"</tool_call><tool_call>{B}</tool_call> and so on"], most=1)

    assert answer == Read("", ONE, complete=True, full=True)


@pytest.mark.parametrize(
    ("form", "mark"), [(HERMES, "<tool_call>"), (MISTRAL, "[TOOL_CALLS]"), (LLAMA, "<|python_tag|>")]
)
def test_a_marker_that_is_a_special_token_is_not_forged_by_its_letters(form: ToolFormat, mark: str) -> None:
    call = f"[{A}]" if form.layout == "list" else A
    spelled = read(form, [f"He said {mark}{call}"], special=(mark,))
    meant = read(form, [f"He said {SPECIAL}{mark}{call}"], special=(mark,))

    assert spelled == Read(f"He said {mark}{call}", [], complete=False, full=False)
    assert meant == Read("He said", ONE, complete=True, full=False)
    assert read(form, [f"{SPECIAL}{mark}no"], special=(mark,)).text == f"{mark}no", "its name shows, and no more"


def test_a_special_token_inside_arguments_ends_the_call() -> None:
    cut = f'{SPECIAL}<tool_call>{{"name": "get", "arguments": {{"a": 1{SPECIAL}</tool_call>'
    answer = read(HERMES, [cut], special=("<tool_call>", "</tool_call>"))

    assert answer == Read("</tool_call>", [("get", '{"a": 1')], complete=False, full=False)


SNIPPETS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]", SPECIAL,
    A, B, P, A[:20], B[:-1], '{"name": "get", ', '"arguments": ', "get", "look_up",
    "{", "}", "[", "]", '"', ",", ":", " ", "\n", "<", "é🙂", "\\",
]  # fmt: skip


@given(
    st.sampled_from([(form, marks) for form in FORMS for marks in ((), form.markers)]),
    st.lists(st.sampled_from(SNIPPETS), max_size=14).map("".join), st.data(), st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_any_cut_gives_the_same(
    kind: tuple[ToolFormat, tuple[str, ...]], text: str, data: st.DataObject, most: int | None
) -> None:
    form, marks = kind
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, [text], special=marks, most=most)

    assert read(form, pieces, special=marks, most=most) == whole
    for name, arguments in whole.calls:
        assert name in NAMES
        assert arguments in text
    if not whole.calls:
        assert whole.text == text.replace(SPECIAL, ""), "what is no call is there to the letter"
    if whole.complete:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
).map(lambda value: {"x": value}), st.sampled_from(FORMS), st.booleans())  # fmt: skip
def test_any_arguments_come_out_as_they_went_in(value: dict[str, Any], form: ToolFormat, ascii_only: bool) -> None:  # noqa: FBT001
    arguments = json.dumps(value, ensure_ascii=ascii_only).replace(SPECIAL, "")
    call = f'{{"name": "get", "{form.key}": {arguments}}}'
    opening = "" if form.bare else form.opening
    written = {"object": call, "list": f"[{call}]", "named": f"get{form.mark}{arguments}"}[form.layout]

    assert read(form, [f"{opening}{written}{form.closing}"]) == Read(
        "", [("get", arguments)], complete=True, full=False
    )


def test_hardly_any_work_is_done_twice() -> None:
    """Openings in openings, and arguments that never end: linear in what was written."""
    deep = '<tool_call>{"arguments": {"<tool_call>{' * 4000
    answer = read(HERMES, [deep])
    assert answer.text == deep
    space = " " * 100_000
    assert read(HERMES, [space, "x"]).text == f"{space}x"


def test_a_call_may_be_made_of_those_that_are_callable_only() -> None:
    tools = tuple(Tool(name, None, {"type": "object"}) for name in sorted(NAMES))
    use = ToolUse(tools=tools, callable=tools[:1], parallel=True)
    calling = ToolCalling.of(ToolTemplate(ChatTemplate("", {}), replace(HERMES, parallel=False), {}), use)

    assert calling.names == frozenset({"get"})
    assert calling.most == 1, "as many as the template can put into the next prompt"
