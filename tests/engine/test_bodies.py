"""What is too much of a body is found without reading it, however it is written, and told in its sender's words."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice_engine import bodies
from sluice_engine.bodies import MAX_PARTS, MAX_PIECES, MAX_VALUES, Unreadable, read_json, too_many_pieces
from sluice_engine.errors import InvalidRequest
from sluice_engine.protocol import messages
from sluice_engine.protocol.chat import parse_chat
from sluice_engine.protocol.tokens import parse_tokenize

# What counts outside of texts, and what a text writes with a backslash, or hides behind one.
texts = st.text(alphabet='"\\[{,]}a\n\u4e00', max_size=8)
documents = st.recursive(
    st.none() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def num_parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_parts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(num_parts, value))
    return int(isinstance(value, str))


def num_commas(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(num_commas, inner))


@given(documents, st.integers(0, 12), st.integers(1, 12), st.booleans())
@example(["\\", '"', "[[[[[["], 4, 12, True)
def test_what_counts_is_what_stands_outside_of_texts(document: Any, parts: int, values: int, ascii_only: bool) -> None:  # noqa: FBT001
    raw = json.dumps(document, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_PARTS", parts)
        patch.setattr(bodies, "MAX_VALUES", values)
        problem = None
        try:
            assert read_json(raw) == document
        except Unreadable as error:
            problem = str(error)

    if num_parts(document) > parts and len(raw) >= 2 * parts:
        assert problem == f"the body holds more than {parts} texts, names, arrays and objects together"
    elif num_commas(document) >= values and len(raw) >= 2 * parts:
        assert problem == f"the body holds more than {values} values"
    else:
        assert problem is None


# Each about as large as a body may be.
TOO_MUCH = {
    "messages": b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":""}'] * 240_000),
    "parts": b'{"messages": [{"content": [%s]}]}' % b",".join([b'{"type":"text"}'] * 400_000),
    "tools": b'{"tools": [%s]}' % b",".join([b'{"type":"function"}'] * 350_000),
    "stop": b'{"stop": [%s]}' % b",".join([b'"a"'] * 2_000_000),
    "logit_bias": b'{"logit_bias": {%s}}' % b",".join(b'"%d":1' % number for number in range(600_000)),
    "metadata": b'{"metadata": {%s}}' % b",".join(b'"%d":""' % number for number in range(600_000)),
    "unknown names": b"{%s}" % b",".join(b'"x%d":1' % number for number in range(600_000)),
    "a schema": b'{"guided_json": {"enum": [%s]}}' % b",".join([b'"\\""'] * 1_000_000),
    "nesting": b'{"messages": %s%s}' % (b"[" * 4_000_000, b"]" * 4_000_000),
    "nesting again and again": b'{"metadata": [%s]}' % b",".join([b"[" * 900 + b"]" * 900] * 4_000),
    "lists of token ids": b'{"prompt": [%s]}' % b",".join([b"[1]"] * 1_900_000),
    "token ids": b'{"stop_token_ids": [%s]}' % b",".join([b"1"] * 4_000_000),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_is_too_much_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def read(*_args: object, **_options: object) -> NoReturn:
        raise AssertionError("it was read")

    monkeypatch.setattr(json, "loads", read)
    with pytest.raises(Unreadable, match=rf"more than {MAX_PARTS} texts|more than {MAX_VALUES} values"):
        read_json(TOO_MUCH[what])


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(json.dumps({"prompt": list(range(10_000, 10_000 + MAX_VALUES // 2))}).encode(), id="token-ids"),
        pytest.param(json.dumps({"prompt": 'a, [b] {c} "d"\\\n' * 400_000}).encode(), id="program-text"),
        pytest.param(json.dumps({"prompt": ["a"] * (MAX_PARTS - 3)}).encode(), id="as-many-parts-as-may-be"),
    ],
)  # fmt: skip
def test_what_is_long_and_not_too_much_is_read(raw: bytes) -> None:
    assert read_json(raw) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(b"\xef\xbb\xbf{}", "byte order mark (BOM)", id="a-bom"),
        pytest.param(b"\xff\xfe{\x00}\x00", "not valid UTF-8 at byte 0", id="utf-16"),
        pytest.param(b'{"a": "\xed\xa0\x80"}', "not valid UTF-8 at byte 7", id="half-a-pair-in-bytes"),
        pytest.param(b'{"a": 1%s}' % (b"0" * 4300), "a whole number of more than 4300 digits", id="4301-digits"),
        pytest.param(b'{"a": -1%s}' % (b"0" * 4300), "a whole number of more than 4300 digits", id="4301-below-zero"),
        pytest.param(b"[" * 100_000, "nested too deep", id="nested-without-end"),
        pytest.param(b'{"a": 0x10}', "not valid JSON: Expecting ',' delimiter: line 1 column 8", id="no-json"),
        pytest.param(b"", "not valid JSON", id="nothing"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_no_json_is_told_in_words_about_the_body(raw: bytes, says: str, *, strict: bool) -> None:
    with pytest.raises(Unreadable, match=re.escape(says)) as caught:
        read_json(raw, strict=strict)

    assert "sys." not in str(caught.value)
    assert "utf-8-sig" not in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1, "a": 2}', b'{"a": [{"b": 1, "b": 1}]}']
)
def test_only_who_obeys_a_body_refuses_what_others_would_read(raw: bytes) -> None:
    read_json(raw)
    with pytest.raises(Unreadable, match=r"not a JSON number|is there twice in one object"):
        read_json(raw, strict=True)


@pytest.mark.parametrize(
    "raw", [b'{"a": 1e999}', b'{"a": "\\ud800"}', b'{"\\udc00": 0.0}', b'{"a": 1%s}' % (b"0" * 4299)]
)
def test_what_json_can_say_is_read(raw: bytes) -> None:
    assert read_json(raw, strict=True) == json.loads(raw)


MESSAGE = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": ""}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LONG: dict[str, list[Any]] = {
    "messages": [MESSAGE] * MAX_PIECES,
    "parts": [{"role": "user", "content": [PART] * (MAX_PIECES - 1)}],
    "calls": [{"role": "assistant", "tool_calls": [CALL] * 63}] * (MAX_PIECES // 64),
}


@pytest.mark.parametrize("what", LONG)
def test_a_conversation_has_only_so_many_pieces(what: str) -> None:
    problem = f"must hold at most {MAX_PIECES} messages, content parts and tool calls together, not {MAX_PIECES + 1}"

    assert too_many_pieces(LONG[what]) is None
    assert too_many_pieces([*LONG[what], MESSAGE]) == problem
    assert too_many_pieces([*LONG[what][:-1], None, 7, {"content": "x"}, {"content": 3, "tool_calls": {}}][:2]) is None


@pytest.mark.parametrize("parse", [parse_chat, parse_tokenize])
def test_a_conversation_that_is_too_long_is_refused_before_its_messages_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, parse: Any
) -> None:
    monkeypatch.setattr(messages, "_message", None)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PIECES} messages") as caught:
        parse(json.dumps({"model": "m", "messages": [MESSAGE] * (MAX_PIECES + 1)}).encode())

    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")
