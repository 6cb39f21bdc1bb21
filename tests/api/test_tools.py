"""Tool calls, through OpenAI's own client, the gate and a real engine; its random model makes none of itself."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import APIStatusError, AsyncOpenAI

from api.conftest import OPENING, OPENING_ID
from sidecar.running import RunningGate

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Looks up.", "parameters": SCHEMA}}
NOTE: Any = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "maxProperties": 0}}}
USER: Any = {"role": "user", "content": "How is the weather?"}


def call_of(**fields: Any) -> Any:
    call = {"model": "tiny", "messages": [USER], "tools": [WEATHER, NOTE], "temperature": 1.7, "seed": 3}
    return call | {"max_tokens": 400} | fields


async def answers(client: AsyncOpenAI, **fields: Any) -> list[Any]:
    """The choices of a chat, whole; a stream of the same call says the same, but for the ids of its calls."""
    call = call_of(**fields)
    whole = await client.chat.completions.create(**call)
    streamed: list[list[list[str]]] = [[] for _ in whole.choices]
    texts, reasons = [""] * len(whole.choices), [""] * len(whole.choices)
    async for chunk in await client.chat.completions.create(stream=True, **call):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                if delta.id:
                    assert delta.type == "function"
                    streamed[choice.index].append([delta.function.name or "", ""])
                streamed[choice.index][delta.index][1] += delta.function.arguments or ""
    for choice, text, reason, calls in zip(whole.choices, texts, reasons, streamed, strict=True):
        assert (choice.message.content or "", choice.finish_reason) == (text, reason)
        assert told(choice) == [(name, arguments) for name, arguments in calls]
    return list(whole.choices)


def told(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_required_call_follows_its_schema(client: AsyncOpenAI, *, parallel: bool) -> None:
    choices = await answers(client, tool_choice="required", parallel_tool_calls=parallel, n=3, max_tokens=250)

    for choice in choices:
        calls = told(choice)
        assert calls
        if choice.finish_reason == "length":
            assert parallel
            calls = calls[:-1]  # a random model may call for ever
        else:
            assert parallel or len(calls) == 1
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"const": {}})


async def test_a_function_that_was_chosen_is_called_once(client: AsyncOpenAI) -> None:
    choices = await answers(client, tool_choice={"type": "function", "function": {"name": "note"}}, n=2)

    assert [[(name, json.loads(arguments)) for name, arguments in told(choice)] for choice in choices] == [
        [("note", {})]
    ] * 2
    assert {choice.finish_reason for choice in choices} == {"tool_calls"}


@pytest.mark.parametrize(("bias", "reason"), [(100, "tool_calls"), (-100, "stop")])
async def test_beside_a_format_an_answer_is_a_call_or_follows_it(client: AsyncOpenAI, bias: int, reason: str) -> None:
    number = {"type": "integer", "maximum": 99}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    formatted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    tool = {"type": "function", "function": {**NOTE["function"], "strict": True}}
    fields = {"tools": [tool], "response_format": formatted, "logit_bias": {str(OPENING_ID): bias}}
    (choice,) = await answers(client, parallel_tool_calls=False, **fields)

    assert choice.finish_reason == reason
    if reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), schema)
    else:
        assert [(name, json.loads(arguments)) for name, arguments in told(choice)] == [("note", {})]


async def test_a_call_that_is_cut_says_so(client: AsyncOpenAI) -> None:
    chosen = {"type": "function", "function": {"name": "weather"}}
    (choice,) = await answers(client, tool_choice=chosen, max_tokens=50)

    ((name, arguments),) = told(choice)
    assert (name, choice.finish_reason) == ("weather", "length")
    assert arguments.startswith("{")
    assert not arguments.endswith("}")


async def test_a_free_answer_that_opens_a_call_is_held_to_what_is_strict(client: AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in (WEATHER, NOTE)]
    fields = {"tools": tools, "parallel_tool_calls": False, "logit_bias": {str(OPENING_ID): 100}, "n": 3}
    choices = await answers(client, **fields, logprobs=True)

    for choice in choices:
        ((name, arguments),) = told(choice)
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"const": {}})
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.logprobs.content[0].token == OPENING


async def test_openings_of_no_call_are_text(client: AsyncOpenAI) -> None:
    (choice,) = await answers(client, logit_bias={str(OPENING_ID): 100}, max_tokens=5)

    assert (choice.message.content, told(choice), choice.finish_reason) == (OPENING * 5, [], "length")


@pytest.mark.parametrize("strict", [False, True])
async def test_a_free_answer_is_text_until_it_calls(client: AsyncOpenAI, *, strict: bool) -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}
    (choice,) = await answers(client, tools=[tool], max_tokens=40, logprobs=True)
    (without,) = await answers(client, tools=[], max_tokens=40)

    assert (told(choice), choice.finish_reason in {"stop", "length"}) == ([], True)
    assert choice.message.content
    assert without.message.tool_calls is None


async def test_a_conversation_goes_on_with_the_tools_answers(client: AsyncOpenAI, gate: RunningGate) -> None:
    (choice,) = await answers(client, tool_choice="required", parallel_tool_calls=False)
    message = choice.message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"sunny <|im_end|> {call['function']['name']}"}
        for call in message["tool_calls"]
    ]
    body = {"messages": [USER, message, *results], "tools": [WEATHER, NOTE]}
    reply = await client.chat.completions.create(**call_of(**body, max_tokens=5))
    async with gate.client.post(f"{gate.url}/tokenize", json=body) as response:
        counted = (await response.json())["count"]

    assert reply.usage is not None
    assert reply.usage.prompt_tokens == counted


async def test_tools_count_as_the_prompt_does_near_the_limit(client: AsyncOpenAI, gate: RunningGate) -> None:
    """The gate asks the engine how long it is, tools and all."""

    async def counted(size: int) -> int:
        body = {"messages": [USER], "tools": [sized(size)]}
        async with gate.client.post(f"{gate.url}/tokenize", json=body) as response:
            return int((await response.json())["count"])

    def sized(size: int) -> Any:
        return {"type": "function", "function": {"name": "f", "description": "x" * size}}

    room = 1024 - await counted(0)
    fits = await client.chat.completions.create(**call_of(tools=[sized(room - 1)], max_tokens=1))
    assert fits.usage is not None
    assert fits.usage.prompt_tokens == 1023
    with pytest.raises(APIStatusError) as caught:
        await client.chat.completions.create(**call_of(tools=[sized(room)], max_tokens=1))
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert "Prompt (1024 tokens)" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        pytest.param({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name",
                     "1 to 64 letters", id="a name with a space"),
        pytest.param({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name",
                     "none of the tools", id="a choice that is not there"),
        pytest.param({"functions": [{"name": "f"}]}, "functions", "give tools", id="the older form"),
        pytest.param({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
                     "messages[0].tool_call_id", "no tool call before it", id="an answer to nothing"),
        pytest.param({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                      "tool_choice": "required"}, "tools", "the parameters of f: Unimplemented keys", id="a schema"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(APIStatusError) as caught:
        await client.chat.completions.create(**call_of(**fields))
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert says in str(caught.value)
