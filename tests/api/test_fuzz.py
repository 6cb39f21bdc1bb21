"""Hypothesis asks the gate and a real engine anything at once, and leaves when it likes: no 5xx, and nothing is left.

Where schemathesis (`test_openapi.py`) sends one request after the other by the document, this sends bodies that are
nearly right, heads that mean something, and several at a time, some of whose clients go in the middle.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.conftest import PATIENT, EngineProcess, nothing_left
from sidecar.running import RunningGate, running_gate, until
from sluice_engine.protocol.openapi import document

pytestmark = pytest.mark.slow

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
SCHEMAS = document("tiny", "1")["components"]["schemas"]
NAMES = {
    CHAT: sorted(SCHEMAS["ChatRequest"]["properties"]),
    TEXT: sorted(SCHEMAS["CompletionRequest"]["properties"]),
    TOKENIZE: ["model", "prompt", "messages", "add_special_tokens"],
    DETOKENIZE: sorted(SCHEMAS["DetokenizeRequest"]["properties"]),
}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": "tiny", "prompt": "hello"},
    TOKENIZE: {"model": "tiny", "prompt": "hello"},
    DETOKENIZE: {"model": "tiny", "tokens": [5, 6, 7]},
}
# A bound that is missed is an answer of 504; nothing else here may be of the server's making.
BOUNDS = ("x-sluice-ttft-ms", "x-sluice-timeout-ms", "grpc-timeout", "x-envoy-expected-rq-timeout-ms")
MOST_TOKENS = 24

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=6,
)
likely = st.sampled_from([
    0, 1, 2, 3, 0.5, -1, True, False, "auto", "none", "required", "a", ["a", "b"], {"type": "json_object"}, [[3, 4]],
    {"regex": "[ab]{3}"}, "[a-c]{2,9}", ["yes", "no"], {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"include_usage": True}, {"7": 5.0}, 'start: "yes" | "no"', "flex", ["hello", "there"], 2**31, "", [], {},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
])  # fmt: skip
heads = st.dictionaries(
    st.sampled_from([
        *BOUNDS, "x-request-id", "x-sluice-class", "x-sluice-tenant", "traceparent", "x-stainless-retry-count",
        "x-envoy-attempt-count", "x-stainless-read-timeout", "x-llm-d-inference-ttl", "authorization", "accept",
    ]),
    st.sampled_from(["0", "1", "5", "200", "60000", "1S", "5m", "batch", "critical", "-1", "1e3", "", "\xe9", "a" * 99])
    | st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20),
    max_size=3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and when its client leaves: after so many reads, before the first (0), or never (None)."""

    path: str
    body: bytes
    headers: dict[str, str]
    leaves_after: int | None


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    path = draw(st.sampled_from([CHAT, CHAT, TEXT, TEXT, TOKENIZE, DETOKENIZE]))
    body = dict(BASES[path])
    if path in {CHAT, TEXT}:
        body |= {"max_tokens": draw(st.integers(1, MOST_TOKENS)), "stream": draw(st.booleans())}
    body |= draw(st.dictionaries(st.sampled_from(NAMES[path]) | st.text(max_size=8), likely | anything, max_size=3))
    if isinstance(body.get("n"), int) and not isinstance(body["n"], bool) and body["n"] > 2:
        body["n"] = 2
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        raw = draw(st.binary(max_size=200) | st.integers(0, len(raw)).map(lambda end: raw[:end]))
    leaves = draw(st.none() | st.none() | st.integers(0, 3))
    return Ask(path, raw, draw(heads), leaves)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(asks(), min_size=1, max_size=8))
def test_whatever_is_asked_at_once_has_an_answer_of_its_own_and_leaves_nothing(
    engine: EngineProcess, asked: list[Ask]
) -> None:
    async def scene() -> None:
        with tempfile.TemporaryDirectory(prefix="sl-") as folder:
            async with running_gate(engine, Path(folder), live=PATIENT, ready=False) as gate:
                await until(lambda: gate.gate.not_ready() is None, within_s=240)
                tasks_before = len(asyncio.all_tasks())
                await asyncio.gather(*(one_answer(gate, ask) for ask in asked))
                await nothing_left(gate)
                state = gate.gate.engine.state
                assert state is not None
                assert state.grammars is not None
                assert (state.phase, state.grammars.waiting, state.adapters) == ("ready", (), ())
                await gate.client.close()
                await until(lambda: len(asyncio.all_tasks()) <= tasks_before, within_s=30)

    before = descriptors(engine)
    asyncio.run(scene())
    assert_no_more(engine, before)


async def one_answer(gate: RunningGate, ask: Ask) -> None:
    """Send it, and look at what comes."""
    headers = {"Content-Type": "application/json", **ask.headers}
    try:
        async with gate.client.post(gate.url + ask.path, data=ask.body, headers=headers) as response:
            if ask.leaves_after is not None:
                for _ in range(ask.leaves_after):
                    await response.content.readany()
                response.close()
                return
            status, text = response.status, await response.read()
            streamed = response.content_type == "text/event-stream"
    except ValueError:
        return  # no client can send such a head
    is_bounded = any(name in ask.headers for name in BOUNDS)
    assert status < 500 or (status == 504 and is_bounded), (ask, status, text)
    if status != 200:
        error = json.loads(text)["error"]
        assert all(error[name] for name in ("message", "code")), (ask, text)
    elif streamed:
        assert_ended(ask, text, is_bounded=is_bounded)
    else:
        assert isinstance(json.loads(text), dict)


def assert_ended(ask: Ask, text: bytes, *, is_bounded: bool) -> None:
    """A stream ends with [DONE], or with an error that its own request is to blame for."""
    last = text.strip().split(b"\n\n")[-1]
    if last != b"data: [DONE]":
        code = json.loads(last.removeprefix(b"data: "))["error"]["code"]
        assert code == "invalid_grammar" or (code == "deadline_missed" and is_bounded), (ask, last)


def descriptors(engine: EngineProcess) -> Counter[str]:
    """What the engine has open, by kind."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{engine.pid}/fd").iterdir():
        try:
            found[str(link.readlink()).partition(":")[0]] += 1
        except FileNotFoundError:  # the one that lists them, or one that is closed just now
            continue
    return found


def assert_no_more(engine: EngineProcess, before: Counter[str]) -> None:
    """The gate has gone, and its connections with it: nothing is open that was not."""

    async def closed() -> None:
        await until(lambda: descriptors(engine) <= before, within_s=30)

    asyncio.run(closed())


def test_the_fuzz_sees_a_server_that_breaks_its_word() -> None:
    ask = Ask(CHAT, b"{}", {}, None)
    assert_ended(ask, b'data: {"choices": []}\n\ndata: [DONE]\n\n', is_bounded=False)
    assert_ended(ask, b'data: {"error": {"code": "deadline_missed"}}\n\n', is_bounded=True)
    for broken in (
        b'data: {"error": {"code": "engine_failed"}}\n\n',
        b'data: {"error": {"code": "deadline_missed"}}\n\n',
    ):
        with pytest.raises(AssertionError):
            assert_ended(ask, broken, is_bounded=False)
