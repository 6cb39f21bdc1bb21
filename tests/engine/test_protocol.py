from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.errors import InvalidRequest
from sluice_engine.protocol.chat import ChatReply, parse_chat
from sluice_engine.protocol.completions import CompletionReply, parse_completion
from sluice_engine.protocol.reply import Choice, Piece, RankedToken, ReplyHead, TokenLogprob, Usage

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({**TEXT, **fields}).encode()


def message(**fields: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


@pytest.mark.parametrize(
    ("raw", "param", "code", "says"),
    [
        # Not a body.
        pytest.param(b"", None, "invalid_json", "not valid JSON", id="an empty body"),
        pytest.param(b'{"model": ', None, "invalid_json", "not valid JSON", id="JSON cut short"),
        pytest.param(b'{"model": "m\xff"}', None, "invalid_json", "not valid UTF-8 at byte 12", id="invalid UTF-8"),
        pytest.param(b"[1]", None, "invalid_json", "must be a JSON object, not an array", id="an array"),
        pytest.param(b"null", None, "invalid_json", "not null", id="null"),
        pytest.param(b'{"a": 1, "a": 2}', None, "invalid_json", '"a" is there twice', id="a name twice"),
        pytest.param(b'{"a": NaN}', None, "invalid_json", "NaN is not a JSON number", id="NaN"),
        pytest.param(b'{"a": -Infinity}', None, "invalid_json", "-Infinity", id="infinity"),
        pytest.param(b"[" * 100_000, None, "invalid_json", "nested too deep", id="a nesting bomb of arrays"),
        pytest.param(b'{"a":' * 60_000, None, "invalid_json", "nested too deep", id="a nesting bomb of objects"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", None, "invalid_json", "4300 digits", id="an endless number"),
        # Required fields.
        pytest.param(b"{}", "model", "missing_required_parameter", "required", id="no model"),
        pytest.param(chat(model=None), "model", "missing_required_parameter", "required", id="model null"),
        pytest.param(chat(model=3), "model", "invalid_type", "must be a string, not an integer", id="model a number"),
        pytest.param(chat(messages=None), "messages", "missing_required_parameter", "required", id="no messages"),
        pytest.param(chat(messages="hi"), "messages", "invalid_type", "must be an array", id="messages a string"),
        pytest.param(chat(messages=[]), "messages", "invalid_value", "at least one", id="no message in messages"),
        # Messages.
        pytest.param(chat(messages=["hi"]), "messages[0]", "invalid_type", "must be an object", id="message a string"),
        pytest.param(
            chat(messages=[*CHAT["messages"], {"content": "x"}]),
            "messages[1].role",
            "missing_required_parameter",
            "required",
            id="no role",
        ),
        pytest.param(message(role="robot"), "messages[0].role", "invalid_value", "must be one of", id="a strange role"),
        pytest.param(
            message(role="function"), "messages[0].role", "unsupported_parameter", '"tool"', id="a function's role"
        ),
        pytest.param(message(role=1), "messages[0].role", "invalid_type", "must be a string", id="role a number"),
        pytest.param(
            message(content=None), "messages[0].content", "missing_required_parameter", "required", id="no content"
        ),
        pytest.param(
            message(content=7), "messages[0].content", "invalid_type", "array of parts", id="content a number"
        ),
        pytest.param(message(content=[]), "messages[0].content", "invalid_value", "at least one part", id="no parts"),
        pytest.param(
            message(content=["x"]), "messages[0].content[0]", "invalid_type", "must be an object", id="part a string"
        ),
        pytest.param(
            message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type",
            "unsupported_parameter",
            "image_url",
            id="an image",
        ),
        pytest.param(
            message(content=[{"type": "text", "text": 1}]),
            "messages[0].content[0].text",
            "invalid_type",
            "must be a string",
            id="a text part without text",
        ),
        pytest.param(
            message(content=[{"type": "text", "text": "x", "more": 1}]),
            "messages[0].content[0].more",
            "unknown_parameter",
            "Unknown",
            id="an unknown field in a part",
        ),
        pytest.param(
            message(content="a\ud800"), "messages[0].content", "invalid_value", "surrogate", id="half a surrogate pair"
        ),
        pytest.param(
            message(mood="x"), "messages[0].mood", "unknown_parameter", "Unknown", id="an unknown message field"
        ),
        # Numbers.
        pytest.param(
            chat(temperature="1"), "temperature", "invalid_type", "must be a number", id="temperature a string"
        ),
        pytest.param(
            chat(temperature=True), "temperature", "invalid_type", "not a boolean", id="temperature a boolean"
        ),
        pytest.param(
            chat(temperature=2.1), "temperature", "invalid_value", "must be 0 to 2", id="temperature too high"
        ),
        pytest.param(chat(temperature=-1), "temperature", "invalid_value", "must be 0 to 2", id="temperature negative"),
        pytest.param(
            chat()[:-1] + b', "temperature": 1e999}', "temperature", "invalid_value", "must be 0 to 2", id="1e999"
        ),
        pytest.param(chat(top_p=0), "top_p", "invalid_value", "above 0 and at most 1", id="top_p zero"),
        pytest.param(chat(top_p=1.5), "top_p", "invalid_value", "above 0 and at most 1", id="top_p above one"),
        pytest.param(chat(top_k=1.5), "top_k", "invalid_type", "must be an integer", id="top_k a fraction"),
        pytest.param(chat(top_k=-2), "top_k", "invalid_value", "must be -1 to", id="top_k below -1"),
        pytest.param(chat(min_p=2), "min_p", "invalid_value", "must be 0 to 1", id="min_p above one"),
        pytest.param(
            chat(frequency_penalty=3), "frequency_penalty", "invalid_value", "-2 to 2", id="frequency_penalty"
        ),
        pytest.param(chat(presence_penalty=-3), "presence_penalty", "invalid_value", "-2 to 2", id="presence_penalty"),
        pytest.param(
            chat(repetition_penalty=0), "repetition_penalty", "invalid_value", "0.01 to 10", id="repetition zero"
        ),
        pytest.param(chat(seed="7"), "seed", "invalid_type", "must be an integer", id="seed a string"),
        pytest.param(chat(seed=2**63), "seed", "invalid_value", "must be", id="seed beyond 64 bits"),
        pytest.param(chat(n=0), "n", "invalid_value", "must be 1 to 16", id="n zero"),
        pytest.param(chat(n=17), "n", "invalid_value", "must be 1 to 16", id="n too large"),
        pytest.param(chat(max_tokens=0), "max_tokens", "invalid_value", "must be 1 to", id="max_tokens zero"),
        pytest.param(chat(max_tokens=-5), "max_tokens", "invalid_value", "must be 1 to", id="max_tokens negative"),
        pytest.param(chat(max_tokens=1.0), "max_tokens", "invalid_type", "not a number", id="max_tokens a float"),
        pytest.param(
            chat(max_tokens=10**18), "max_tokens", "invalid_value", "must be 1 to", id="max_tokens beyond all"
        ),
        pytest.param(
            chat(max_completion_tokens=0),
            "max_completion_tokens",
            "invalid_value",
            "1 to",
            id="max_completion_tokens 0",
        ),
        pytest.param(
            chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "invalid_value", "give one", id="two limits"
        ),
        # Stop.
        pytest.param(chat(stop=5), "stop", "invalid_type", "a string or an array", id="stop a number"),
        pytest.param(chat(stop=["a", 5]), "stop[1]", "invalid_type", "must be a string", id="a number in stop"),
        pytest.param(chat(stop=["a"] * 5), "stop", "invalid_value", "at most 4", id="five stop strings"),
        pytest.param(chat(stop=["a", ""]), "stop[1]", "invalid_value", "1 to 1024", id="an empty stop string"),
        pytest.param(chat(stop=""), "stop", "invalid_value", "1 to 1024", id="stop an empty string"),
        pytest.param(chat(stop="x" * 1025), "stop", "invalid_value", "1 to 1024", id="a long stop string"),
        pytest.param(chat(stop="\udc00"), "stop", "invalid_value", "surrogate", id="a stop string that is no text"),
        # Streams.
        pytest.param(chat(stream=1), "stream", "invalid_type", "must be a boolean", id="stream a number"),
        pytest.param(chat(stream_options={}), "stream_options", "invalid_value", "only when", id="options, no stream"),
        pytest.param(
            chat(stream=True, stream_options={"include_usage": "yes"}),
            "stream_options.include_usage",
            "invalid_type",
            "must be a boolean",
            id="include_usage a string",
        ),
        pytest.param(
            chat(stream=True, stream_options={"continuous_usage_stats": True}),
            "stream_options.continuous_usage_stats",
            "invalid_value",
            "only when include_usage",
            id="counts in each chunk and none at the end",
        ),
        pytest.param(
            chat(stream=True, stream_options={"x": 1}),
            "stream_options.x",
            "unknown_parameter",
            "Unknown",
            id="an unknown stream option",
        ),
        pytest.param(
            chat(stream=True, stream_options={"include_obfuscation": True}),
            "stream_options.include_obfuscation",
            "unsupported_parameter",
            "not supported",
            id="obfuscation",
        ),
        # OpenAI's own that would change something.
        pytest.param(chat(logprobs=1), "logprobs", "invalid_type", "must be a boolean", id="logprobs a number in chat"),
        pytest.param(
            chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value", "0 to 20, not 21", id="top_logprobs"
        ),
        pytest.param(
            chat(top_logprobs=0), "top_logprobs", "invalid_value", "only when logprobs", id="top, no logprobs"
        ),
        pytest.param(
            chat(response_format={"type": "xml"}),
            "response_format.type",
            "unsupported_parameter",
            "json_object",
            id="response_format",
        ),
        pytest.param(
            chat(logit_bias={"5": 101}), "logit_bias.5", "invalid_value", "-100 to 100", id="a bias too large"
        ),
        pytest.param(chat(modalities=["audio"]), "modalities", "unsupported_parameter", "audio", id="modalities"),
        pytest.param(chat(audio={}), "audio", "unsupported_parameter", "not supported", id="audio"),
        pytest.param(chat(reasoning_effort="low"), "reasoning_effort", "unsupported_parameter", "not", id="reasoning"),
        pytest.param(chat(store=True), "store", "unsupported_parameter", "true", id="store"),
        pytest.param(chat(service_tier="gold"), "service_tier", "invalid_value", "auto, default", id="service_tier"),
        pytest.param(chat(logit_bias=[5]), "logit_bias", "invalid_type", "must be an object", id="a bias as an array"),
        pytest.param(
            chat(logit_bias={"the": 1}), "logit_bias", "invalid_value", "must be token ids", id="a bias of a word"
        ),
        pytest.param(chat(logit_bias={"5": "1"}), "logit_bias.5", "invalid_type", "must be a number", id="a bias text"),
        pytest.param(
            chat(logit_bias={str(i): 1 for i in range(2000)}),
            "logit_bias",
            "invalid_value",
            "at most 1024",
            id="2,000 biased tokens",
        ),
        pytest.param(
            chat(stop_token_ids=["a"]), "stop_token_ids[0]", "invalid_type", "must be a token id", id="a stop word"
        ),
        pytest.param(
            chat(stop_token_ids=[1] * 200), "stop_token_ids", "invalid_value", "at most 128", id="200 stop tokens"
        ),
        pytest.param(
            chat(stop=[f"s{i}" for i in range(2000)]), "stop", "invalid_value", "at most 4", id="2,000 stop strings"
        ),
        pytest.param(
            chat(min_tokens=9, max_tokens=5), "min_tokens", "invalid_value", "max_tokens is 5", id="min above max"
        ),
        pytest.param(chat(user=1), "user", "invalid_type", "must be a string", id="user a number"),
        pytest.param(chat(max_token=1), "max_token", "unknown_parameter", "Unknown", id="a misspelled field"),
        pytest.param(chat(length_penalty=1), "length_penalty", "unknown_parameter", "Unknown", id="another engine's"),
        pytest.param(chat(**{"a\nb": 1}), "…", "unknown_parameter", "Unknown", id="an unprintable name"),
    ],
)
def test_a_bad_chat_body_is_refused_by_name(raw: bytes, param: str | None, code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw)
    error = caught.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert says in error.message
    assert "\n" not in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        pytest.param(text(prompt=None), "prompt", "missing_required_parameter", id="no prompt"),
        pytest.param(text(prompt=""), "prompt", "invalid_value", id="an empty prompt"),
        pytest.param(text(prompt=[]), "prompt", "invalid_value", id="an empty list"),
        pytest.param(text(prompt=["a", ""]), "prompt[1]", "invalid_value", id="an empty prompt in a list"),
        pytest.param(text(prompt=[[]]), "prompt[0]", "invalid_value", id="no token ids in a list"),
        pytest.param(text(prompt=5), "prompt", "invalid_type", id="a number"),
        pytest.param(text(prompt=[1, "a"]), "prompt[1]", "invalid_type", id="ids and text mixed"),
        pytest.param(text(prompt=[True]), "prompt[0]", "invalid_type", id="a boolean for an id"),
        pytest.param(text(prompt=[[1], 2]), "prompt[1]", "invalid_type", id="a number among lists"),
        pytest.param(text(prompt=["a"] * 33), "prompt", "invalid_value", id="too many prompts"),
        pytest.param(text(prompt=["a"] * 32, n=5), "n", "invalid_value", id="too many choices over all prompts"),
        pytest.param(text(prompt="\ud800"), "prompt", "invalid_value", id="half a surrogate pair"),
        pytest.param(text(logprobs=True), "logprobs", "invalid_type", id="logprobs a boolean"),
        pytest.param(text(logprobs=6), "logprobs", "invalid_value", id="logprobs of six tokens"),
        pytest.param(text(best_of=2), "best_of", "unsupported_parameter", id="best_of"),
        pytest.param(text(echo=True, logprobs=1), "echo", "unsupported_parameter", id="echo with logprobs"),
        pytest.param(text(suffix="x"), "suffix", "unsupported_parameter", id="suffix"),
        pytest.param(text(messages=[]), "messages", "unknown_parameter", id="a chat field"),
        pytest.param(text(max_tokens=0), "max_tokens", "invalid_value", id="max_tokens zero"),
    ],
)
def test_a_bad_completion_body_is_refused_by_name(raw: bytes, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(raw)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_what_changes_nothing_is_accepted() -> None:
    bare = parse_chat(chat())
    dressed = parse_chat(
        chat(
            user="u",
            metadata={"a": "b"},
            store=False,
            safety_identifier="s",
            prompt_cache_key="k",
            parallel_tool_calls=True,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            logit_bias={},
            modalities=["text"],
            audio=None,
            n=1,
            stop=None,
            seed=None,
            temperature=None,
            stream=False,
            stream_options=None,
        )
    )

    assert dressed == bare
    assert parse_completion(text(echo=False, best_of=1, suffix=None, user="u")) == parse_completion(text())


def test_all_options_arrive() -> None:
    call = parse_chat(
        chat(
            messages=[
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "name": "ann",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
            ],
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            seed=-3,
            n=2,
            frequency_penalty=1,
            presence_penalty=-1,
            repetition_penalty=1.5,
            stop=["x", "y", "x"],
            logprobs=True,
            top_logprobs=3,
            logit_bias={"7": -100, "3": 0.5},
            stop_token_ids=[5],
            min_tokens=4,
            service_tier="priority",
            stream=True,
            stream_options={"include_usage": True},
            ignore_eos=True,
        )
    )
    generation = call.generation

    assert call.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
    )
    assert (generation.max_tokens, generation.max_tokens_param) == (7, "max_completion_tokens")
    assert (generation.n, generation.stop, generation.stream, generation.include_usage) == (2, ("x", "y"), True, True)
    sampling = generation.sampling(max_tokens=7, seed=9, choice=1, eos_ids=frozenset({2}))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (sampling.seed, sampling.choice, sampling.logprobs, sampling.stop_token_ids) == (9, 1, True, frozenset({5}))
    assert (sampling.top_logprobs, sampling.min_tokens) == (3, 4)
    assert sampling.logit_bias == ((3, 0.5), (7, -100.0))
    assert generation.served_tier == "default", "the usual one is all there is"
    assert sampling.greedy


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        pytest.param("a", ("a",), id="text"),
        pytest.param(["a", "b"], ("a", "b"), id="texts"),
        pytest.param([1, 2], ((1, 2),), id="token ids"),
        pytest.param([[1, 2], "a"], ((1, 2), "a"), id="both kinds"),
    ],
)
def test_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert parse_completion(text(prompt=prompt)).prompts == prompts


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "user",
    "metadata",
    "store",
    "echo",
    "best_of",
    "suffix",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "service_tier",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "schema",
    "role",
    "content",
    "type",
]


@given(
    st.dictionaries(
        st.sampled_from(FIELDS), json_values | st.lists(st.dictionaries(st.sampled_from(FIELDS), json_values))
    )
)
def test_any_json_is_a_call_or_a_refusal_and_never_a_crash(fields: dict[str, Any]) -> None:
    for base, parse in ((CHAT, parse_chat), (TEXT, parse_completion)):
        try:
            parse(json.dumps({**base, **fields}).encode())
        except InvalidRequest as error:
            assert json.dumps(error.body())  # noqa: PT017  # either end is right


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_never_a_crash(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(raw)


HEAD = ReplyHead(id="x-1", model="m", created_s=5, system_fingerprint="fp", logprobs=False, include_usage=True)


def frame(raw: bytes) -> Any:
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    return json.loads(raw[6:])


def test_a_chat_stream_speaks_openais_words() -> None:
    reply = ChatReply(HEAD)
    shared = {"id": "x-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "system_fingerprint": "fp"}
    choice = {"index": 1, "logprobs": None, "finish_reason": None}

    assert frame(reply.opening(1)) == {
        **shared, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}], "usage": None
    }  # fmt: skip
    assert frame(reply.piece(1, Piece("a\n\u2028")))["choices"] == [{**choice, "delta": {"content": "a\n\u2028"}}]
    assert frame(reply.closing(1, "stop"))["choices"] == [{**choice, "delta": {}, "finish_reason": "stop"}]
    assert frame(reply.usage(Usage(3, 4, 2))) == {
        **shared,
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }  # fmt: skip


def test_logprobs_in_both_shapes() -> None:
    head = ReplyHead(id="x", model="m", created_s=5, system_fingerprint="fp", logprobs=True, include_usage=False)
    tokens = (
        TokenLogprob(RankedToken("\ufffd", "é".encode()[:1], -0.5), 0),
        TokenLogprob(RankedToken("b", b"b", -1.5), 0),
    )
    choice = Choice(0, "b", tokens, "length")
    whole: Any = ChatReply(head).whole([choice], Usage(1, 2))
    completion: Any = CompletionReply(head).whole([choice], Usage(1, 2))

    assert whole["choices"][0]["logprobs"]["content"][0] == {
        "token": "�", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": []
    }  # fmt: skip
    assert completion["choices"][0]["logprobs"] == {
        "tokens": ["�", "b"], "token_logprobs": [-0.5, -1.5], "top_logprobs": None, "text_offset": [0, 0]
    }  # fmt: skip
    assert "usage" not in frame(CompletionReply(head).piece(0, Piece("b", tokens)))


def test_the_likeliest_tokens_in_both_shapes() -> None:
    head = ReplyHead(id="x", model="m", created_s=5, system_fingerprint="fp", logprobs=True, include_usage=False)
    taken, end = RankedToken("b", b"b", -1.5), RankedToken("<end>", None, -0.1)
    token = TokenLogprob(taken, 0, (end, RankedToken("b", b" b", -0.5)))
    choice = Choice(0, "b", (token,), "length")
    whole: Any = ChatReply(head).whole([choice], Usage(1, 2))
    completion: Any = CompletionReply(head).whole([choice], Usage(1, 2))

    (told,) = whole["choices"][0]["logprobs"]["content"]
    assert told["top_logprobs"] == [
        {"token": "<end>", "logprob": -0.1, "bytes": None}, {"token": "b", "logprob": -0.5, "bytes": [32, 98]}
    ]  # fmt: skip
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"<end>": -0.1, "b": -0.5}], "the likelier of two"


def test_a_tier_is_said_where_one_was_asked_for() -> None:
    assert parse_chat(chat()).generation.served_tier is None
    assert parse_chat(chat(service_tier="flex")).generation.served_tier == "flex"
    assert HEAD.fields("k").get("service_tier") is None
    assert replace(HEAD, service_tier="flex").fields("k")["service_tier"] == "flex"
