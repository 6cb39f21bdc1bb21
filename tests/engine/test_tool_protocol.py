"""Tools in a body: what is read, and what is refused by name. And what a reply with calls looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.errors import InvalidRequest
from sluice_engine.protocol.chat import ChatReply, parse_chat
from sluice_engine.protocol.reply import Choice, Piece, ReplyHead, ToolCallDelta, Usage
from sluice_engine.protocol.tokens import parse_tokenize
from sluice_engine.protocol.tools import MAX_DEPTH, MAX_TOOLS_BYTES, Tool

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Looks up.", "parameters": SCHEMA},
}
USER = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {
    "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}
}  # fmt: skip
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def chat(*messages: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages) or [USER], **fields}).encode()


def tools(*items: object, **fields: object) -> bytes:
    return chat(tools=list(items), **fields)


def named(name: object, **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools_are_read_as_templates_want_them() -> None:
    use = parse_chat(tools(WEATHER, named("b", strict=True))).tool_use

    assert use is not None
    assert use.tools == use.callable == (
        Tool("get_weather", "Looks up.", SCHEMA), Tool("b", None, {"type": "object", "properties": {}}, strict=True)
    )  # fmt: skip
    assert (use.required, use.parallel) == (False, True)
    assert use.tools[0].body() == WEATHER
    assert use.tools[1].body() == named("b", parameters={"type": "object", "properties": {}}), "strict is not for it"


@pytest.mark.parametrize(
    ("choice", "callable_names", "required", "parallel"),
    [
        pytest.param(None, ["get_weather", "b"], False, True, id="left out"),
        pytest.param("auto", ["get_weather", "b"], False, True, id="auto"),
        pytest.param("required", ["get_weather", "b"], True, True, id="required"),
        pytest.param(named("b"), ["b"], True, False, id="by name: one call"),
    ],
)
def test_what_may_be_called(choice: object, callable_names: list[str], required: bool, parallel: bool) -> None:  # noqa: FBT001
    use = parse_chat(tools(WEATHER, named("b"), tool_choice=choice)).tool_use
    assert use is not None
    assert [tool.name for tool in use.callable] == callable_names
    assert [tool.name for tool in use.tools] == ["get_weather", "b"], "it is told of all"
    assert (use.required, use.parallel) == (required, parallel)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(chat(), id="nothing said"),
        pytest.param(tools(), id="an empty array"),
        pytest.param(chat(tools=None, tool_choice="auto", parallel_tool_calls=None), id="null"),
        pytest.param(tools(WEATHER, tool_choice="none"), id="none may be called"),
        pytest.param(chat(functions=[], function_call="auto", parallel_tool_calls=True), id="what changes nothing"),
    ],
)
def test_without_tools_there_is_nothing_to_call(body: bytes) -> None:
    assert parse_chat(body).tool_use is None


def test_one_call_at_a_time() -> None:
    use = parse_chat(tools(WEATHER, parallel_tool_calls=False)).tool_use
    assert use is not None
    assert use.parallel is False


def test_a_conversation_with_calls() -> None:
    _, called, answered = parse_chat(chat(USER, CALLED, ANSWERED)).messages

    assert called == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": "call_1", "name": "get_weather"}
    assert "tool_calls" not in parse_chat(chat(USER, {**USER, "tool_calls": []})).messages[1]


LONG = named("a", description="x" * MAX_TOOLS_BYTES)
BROKEN: list[Any] = [
    pytest.param(chat(tools={}), "tools", "invalid_type", "must be an array", id="tools an object"),
    pytest.param(tools(7), "tools[0]", "invalid_type", "must be an object", id="a tool a number"),
    pytest.param(tools({}), "tools[0].type", "missing_required_parameter", "required", id="no type"),
    pytest.param(tools({"type": "custom"}), "tools[0].type", "unsupported_parameter", "custom", id="another type"),
    pytest.param(tools({"type": "function"}), "tools[0].function", "missing_required_parameter", "required",
                 id="no function"),
    pytest.param(tools({**WEATHER, "x": 1}), "tools[0].x", "unknown_parameter", "Unknown", id="an unknown field"),
    pytest.param(tools(named("a", x=1)), "tools[0].function.x", "unknown_parameter", "Unknown",
                 id="an unknown field of a function"),
    pytest.param(tools(named(None)), "tools[0].function.name", "missing_required_parameter", "required", id="no name"),
    pytest.param(tools(WEATHER, named("a b")), "tools[1].function.name", "invalid_value", "letters", id="a space"),
    pytest.param(tools(named("")), "tools[0].function.name", "invalid_value", "1 to 64", id="an empty name"),
    pytest.param(tools(named("a" * 65)), "tools[0].function.name", "invalid_value", "1 to 64", id="a long name"),
    pytest.param(tools(named("a"), named("a")), "tools[1].function.name", "invalid_value", "tools[0]", id="twice"),
    pytest.param(tools(named("a", description=1)), "tools[0].function.description", "invalid_type", "a string",
                 id="a description that is a number"),
    pytest.param(tools(named("a", parameters=[])), "tools[0].function.parameters", "invalid_type", "JSON schema",
                 id="parameters an array"),
    pytest.param(tools(named("a", parameters={"type": "array"})), "tools[0].function.parameters", "invalid_value",
                 '"object"', id="a schema of no object"),
    pytest.param(tools(named("a", parameters={"title": "x" * 70_000})), "tools[0].function.parameters",
                 "invalid_value", "65536 bytes", id="a long schema"),
    pytest.param(tools(named("a", strict="yes")), "tools[0].function.strict", "invalid_type", "boolean", id="strict"),
    pytest.param(tools(*[named(f"f{i}") for i in range(129)]), "tools", "invalid_value", "128 tools, not 129",
                 id="too many"),
    pytest.param(tools(LONG), "tools", "invalid_value", "262144 bytes", id="too long together"),
    pytest.param(tools(named("a", description="\ud800")), "tools[0]", "invalid_value", "surrogate", id="no text"),
    pytest.param(tools(WEATHER, tool_choice="any"), "tool_choice", "invalid_value", "none, auto, required",
                 id="another choice"),
    pytest.param(tools(WEATHER, tool_choice=1), "tool_choice", "invalid_type", "must be an object", id="a number"),
    pytest.param(chat(tool_choice="required"), "tool_choice", "invalid_value", "only when tools", id="of no tools"),
    pytest.param(chat(tool_choice=named("a")), "tool_choice.function.name", "invalid_value", "none of the tools",
                 id="by name, of no tools"),
    pytest.param(tools(WEATHER, tool_choice=named("b")), "tool_choice.function.name", "invalid_value", '"b"',
                 id="by a name that is not there"),
    pytest.param(tools(WEATHER, tool_choice={"type": "allowed_tools"}), "tool_choice.type", "unsupported_parameter",
                 "allowed_tools", id="allowed tools"),
    pytest.param(tools(WEATHER, tool_choice={"type": "function"}), "tool_choice.function",
                 "missing_required_parameter", "required", id="no function chosen"),
    pytest.param(tools(WEATHER, parallel_tool_calls=1), "parallel_tool_calls", "invalid_type", "boolean",
                 id="parallel_tool_calls"),
    pytest.param(chat(functions=[named("a")]), "functions", "unsupported_parameter", "give tools", id="functions"),
    pytest.param(chat(function_call={"name": "a"}), "function_call", "unsupported_parameter", "give tool_choice",
                 id="function_call"),
    pytest.param(tools(WEATHER, guided_regex="a+"), "guided_regex", "unsupported_parameter", "beside tools",
                 id="an expression beside tools"),
    # Messages.
    pytest.param(chat({**USER, "tool_calls": [CALL]}), "messages[0].tool_calls", "invalid_value", "role assistant",
                 id="a user who calls"),
    pytest.param(chat({"role": "assistant", "content": None}), "messages[0].content", "missing_required_parameter",
                 "required", id="neither content nor calls"),
    pytest.param(chat({**CALLED, "tool_calls": {}}), "messages[0].tool_calls", "invalid_type", "array", id="no array"),
    pytest.param(chat({**CALLED, "tool_calls": [1]}), "messages[0].tool_calls[0]", "invalid_type", "object",
                 id="a call a number"),
    pytest.param(chat({**CALLED, "tool_calls": [CALL] * 129}), "messages[0].tool_calls", "invalid_value", "128",
                 id="too many calls"),
    pytest.param(chat({**CALLED, "tool_calls": [{**CALL, "id": None}]}), "messages[0].tool_calls[0].id",
                 "missing_required_parameter", "required", id="a call without an id"),
    pytest.param(chat({**CALLED, "tool_calls": [{**CALL, "id": "x" * 129}]}), "messages[0].tool_calls[0].id",
                 "invalid_value", "1 to 128", id="a long id"),
    pytest.param(chat({**CALLED, "tool_calls": [{**CALL, "type": "custom"}]}), "messages[0].tool_calls[0].type",
                 "unsupported_parameter", "custom", id="a call of another type"),
    pytest.param(chat({**CALLED, "tool_calls": [{**CALL, "function": None}]}), "messages[0].tool_calls[0].function",
                 "missing_required_parameter", "required", id="a call of nothing"),
    pytest.param(chat({**CALLED, "tool_calls": [{**CALL, "function": {"name": "a", "arguments": {}}}]}),
                 "messages[0].tool_calls[0].function.arguments", "invalid_type", "a string", id="arguments an object"),
    pytest.param(chat({**CALLED, "tool_calls": [{**CALL, "function": {"name": "a b", "arguments": ""}}]}),
                 "messages[0].tool_calls[0].function.name", "invalid_value", "letters", id="a call of no name"),
    pytest.param(chat({**CALLED, "function_call": {}}), "messages[0].function_call", "unsupported_parameter",
                 "not supported", id="the older word in a message"),
    pytest.param(chat({"role": "tool", "content": "x"}), "messages[0].tool_call_id", "missing_required_parameter",
                 "required", id="an answer to nothing"),
    pytest.param(chat(ANSWERED), "messages[0].tool_call_id", "invalid_value", "no tool call before", id="too early"),
    pytest.param(chat(CALLED, {**ANSWERED, "tool_call_id": "x"}), "messages[1].tool_call_id", "invalid_value",
                 "no tool call before", id="an answer to another"),
    pytest.param(chat({**USER, "tool_call_id": "call_1"}), "messages[0].tool_call_id", "invalid_value", "role tool",
                 id="an answer by a user"),
    pytest.param(chat(CALLED, {**ANSWERED, "content": None}), "messages[1].content", "missing_required_parameter",
                 "required", id="an answer without content"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "param", "code", "says"), BROKEN)
def test_what_is_wrong_with_tools_is_refused_by_name(raw: bytes, param: str, code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, code)
    assert says in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(("opening", "closing"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_a_tool_nests_as_deep_as_it_may_and_no_deeper(opening: bytes, closing: bytes) -> None:
    def nested(levels: int) -> bytes:
        # The tool, its function and the parameters are three of them.
        deep = opening * (levels - 3) + b"1" + closing * (levels - 3)
        return tools(named("a", parameters={"type": "object", "x": "HERE"})).replace(b'"HERE"', deep)

    assert parse_chat(nested(MAX_DEPTH)).tool_use is not None
    for levels in (MAX_DEPTH + 1, 900):
        with pytest.raises(InvalidRequest) as caught:
            parse_chat(nested(levels))
        assert (caught.value.param, caught.value.code) == ("tools[0]", "invalid_value")
        assert "at most 64 levels" in caught.value.message


def test_tokenize_takes_what_a_chat_takes() -> None:
    body = {"messages": [USER, CALLED, ANSWERED], "tools": [WEATHER]}
    call = parse_tokenize(json.dumps(body).encode())
    assert [tool.name for tool in call.tools] == ["get_weather"]
    assert parse_tokenize(json.dumps({**body, "tool_choice": "none"}).encode()).tools == ()
    with pytest.raises(InvalidRequest, match="tools"):
        parse_tokenize(json.dumps({"prompt": "a", "tools": [WEATHER]}).encode())


HEAD = ReplyHead(id="x-1", model="m", created_s=5, system_fingerprint="fp", logprobs=False, include_usage=False)


def test_calls_in_openais_words() -> None:
    reply = ChatReply(HEAD)
    pieces = [
        Piece("Wait.", tool_calls=(ToolCallDelta(0, "a"),)),
        Piece("", tool_calls=(ToolCallDelta(0, None, '{"x"'),)),
        Piece("", tool_calls=(ToolCallDelta(0, None, ": 1}"), ToolCallDelta(1, "b", "{}"))),
    ]
    deltas = [json.loads(reply.piece(0, piece)[6:])["choices"][0]["delta"] for piece in pieces]
    calls = ToolCallDelta(0, "a", '{"x": 1}'), ToolCallDelta(1, "b", "{}")
    whole: Any = reply.whole([Choice(0, "Wait.", (), "tool_calls", calls)], Usage(1, 2))
    first, second = whole["choices"][0]["message"]["tool_calls"]

    assert deltas == [
        {"content": "Wait.", "tool_calls": [{"index": 0, **first, "function": {"name": "a", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, **second}]},
    ]
    assert first["function"] == {"name": "a", "arguments": '{"x": 1}'}
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    assert len(first["id"]) == 29
    assert whole["choices"][0]["message"]["content"] == "Wait."
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_where_there_are_only_calls_there_is_no_content() -> None:
    call = ToolCallDelta(0, "a", "{}")
    whole: Any = ChatReply(HEAD).whole(
        [Choice(0, "", (), "tool_calls", (call,)), Choice(1, "", (), "stop")], Usage(1, 2)
    )

    assert [choice["message"]["content"] for choice in whole["choices"]] == [None, ""]
    assert "tool_calls" not in whole["choices"][1]["message"]
    several: Any = ChatReply(HEAD).whole([Choice(i, "", (), "stop", (call,)) for i in range(2)], Usage(1, 2))
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in several["choices"]}
    assert len(ids) == 2, "each choice has its own"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.text(max_size=5) | st.sampled_from(["function", "auto", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "strict", "arguments", "id", "description", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.sampled_from(["tools", "tool_choice", "parallel_tool_calls", "functions", "tool_calls", "tool_call_id"]),
    JSON | st.lists(JSON, max_size=2),
)
def test_whatever_stands_there_is_read_or_refused_by_name(name: str, value: object) -> None:
    """Never a crash, and an answer that a person can read."""
    if name in {"tool_calls", "tool_call_id"}:
        role = "assistant" if name == "tool_calls" else "tool"
        raw = chat(CALLED, {"role": role, "content": "x", name: value})
    else:
        raw = chat(**{"tools": [WEATHER], name: value})
    refused: InvalidRequest | None = None
    try:
        parse_chat(raw)
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert refused.param is not None
        assert refused.param.startswith(("messages", name, "tools", "tool_choice"))
        assert len(refused.message) < 400
