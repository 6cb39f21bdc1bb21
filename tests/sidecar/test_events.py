from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.protocol.reply import held_frame
from sluice_sidecar.web import events


def event(index: int, text: str) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("chunk", "found"),
    [
        pytest.param(event(0, "a") + event(0, "b"), {0: 2}, id="one-choice-twice"),
        pytest.param(event(0, "a") + event(2, "b"), {0: 1, 2: 1}, id="two-that-took-turns"),
        pytest.param(event(0, "") + event(1, "b"), {1: 1}, id="a-role-is-no-token"),
        pytest.param(event(1, '"index": 7'), {1: 1}, id="a-text-that-looks-like-a-field"),
        pytest.param((event(0, "a") + event(0, "b")).replace(b"\n", b"\r\n"), {0: 2}, id="lines-that-end-in-two-bytes"),
        pytest.param(b": ping\n\n", {}, id="no-text"),
        pytest.param(held_frame(0) + event(1, "b") + held_frame(1), {0: 1, 1: 2}, id="tokens-whose-text-waits"),
        pytest.param(event(0, ": token {}\n: token {}"), {0: 1}, id="a-text-that-looks-like-a-comment"),
    ],
)
def test_which_choices_a_chunk_has_text_of(chunk: bytes, found: dict[int, int]) -> None:
    assert events.choices_with_text(chunk) == found
    assert events.count_with_text(chunk) == sum(found.values())


@pytest.mark.parametrize(
    ("delta", "is_token"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"content": "a"}, True),
        ({"content": '"'}, True),
        ({"reasoning_content": "hm"}, True),
        ({"reasoning": "hm"}, True),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, True),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, True),
        ({}, False),
    ],
    ids=str,
)
def test_what_is_a_token(delta: dict[str, object], is_token: bool) -> None:  # noqa: FBT001
    assert events.has_text(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n") is is_token


@pytest.mark.parametrize(
    ("data", "whole", "rest"),
    [
        pytest.param(b"data: a\n\n", b"data: a\n\n", b"", id="one"),
        pytest.param(b"data: a\n\ndata: b", b"data: a\n\n", b"data: b", id="one-and-a-beginning"),
        pytest.param(b"data: a\r\n\r\ndata: b", b"data: a\r\n\r\n", b"data: b", id="lines-that-end-in-two-characters"),
        pytest.param(b"data: a\n", b"", b"data: a\n", id="half-an-end"),
        pytest.param(b"x" * 300_000, b"x" * 300_000, b"", id="none-that-ever-ends"),
    ],
)
def test_only_whole_events_go_out(data: bytes, whole: bytes, rest: bytes) -> None:
    assert events.whole_events(data) == (whole, rest)


@given(st.lists(st.binary(min_size=1, max_size=40)))
def test_no_byte_is_lost_or_changed_on_its_way(pieces: list[bytes]) -> None:
    out, pending = b"", b""
    for piece in pieces:
        whole, pending = events.whole_events(pending + piece)
        out += whole

    assert out + pending == b"".join(pieces)


def test_the_end_of_a_stream_is_read_from_its_last_bytes() -> None:
    end = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\ndata: [DONE]\n\n'

    assert (events.output_tokens(end), events.is_complete(end), events.is_expired(end)) == (7, True, False)
    assert events.prompt_tokens(end) == 9
    assert events.is_expired(b'data: {"error": {"code": "deadline_missed"}}\n\n')
    assert events.is_refused(b'data: {"error": {"code": "invalid_grammar"}}\n\n')
    assert not events.is_refused(end)


@given(st.lists(st.sampled_from([b'"content":"', b'"content": "', b'"text":"', b'"', b"a", b" ", b"{", b"\n\n"])))
def test_a_token_is_found_however_it_is_written_and_whatever_stands_before_it(parts: list[bytes]) -> None:
    chunk = b"".join(parts)

    assert events.has_text(chunk) == (re.search(rb'"(content|text)":\s*"[^"]', chunk) is not None)


@pytest.mark.parametrize(
    ("tail", "stopped"),
    [
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n', True),
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason": "stop"}]}\n\n', True),
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\n', True),
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n', False),
        (b'data: {"choices":[{"index":0,"delta":{"content":"stop"},"finish_reason":null}]}\n\n', False),
    ],
)
def test_which_end_was_its_own(tail: bytes, stopped: bool) -> None:  # noqa: FBT001
    assert events.has_stopped(tail) is stopped
