"""Tool calls through OpenAI's own client and a whole engine that says what it is told to: streamed equals whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from engine import tool_templates as templates
from engine.serving import Served, served
from engine.tiny_model import tool_tokenizer
from sluice_sidecar.web.events import count_with_text

TURNS = ("<|im_start|>", "<|im_end|>")
TOOLS: Any = [
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "put"}},
]
GET = '{"name": "get", "arguments": {"a": "é"}}'
PUT = '{"name": "put", "arguments": {}}'


def tags(*calls: str) -> str:
    return "{nl}".join(f"<tool_call>{{nl}}{call}{{nl}}</tool_call>" for call in calls)


@pytest.fixture
async def engine() -> AsyncIterator[Served]:
    async with served(tokenizer=tool_tokenizer(templates.HERMES, *TURNS), max_length=2000, num_blocks=1000) as running:
        yield running


@pytest.fixture
async def mistral() -> AsyncIterator[Served]:
    tokenizer = tool_tokenizer(templates.MISTRAL, "[TOOL_CALLS]", "[/INST]", "</s>")
    async with served(tokenizer=tokenizer, max_length=2000, num_blocks=1000) as running:
        yield running


async def asked(engine: Served, say: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a chat; a stream of the same call says the same."""
    call: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"say:{say}"}],
        "tools": TOOLS,
        "seed": 3,
        "extra_headers": {"x-sluice-request-id": "req-1"},
    } | fields
    async with AsyncOpenAI(api_key="none", base_url=f"{engine.url}/v1", max_retries=0) as client:
        whole = await client.chat.completions.create(**call)
        await engine.idle()  # both have one id, so that their calls have the same
        streamed: dict[int, dict[str, Any]] = {}
        async for chunk in await client.chat.completions.create(stream=True, **call):
            for piece in chunk.model_dump(exclude_unset=True)["choices"]:
                choice = streamed.setdefault(
                    piece["index"], {"text": "", "calls": [], "logprobs": [], "finish_reason": None}
                )
                assert choice["finish_reason"] is None, "nothing comes after the end"
                choice["finish_reason"] = piece["finish_reason"]
                choice["text"] += piece["delta"].get("content") or ""
                choice["logprobs"] += (piece["logprobs"] or {}).get("content") or []
                for delta in piece["delta"].get("tool_calls", []):
                    if "id" in delta:
                        assert delta["index"] == len(choice["calls"])
                        choice["calls"].append(delta)
                    else:
                        assert set(delta) == {"index", "function"}
                        choice["calls"][delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    choices = [choice.model_dump(exclude_unset=True) for choice in whole.choices]
    for choice in choices:
        message, other = choice["message"], streamed[choice["index"]]
        assert (message["content"] or "") == other["text"]
        calls = [{"index": index, **each} for index, each in enumerate(message.get("tool_calls") or [])]
        assert calls == other["calls"]
        assert choice["finish_reason"] == other["finish_reason"]
        assert ((choice["logprobs"] or {}).get("content") or []) == other["logprobs"]
    await engine.idle()
    return choices


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])
    ]


ANSWERS: list[Any] = [
    pytest.param("Hello.", {}, "Hello.", [], "stop", id="no call"),
    pytest.param(tags(GET), {}, None, [("get", '{"a": "é"}')], "tool_calls", id="a call"),
    pytest.param(f"Wait.{{nl}}{tags(GET, PUT)}", {}, "Wait.", [("get", '{"a": "é"}'), ("put", "{}")], "tool_calls",
                 id="text and two calls"),
    pytest.param(tags(GET, PUT), {"parallel_tool_calls": False}, None, [("get", '{"a": "é"}')], "tool_calls",
                 id="one call at a time"),
    pytest.param(tags(GET), {"tool_choice": "none"}, tags(GET).replace("{nl}", "\n"), [], "stop", id="none"),
    pytest.param(tags(GET), {"max_tokens": 19}, '<tool_call>\n{"name"', [], "length", id="cut before the name"),
    pytest.param(tags(GET), {"max_tokens": 44}, None, [("get", '{"a')], "length", id="cut in the arguments"),
    pytest.param(tags(GET), {"max_tokens": 55}, None, [("get", '{"a": "é"}')], "length", id="cut in the closing"),
    pytest.param(tags(GET), {"stop": ["é"]}, None, [("get", '{"a": "')], "stop", id="a stop string in the arguments"),
    pytest.param(f"{tags(GET)}END", {"stop": ["END"]}, None, [("get", '{"a": "é"}')], "tool_calls",
                 id="a stop string after a call"),
    pytest.param(tags('{"name": "drop"}'), {}, '<tool_call>\n{"name": "drop"}\n</tool_call>', [], "stop",
                 id="no such function"),
    pytest.param(f"{tags(GET)}{{nl}}<tool_call>{{nl}}{{", {}, "<tool_call>\n{", [("get", '{"a": "é"}')], "tool_calls",
                 id="a call and half a one"),
    pytest.param(tags(GET), {"logprobs": True, "top_logprobs": 2}, None, [("get", '{"a": "é"}')], "tool_calls",
                 id="log probabilities"),
]  # fmt: skip


@pytest.mark.parametrize(("say", "fields", "content", "calls", "reason"), ANSWERS)
async def test_an_answer_with_tools(
    engine: Served, say: str, fields: Any, content: str | None, calls: list[tuple[str, str]], reason: str
) -> None:
    (choice,) = await asked(engine, say, **fields)

    assert (choice["message"]["content"], calls_of(choice), choice["finish_reason"]) == (content, calls, reason)


async def test_in_a_stream_every_token_shows_and_clients_see_no_more_than_calls(engine: Served) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": f"say:A{tags(GET)}"}], "tools": TOOLS, "stream": True
    }  # fmt: skip
    async with engine.http.post("/v1/chat/completions", json=body) as response:
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines.count(': token {"index":0}') > len('<tool_call>\n{"name": "get"')
    tokens = [line for line in lines if count_with_text(f"{line}\n\n".encode())]
    assert len(tokens) == len(f"A{tags(GET)}".replace("{nl}", "\n").encode())


async def test_calls_are_counted_by_how_they_ended(engine: Served) -> None:
    await asked(engine, tags(GET, PUT))
    await asked(engine, tags(GET), max_tokens=44)

    def counted(outcome: str) -> float | None:
        return engine.registry.get_sample_value("sluice_engine_tool_calls_total", {"outcome": outcome})

    assert (counted("complete"), counted("incomplete")) == (4, 2), "each was asked for twice"


async def test_after_the_only_call_that_may_be_the_answer_has_ended(engine: Served) -> None:
    said = f"say:{tags(GET)} and so on for ever"
    body = {"model": "tiny", "messages": [{"role": "user", "content": said}], "tools": TOOLS}
    _, reply = await engine.post("/v1/chat/completions", {**body, "parallel_tool_calls": False})
    await engine.idle()

    assert reply["usage"]["completion_tokens"] == len(f"<tool_call>\n{GET[:-1]}".encode())


async def test_each_choice_has_its_own_calls(engine: Served) -> None:
    choices = await asked(engine, tags('{"name": "get", "arguments": {"n": {choice}}}'), n=2)

    assert [calls_of(choice) for choice in choices] == [[("get", '{"n": 0}')], [("get", '{"n": 1}')]]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


async def test_every_tokens_log_probability_is_told(engine: Served) -> None:
    (choice,) = await asked(engine, f"Hm.{tags(GET)}", logprobs=True)
    told = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert told.decode() == f"Hm.{tags(GET)}".replace("{nl}", "\n")


async def test_only_the_special_token_opens_a_call_where_it_is_one(mistral: Served) -> None:
    (meant,) = await asked(mistral, f"Ok.{{special}} [{GET}]")
    (spelled,) = await asked(mistral, f"Ok.[TOOL_CALLS] [{GET}]")

    assert (meant["message"]["content"], calls_of(meant)) == ("Ok.", [("get", '{"a": "é"}')])
    assert (spelled["message"]["content"], calls_of(spelled)) == (f"Ok.[TOOL_CALLS] [{GET}]", [])
    (without,) = await asked(mistral, f"Ok.{{special}} [{GET}]", tools=[])
    assert without["message"]["content"] == f"Ok. [{GET}]", "without tools a special token is no text, as ever"


async def test_a_conversation_goes_on_with_what_a_tool_said(engine: Served) -> None:
    (first,) = await asked(engine, tags(GET, PUT))
    message = {"role": "assistant", **first["message"]}
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"say:It is {index}."}
        for index, call in enumerate(message["tool_calls"])
    ]
    (then,) = await asked(engine, "", messages=[{"role": "user", "content": "say:"}, message, *answers])

    assert (then["message"]["content"], then["finish_reason"]) == ("It is 1.", "stop")


async def test_tokenize_counts_what_a_chat_would_have(engine: Served) -> None:
    body = {"messages": [{"role": "user", "content": "say:x"}], "tools": TOOLS}
    _, reply = await engine.post("/v1/chat/completions", {"model": "tiny", **body})
    _, counted = await engine.post("/tokenize", body)
    _, without = await engine.post("/tokenize", {**body, "tool_choice": "none"})

    assert counted["count"] == reply["usage"]["prompt_tokens"] > without["count"]
    _, plain = await engine.post("/tokenize", {"messages": body["messages"]})
    assert plain["count"] == without["count"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        pytest.param({}, "tools", "does not know tools", id="tools"),
        pytest.param({"tool_choice": "required"}, "tools", "does not know tools", id="a call required"),
    ],
)
async def test_a_model_without_tools_refuses_them_in_a_sentence(fields: Any, param: str, says: str) -> None:
    async with served(tokenizer=tool_tokenizer(templates.TOOLLESS, *TURNS)) as engine:
        with pytest.raises(APIStatusError) as caught:
            await asked(engine, "x", **fields)
        assert (caught.value.status_code, caught.value.param) == (400, param)
        assert says in str(caught.value)
        (choice,) = await asked(engine, "x", tool_choice="none")
        assert choice["message"]["content"] == "x", "none of them may be called"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        pytest.param({"response_format": {"type": "json_object"}}, "response_format", "with this model", id="a format"),
        pytest.param({"extra_body": {"guided_choice": ["a"]}}, "guided_choice", "beside tools", id="a choice"),
    ],
)
async def test_where_calls_look_like_answers_no_format_stands_beside_tools(fields: Any, param: str, says: str) -> None:
    async with served(tokenizer=tool_tokenizer(templates.LLAMA)) as engine:
        with pytest.raises(APIStatusError) as caught:
            await asked(engine, "x", **fields)
        assert (caught.value.status_code, caught.value.param) == (400, param)
        assert says in str(caught.value)


async def test_a_format_that_is_no_json_is_refused_beside_tools(engine: Served) -> None:
    with pytest.raises(APIStatusError) as caught:
        await asked(engine, "x", extra_body={"guided_json": "{"})
    assert (caught.value.status_code, caught.value.param) == (400, "guided_json")


async def test_no_end_is_not_allowed_where_a_schema_is_followed(engine: Served) -> None:
    with pytest.raises(APIStatusError) as caught:
        await asked(engine, "x", tool_choice="required", extra_body={"ignore_eos": True})
    assert (caught.value.status_code, caught.value.param) == (400, "ignore_eos")


async def test_a_schema_that_cannot_be_followed_is_refused_where_it_would_have_to_be(engine: Served) -> None:
    broken = [{"type": "function", "function": {"name": "get", "parameters": {"not": {}}, "strict": True}}]
    with pytest.raises(APIStatusError) as caught:
        await asked(engine, "x", tools=broken)
    assert (caught.value.status_code, caught.value.param, caught.value.code) == (400, "tools", "invalid_grammar")
    assert "the parameters of get: Unimplemented keys" in str(caught.value)
    del broken[0]["function"]["strict"]  # type: ignore[attr-defined]
    (choice,) = await asked(engine, "x", tools=broken)
    assert choice["message"]["content"] == "x", "where it would not, nobody minds"
