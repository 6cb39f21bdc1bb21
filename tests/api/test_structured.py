"""Structured output, through OpenAI's own client, the gate and a real engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from openai import APIStatusError, AsyncOpenAI

from api.conftest import EngineProcess
from sidecar.running import RunningGate

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Who?"}]
LARK = 'start: "yes" | "no" ", but " /[a-z]{3}/'
GBNF = 'root ::= "yes" | "no, but " [a-z] [a-z] [a-z]'


def as_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


async def answers(client: AsyncOpenAI, fields: dict[str, Any]) -> list[str]:
    """The choices of a chat, whole; a stream of the same call says the same."""
    call: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 200,
        "temperature": 1.7,
        "seed": 3,
        "n": 2,
    } | fields
    whole = await client.chat.completions.create(**call)
    texts = [""] * len(whole.choices)
    async for chunk in await client.chat.completions.create(stream=True, **call):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    return texts


async def test_an_answer_follows_its_schema(client: AsyncOpenAI) -> None:
    for text in await answers(client, {"response_format": as_schema(SCHEMA)}):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        pytest.param(
            {"structured_outputs": {"regex": r"[a-c]{3}-\d{2}"}}, r"[a-c]{3}-\d{2}", id="a regular expression"
        ),
        pytest.param({"guided_regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}", id="its older name"),
        pytest.param({"structured_outputs": {"choice": ["red", "grün", '"q"']}}, 'red|grün|"q"', id="one of three"),
        pytest.param({"guided_choice": ["one"]}, "one", id="the only one"),
        pytest.param({"structured_outputs": {"grammar": LARK}}, "yes|no, but [a-z]{3}", id="a grammar of Lark's"),
        pytest.param({"guided_grammar": GBNF}, "yes|no, but [a-z]{3}", id="a grammar of llama.cpp's"),
        pytest.param({"structured_outputs": {"json": {"enum": [1, 22]}}}, "1|22", id="a schema that is no object"),
        pytest.param({"guided_json": json.dumps({"const": True})}, "true", id="a schema as text"),
    ],
)
async def test_an_answer_follows_its_grammar(client: AsyncOpenAI, fields: dict[str, Any], pattern: str) -> None:
    for text in await answers(client, {"extra_body": fields}):
        assert re.fullmatch(pattern, text)


async def test_any_object(client: AsyncOpenAI) -> None:
    """A random model never ends its strings: what is there by then is the beginning of an object."""
    reply = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, temperature=1.7, response_format={"type": "json_object"}
    )
    assert (reply.choices[0].message.content or "").startswith("{")


async def test_other_options_keep_to_the_grammar(client: AsyncOpenAI) -> None:
    fields = {
        "response_format": as_schema({"enum": ["aaa", "bbbb"]}),
        "logit_bias": {str(ord("b")): 100},
        "logprobs": True,
        "top_logprobs": 2,
        "frequency_penalty": 2.0,
        "extra_body": {"min_tokens": 40, "repetition_penalty": 1.9},
    }
    assert await answers(client, fields) == ['"bbbb"', '"bbbb"'], "a grammar that has ended has the last word"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        pytest.param({"response_format": as_schema({"type": "objekt"})}, "response_format.json_schema.schema", "objekt",
                     id="no such type"),
        pytest.param({"response_format": as_schema({"not": {"type": "string"}})}, "response_format.json_schema.schema",
                     "Unimplemented keys", id="what a grammar cannot say"),
        pytest.param({"response_format": as_schema(False)}, "response_format.json_schema.schema", "not a boolean",
                     id="a schema that nothing follows"),
        pytest.param({"response_format": {"type": "xml"}}, "response_format.type", "json_object", id="another format"),
        pytest.param({"extra_body": {"guided_regex": "("}}, "guided_regex", "regex", id="a broken regular expression"),
        pytest.param({"extra_body": {"guided_grammar": "start: x"}}, "guided_grammar", "x", id="a grammar with a gap"),
        pytest.param({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "one of", id="nothing said"),
        pytest.param({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice", "guided_regex",
                     id="two at once"),
        pytest.param({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, "ignore_eos", "end", id="no end"),
        pytest.param({"extra_body": {"guided_regex": "a" * 70_000}}, "guided_regex", "65536 bytes", id="far too long"),
        pytest.param({"extra_body": {"guided_choice": []}}, "guided_choice", "1 to 1000", id="no choice"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused_by_name(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(APIStatusError) as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, **fields)
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert says in str(caught.value)


def bombs() -> list[Any]:
    deep: object = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1900)} | {"d1900": {"type": "string"}}
    objects = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1200)} | {"d1200": {}}
    crossed = [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(8)]} for i in range(8)]
    return [
        pytest.param({"response_format": as_schema(deep)}, id="nested"),
        pytest.param({"response_format": as_schema({"$ref": "#/$defs/d0", "$defs": chain})}, id="a chain"),
        pytest.param({"response_format": as_schema({"$ref": "#/$defs/d0", "$defs": objects})}, id="a chain of objects"),
        pytest.param({"response_format": as_schema({"allOf": crossed})}, id="a product"),
        pytest.param({"response_format": as_schema({"$ref": "#"})}, id="itself"),
        pytest.param({"response_format": as_schema({"type": "string", "pattern": "^(((a{1,500}){1,500}){1,500})$"})},
                     id="powers"),
        pytest.param({"extra_body": {"guided_regex": "(" * 30_000 + "a" + ")" * 30_000}}, id="parentheses"),
        pytest.param({"extra_body": {"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000))
                                     + '\nr4000: "a"'}}, id="rules"),
        pytest.param({"extra_body": {"guided_grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}}, id="gbnf"),
        pytest.param({"extra_body": {"guided_grammar": 'start: s\ns: s s | "a" | '}}, id="ambiguous"),
        pytest.param({"response_format": as_schema({"enum": [f"v{i}" for i in range(6000)]})}, id="many"),
    ]  # fmt: skip


@pytest.mark.parametrize("fields", bombs())
async def test_a_bomb_ends_in_a_refusal_or_an_answer_and_others_go_on(
    client: AsyncOpenAI, engine: EngineProcess, fields: dict[str, Any]
) -> None:
    beside = asyncio.create_task(
        client.completions.create(model="tiny", prompt="a", max_tokens=60, extra_body={"ignore_eos": True})
    )
    call = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, **fields)
    reply: Any = (await asyncio.gather(call, return_exceptions=True))[0]
    if isinstance(reply, APIStatusError):
        assert reply.status_code == 400
        assert len(str(reply)) < 1000
    else:
        assert reply.choices[0].finish_reason in {"stop", "length"}
    usage = (await beside).usage
    assert usage is not None
    assert usage.completion_tokens == 60


async def test_the_state_tells_of_grammars(client: AsyncOpenAI, gate: RunningGate) -> None:
    """Who waits is told too, for as long as that is: see the engine's own tests."""
    create: Any = client.chat.completions.create
    reply = await create(
        model="tiny", messages=MESSAGES, max_tokens=30, response_format=as_schema({"enum": ["told of"]})
    )
    assert reply.choices[0].message.content == '"told of"'

    async with asyncio.timeout(20):
        while True:  # the gate tells what it was told last
            async with gate.client.get(f"{gate.admin_url}/state") as response:
                grammars = (await response.json())["engine"]["grammars"]
            if grammars["compiled_total"] >= 1 and not grammars["waiting"]:
                break


async def test_who_cannot_wait_for_its_grammar_is_told_so(gate: RunningGate) -> None:
    # A tenth of a second of compiling on a fast machine.
    names = {f"no time {i}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for i in range(900)}
    form = as_schema({"type": "object", "properties": names, "additionalProperties": False})
    body = {"model": "tiny", "messages": MESSAGES, "response_format": form, "max_tokens": 5}
    async with gate.client.post(
        f"{gate.url}/v1/chat/completions", json=body, headers={"x-sluice-timeout-ms": "30"}
    ) as response:
        # The gate may say so itself: by what it has learned of steps nothing ends so soon.
        assert response.status in {504, 429}
