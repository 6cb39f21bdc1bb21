from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from engine.serving import Served, served, until
from sluice_engine.codec import decode
from sluice_engine.core.state import EngineState
from sluice_engine.serving import responses
from sluice_engine.serving.counters import Counters
from sluice_engine.serving.publication import publication_of
from sluice_engine.serving.responses import MAX_BODY_BYTES


@pytest.fixture
async def engine() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


@pytest.fixture
async def client(engine: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def frames(engine: Served, path: str, body: Any) -> list[Any]:
    """The data of each SSE event, JSON decoded but for [DONE]."""
    async with engine.http.post(path, json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


# ---------------------------------------------------------------------- the openai client


async def test_the_openai_client_chats(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "say:Grüße 🙂"}]
    )

    assert reply.choices[0].message.content == "Grüße 🙂"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert (reply.object, reply.model, reply.created) == ("chat.completion", "tiny", 1_700_000_000)
    assert reply.id == "chatcmpl-0"
    assert reply.usage is not None
    # 11 bytes and the token that ended it.
    assert reply.usage.completion_tokens == len("Grüße 🙂".encode()) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_the_openai_client_streams(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "say:Grüße 🙂"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Grüße 🙂"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/chat/completions", chat("say:añb €", n=2), id="chat"),
        pytest.param("/v1/completions", {"model": "tiny", "prompt": "say:añb €"}, id="text"),
    ],
)
async def test_each_chunk_says_the_counts_so_far_where_that_is_asked_for(
    engine: Served, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await frames(engine, path, {**body, "stream": True, "stream_options": options})

    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[0] < counts[len(counts) // 2] < counts[-1]
    assert len({event["usage"]["prompt_tokens"] for event in events[:-1]}) == 1
    assert events[-2]["choices"] == []


async def test_stop_strings_end_the_answer_and_free_the_request(client: AsyncOpenAI, engine: Served) -> None:
    reply = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "endless"}], stop=["bab", "zzz"]
    )
    await engine.idle()

    assert reply.choices[0].message.content == "a"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4


async def test_a_choice_that_stops_is_ended_in_the_engine_while_the_others_go_on(engine: Served) -> None:
    body = {"model": "tiny", "prompt": ["endless", "say:0123456789"], "stop": ["bab"]}
    await engine.post("/v1/completions", body)
    await engine.idle()
    _, state = await engine.get("/state")

    assert [done["outcome"] for done in state["finished"]] == ["stop", "stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_held_for_a_stop_string_is_said_at_the_end(engine: Served, *, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "say:the EN", "stop": ["END"], "stream": stream}
    if stream:
        events = await frames(engine, "/v1/completions", body)
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
    else:
        text = (await engine.post("/v1/completions", body))[1]["choices"][0]["text"]

    assert text == "the EN"


async def test_logprobs_of_the_chosen_tokens(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "say:hé"}], logprobs=True
    )
    logprobs = reply.choices[0].logprobs
    text = await client.completions.create(model="tiny", prompt="say:ok", logprobs=1)

    assert logprobs is not None
    assert logprobs.content is not None
    assert [(token.token, token.logprob, token.bytes) for token in logprobs.content] == [
        ("h", 0.0, [0x68]),
        ("�", -1.0, [0xC3]),
        ("�", -2.0, [0xA9]),
    ]
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.token_logprobs == [0.0, -1.0]
    assert text.choices[0].logprobs.text_offset == [0, 1]


async def test_n_choices_have_one_seed_and_their_own_index(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "say:{seed}/{choice}"}], n=3, seed=7
    )
    drawn = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say:{seed}"}])

    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(0, "7/0"), (1, "7/1"), (2, "7/2")]
    assert drawn.choices[0].message.content == "42"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12


async def test_a_list_of_prompts_gives_a_set_of_choices_each(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(model="tiny", prompt=["say:a{choice}", "say:b{choice}"], n=2)
    by_ids = await client.completions.create(model="tiny", prompt=list(b"say:ids"))

    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert by_ids.choices[0].text == "ids"
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 7


async def test_the_state_tells_the_requests_of_one_call_apart(engine: Served) -> None:
    engine.runner.may_step.clear()
    body = {"model": "tiny", "prompt": ["say:a", "say:b", "say:c"], "n": 2}
    call = asyncio.create_task(engine.post("/v1/completions", body))
    await until(lambda: len(engine.scheduler.requests) == 6)
    engine.runner.may_step.set()
    assert (await call)[0] == 200
    await engine.idle()

    ended = list(engine.service.engine.loop.finished if engine.service.engine else [])

    assert sorted(request.choice for request in ended) == [0, 1, 2, 3, 4, 5]
    assert len({request.id for request in ended}) == 1


async def test_the_choices_that_run_are_published_under_the_indices_of_the_reply(engine: Served) -> None:
    body = {"model": "tiny", "prompt": ["endless", "endless"], "n": 2, "max_tokens": 150}
    engine.runner.may_step.clear()
    call = asyncio.create_task(engine.post("/v1/completions", body))
    await until(lambda: len(engine.scheduler.requests) == 4)
    loaded = engine.service.engine
    assert loaded is not None

    published = publication_of(loaded.loop, Counters(), 1).requests

    assert [request.choice for request in published] == [0, 1, 2, 3]
    engine.runner.may_step.set()
    assert (await call)[0] == 200


async def test_max_tokens_ends_with_length_and_when_left_out_means_what_fits(
    client: AsyncOpenAI, engine: Served
) -> None:
    short = await client.completions.create(model="tiny", prompt="endless", max_tokens=3)
    fits = await client.completions.create(model="tiny", prompt="endless")
    await engine.idle()

    assert (short.choices[0].text, short.choices[0].finish_reason) == ("aba", "length")
    assert fits.usage is not None
    assert fits.usage.total_tokens == 200
    assert fits.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "error", "param", "code"),
    [
        pytest.param({"model": "gpt-9"}, openai.NotFoundError, "model", "model_not_found", id="another model"),
        pytest.param({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value", id="max_tokens zero"),
        pytest.param(
            {"max_tokens": 9999},
            openai.BadRequestError,
            "max_tokens",
            "context_length_exceeded",
            id="max_tokens too large",
        ),
        pytest.param(
            {"max_completion_tokens": 9999},
            openai.BadRequestError,
            "max_completion_tokens",
            "context_length_exceeded",
            id="max_completion_tokens too large",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "x" * 500}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
            id="a prompt that is too long",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "refuse me"}]},
            openai.BadRequestError,
            "messages",
            "chat_template_error",
            id="messages that the template refuses",
        ),
        pytest.param(
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "tools",
            "unsupported_parameter",
            id="tools",
        ),
        pytest.param({"extra_body": {"x": 1}}, openai.BadRequestError, "x", "unknown_parameter", id="an unknown field"),
        pytest.param({"stop": ["a"] * 5}, openai.BadRequestError, "stop", "invalid_value", id="too many stop strings"),
    ],
)
async def test_errors_reach_the_openai_client_with_param_and_code(
    client: AsyncOpenAI,
    engine: Served,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    code: str,
) -> None:
    arguments = {**chat("hi"), **fields}
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**arguments)

    assert (caught.value.param, caught.value.code) == (param, code)
    assert engine.scheduler.step == 0, "the engine was touched"
    assert engine.service.held_choices() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_leaves_the_others_alone(
    client: AsyncOpenAI, engine: Served, *, stream: bool
) -> None:
    async def failing() -> Any:
        reply: Any = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "fail"}], stream=stream
        )
        return [chunk async for chunk in reply] if stream else reply

    fine = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say:fine"}])
    reply = asyncio.ensure_future(fine)
    with pytest.raises(openai.APIError, match="not finite"):
        await failing()

    assert (await reply).choices[0].message.content == "fine"
    await engine.idle()


# ---------------------------------------------------------------------- bodies and routes


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"{", id="malformed"),
        pytest.param(b"\xff\xfe{}", id="invalid UTF-8"),
        pytest.param(b"[" * 200_000, id="a nesting bomb"),
        pytest.param(b"", id="empty"),
    ],
)
async def test_a_body_that_is_not_json_is_400(engine: Served, path: str, raw: bytes) -> None:
    async with engine.http.post(path, data=raw) as response:
        error = (await response.json())["error"]

    assert (response.status, error["code"], error["param"]) == (400, "invalid_json", None)


async def test_a_body_that_is_too_deep_for_what_is_done_with_it_is_400(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beyond(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded while encoding a JSON object")

    monkeypatch.setattr("sluice_engine.serving.intake.chat_prompt", beyond)
    status, answer = await engine.post("/v1/chat/completions", chat("hi"))

    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    assert answer["error"]["message"] == "The body is nested too deep."


PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/load_lora_adapter"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_over_the_limit_is_413(engine: Served, path: str) -> None:
    body = io.BytesIO(json.dumps(chat("x" * MAX_BODY_BYTES)).encode())
    async with engine.http.post(path, data=body) as response:
        answer = await response.json()

    assert (response.status, answer["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_does_not_come_is_waited_for_no_longer_than_its_time(
    engine: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(responses, "BODY_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
    writer.write(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{" % path.encode())

    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        error = json.loads(await reader.readuntil(b"}}"))["error"]
    assert head.startswith(b"HTTP/1.1 408")
    assert (error["code"], error["message"]) == ("request_timeout", "The body did not arrive within 0 s.")
    writer.close()


async def test_a_reader_that_takes_nothing_of_its_stream_is_cut_off_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "STALL_TIMEOUT_S", 0.1)
    async with served(num_blocks=4096, max_length=2000) as engine:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", int(engine.url.rpartition(":")[2])))
            body = json.dumps(chat("endless", stream=True, n=8, logprobs=True, top_logprobs=20)).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(sock, head + body)
            await until(lambda: engine.service.held_choices() == 8)

            await engine.idle()

            seen = b""
            with contextlib.suppress(ConnectionError):
                while piece := await loop.sock_recv(sock, 2**20):
                    seen += piece
        assert seen.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in seen


async def test_unknown_routes_and_methods_are_openai_errors(engine: Served) -> None:
    assert (await engine.get("/v2"))[1]["error"]["code"] == "not_found"
    assert await engine.get("/v1/completions") == (
        405,
        {
            "error": {
                "message": "The route /v1/completions takes POST, not GET.",
                "type": "invalid_request_error",
                "param": None,
                "code": "method_not_allowed",
            }
        },
    )


async def test_the_gates_request_id_is_echoed_and_names_the_reply(engine: Served) -> None:
    headers = {"x-sluice-request-id": "req-abc"}
    async with engine.http.post("/v1/chat/completions", json=chat("hi"), headers=headers) as response:
        body = await response.json()
    async with engine.http.post("/v1/chat/completions", json={}, headers=headers) as refused:
        pass
    status, error = await engine.post("/v1/chat/completions", chat("hi"), **{"x-sluice-request-id": "a b"})

    assert (response.headers["x-sluice-request-id"], body["id"]) == ("req-abc", "chatcmpl-abc")
    assert refused.headers["x-sluice-request-id"] == "req-abc"
    assert (status, error["error"]["param"]) == (400, "x-sluice-request-id")


async def test_a_second_request_of_one_id_is_refused_while_the_first_runs(engine: Served) -> None:
    headers = {"x-sluice-request-id": "req-1"}
    engine.runner.may_step.clear()
    first = asyncio.create_task(engine.post("/v1/chat/completions", chat("hi"), **headers))
    await until(lambda: engine.service.held_choices() == 1)
    status, body = await engine.post("/v1/chat/completions", chat("hi"), **headers)
    engine.runner.may_step.set()

    assert (status, body["error"]["code"]) == (400, "duplicate_request_id")
    assert (await first)[0] == 200


async def test_tokenize_counts_as_the_engine_does(engine: Served) -> None:
    text = await engine.post("/tokenize", {"prompt": "hé"})
    talk = await engine.post("/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    both = await engine.post("/tokenize", {"prompt": "a", "messages": []})
    other = await engine.post("/tokenize", {"model": "other", "prompt": "a"})
    reply = await engine.post("/v1/chat/completions", chat("hi"))

    assert text == (200, {"count": 3, "max_model_len": 200, "tokens": list("hé".encode())})
    assert talk[1]["count"] == reply[1]["usage"]["prompt_tokens"]
    assert (both[0], both[1]["error"]["param"], other[0]) == (400, "prompt", 404)


async def test_models_health_state_and_steps(engine: Served) -> None:
    await engine.post("/v1/chat/completions", chat("say:four"))
    await engine.idle()
    _, models = await engine.get("/v1/models")
    assert await engine.get("/v1/models/tiny") == (200, models["data"][0])
    status, error = await engine.get("/v1/models/other")
    assert (status, error["error"]["code"]) == (404, "model_not_found")
    _, document = await engine.get("/state")
    _, steps = await engine.get("/steps?last=2")
    state = decode(EngineState, document, "state")

    assert models["data"][0]["id"] == "tiny"
    assert await engine.get("/health") == (200, {"status": "ready"})
    assert (state.phase, state.boot_id, state.model, state.max_length_tokens) == ("ready", "boot", "tiny", 200)
    assert state.pool is not None
    assert state.pool.free_blocks == state.pool.total_blocks == 64
    assert state.prefix is not None
    assert state.prefix.enabled
    assert state.host is not None
    assert (state.host.total_blocks, state.host.free_blocks, state.host.link_in_ns_per_block) == (8, 8, 30)
    assert [(done.id, done.outcome, done.output_tokens) for done in state.finished] == [("req-0", "stop", 5)]
    assert [record["step"] for record in steps["steps"]] == [4, 5]
    (ended,) = steps["requests"]
    assert (ended["request_id"], ended["outcome"], ended["output_tokens"], ended["queued_step"]) == (
        "req-0/0",
        "stop",
        5,
        0,
    )
    assert 0 < ended["arrival_us"] <= ended["queued_us"] < ended["first_token_us"] <= ended["ended_us"]
    assert [(await engine.get(f"/steps?last={bad}"))[0] for bad in ("0", "-1", "x", "99999999", "²")] == [400] * 5


async def test_an_answer_with_its_prompt_before_it(engine: Served) -> None:
    body = {"model": "tiny", "prompt": ["say:{choice}é", list(b"say:no")], "n": 2, "echo": True}
    whole = (await engine.post("/v1/completions", body))[1]
    events = await frames(engine, "/v1/completions", {**body, "stream": True})
    texts = ["", "", "", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    firsts = [event for event in events[:-1] if event["choices"][0]["text"].startswith("say:")]

    assert [choice["text"] for choice in whole["choices"]] == texts
    assert texts == ["say:{choice}é0é", "say:{choice}é1é", "say:nono", "say:nono"]
    assert len(firsts) == 4, "the prompt comes with the first token, which is timed"


async def test_usage_says_how_much_of_each_prompt_was_cached() -> None:
    long, other = "say:a and nothing else", "say:b whatever was asked"
    async with served() as engine:
        _, cold = await engine.post("/v1/completions", {"model": "tiny", "prompt": [long, other], "n": 2})
        _, warm = await engine.post("/v1/completions", {"model": "tiny", "prompt": [long, other], "n": 2})

    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["usage"]["prompt_tokens"] == len(long) + len(other)
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 20 + 20}, "a prompt counts once"


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="plainly"),
        pytest.param({"stop": ["ü", "zz"]}, id="with stop strings"),
        pytest.param({"max_tokens": 7}, id="cut inside a character"),
        pytest.param({"n": 3, "logprobs": True}, id="with n and logprobs"),
        pytest.param({"logprobs": True, "top_logprobs": 4, "stop": ["grün"]}, id="with the likeliest tokens"),
        pytest.param(
            {"min_tokens": 9, "stop": ["b", "0"], "ignore_eos": True, "max_tokens": 9}, id="with least tokens"
        ),
        pytest.param({"service_tier": "flex", "logit_bias": {"5": 1}, "stop_token_ids": [0xB1]}, id="with stop tokens"),
    ],
)
async def test_streamed_equals_whole(engine: Served, fields: dict[str, Any]) -> None:
    body = chat("say:añb {choice} €🙂 grün\u2028", **fields)
    whole = (await engine.post("/v1/chat/completions", body))[1]
    events = await frames(
        engine, "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )

    assert events[-1] == "[DONE]"
    assert events[-2]["usage"].pop("prompt_tokens_details") != whole["usage"].pop("prompt_tokens_details"), (
        "it was cached"
    )
    assert events[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events[:-2] if event["choices"][0]["index"] == choice["index"]]
        text = "".join(chunk["delta"].get("content", "") for chunk in mine)
        logprobs = [token for chunk in mine if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
        assert text == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert logprobs == (choice["logprobs"]["content"] if choice["logprobs"] else [])


@given(
    st.lists(st.text(alphabet="abü€🙂 ", max_size=12), min_size=1, max_size=3),
    st.lists(st.text("abü", min_size=1, max_size=3), max_size=3),
)
def test_completions_streamed_equal_whole_for_any_text_and_stop(texts: list[str], stop: list[str]) -> None:
    async def both() -> None:
        async with served() as engine:
            body = {"model": "tiny", "prompt": [f"say:{text}" for text in texts], "stop": stop}
            whole = (await engine.post("/v1/completions", body))[1]
            events = await frames(engine, "/v1/completions", {**body, "stream": True})
            await engine.idle()
        for choice in whole["choices"]:
            mine = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in mine) == choice["text"]
            assert all(each not in choice["text"] for each in stop)

    asyncio.run(both())


async def test_a_stream_that_breaks_on_our_side_ends_with_an_error_event(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("a fault of ours")

    monkeypatch.setattr("sluice_engine.serving.output.ChoiceOutput.push", broken)
    events = await frames(engine, "/v1/chat/completions", chat("endless", stream=True))
    await engine.idle()

    assert events[-1]["error"]["code"] == "request_failed"
    assert "[DONE]" not in events


async def test_a_stream_starts_before_the_first_token(engine: Served) -> None:
    engine.runner.may_step.clear()
    async with engine.http.post("/v1/chat/completions", json=chat("hi", stream=True)) as response:
        first = await response.content.readline()
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
        engine.runner.may_step.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


# ---------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("window", ["waiting for a step", "running"])
async def test_a_client_that_leaves_frees_its_blocks(engine: Served, window: str, *, stream: bool) -> None:
    if window == "waiting for a step":
        engine.runner.may_step.clear()
    task = asyncio.create_task(engine.post("/v1/chat/completions", chat("endless", stream=stream, n=3)))
    await until(lambda: engine.service.held_choices() == 3)
    task.cancel()
    await until(lambda: engine.service.held_choices() == 0)
    engine.runner.may_step.set()

    await engine.idle()


async def test_clients_that_leave_at_random_leave_nothing_behind(engine: Served) -> None:
    rng = random.Random(5)

    async def call(number: int) -> None:
        """Send up to some byte, read up to some byte, go."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
        text = rng.choice(["endless", "say:short", "fail", f"say:{'long ' * rng.randrange(20)}"])
        body = json.dumps(chat(text, stream=rng.random() < 0.7, n=rng.randrange(1, 4))).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
        whole = "\r\n".join([*head, "", ""]).encode() + body
        sent = whole if rng.random() < 0.8 else whole[: rng.randrange(len(whole))]
        writer.write(sent)
        await writer.drain()
        if len(sent) == len(whole):
            for _ in range(rng.randrange(6)):
                if not await reader.read(rng.randrange(1, 2000)):
                    break
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    for _ in range(12):
        await asyncio.gather(*map(call, range(12)))
    await engine.idle()
    _, after = await engine.post("/v1/chat/completions", chat("say:still here"))
    assert after["choices"][0]["message"]["content"] == "still here"


# ---------------------------------------------------------------------- steps that take long, engines that end


async def test_state_answers_while_a_step_runs(engine: Served) -> None:
    engine.runner.may_step.clear()
    task = asyncio.create_task(engine.post("/v1/chat/completions", chat("hi")))
    await until(engine.runner.stepping.is_set)
    _, state = await engine.get("/state")
    health, _ = await engine.get("/health")
    engine.runner.may_step.set()
    await task

    assert state["step_running_us"] > 0
    assert state["step_predicted_us"] > 0
    assert not state["hung"]
    assert health == 200


async def test_a_hung_step_is_found_and_one_without_work_is_not(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.service.clock
    monkeypatch.setattr(engine.service, "clock", lambda: real() + 3_600_000_000)
    assert not (await engine.get("/state"))[1]["hung"], "idle is not hung"
    engine.runner.may_step.clear()
    task = asyncio.create_task(engine.post("/v1/chat/completions", chat("hi")))
    await until(engine.runner.stepping.is_set)
    _, state = await engine.get("/state")
    status, health = await engine.get("/health")
    engine.runner.may_step.set()
    await task

    assert state["hung"]
    assert state["step_running_us"] >= 3_600_000_000
    assert (status, health["error"]["code"]) == (503, "engine_not_ready")


async def test_an_engine_whose_steps_all_fail_ends_and_says_so(engine: Served) -> None:
    answers = [await engine.post("/v1/chat/completions", chat("crash")) for _ in range(3)]
    await engine.service.ended()
    status, after = await engine.post("/v1/chat/completions", chat("hi"))
    _, state = await engine.get("/state")

    assert [(status, body["error"]["code"]) for status, body in answers] == [(500, "request_failed")] * 3
    assert (status, after["error"]["code"]) == (503, "engine_not_ready")
    assert state["phase"] == "failed"
    assert "on fire" in state["failure"]
    assert engine.service.failure is not None
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


async def test_shutting_down_ends_streams_with_an_error_event_and_without_done(engine: Served) -> None:
    engine.runner.may_step.clear()  # or it may reach the model's length before the end comes
    async with engine.http.post("/v1/chat/completions", json=chat("endless", stream=True)) as response:
        engine.service.close()
        text = (await response.content.read()).decode()
    last = json.loads(text.removesuffix("\n\n").rpartition("data: ")[2])

    assert last["error"]["code"] == "engine_not_ready"
    assert "[DONE]" not in text
    assert (await engine.get("/health"))[0] == 503
    assert (await engine.get("/state"))[1]["phase"] == "draining"


async def test_too_many_waiting_requests_are_429(engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_engine.serving.service.MAX_WAITING_CHOICES", 2)
    engine.runner.may_step.clear()
    tasks = [asyncio.create_task(engine.post("/v1/chat/completions", chat("hi", n=5))) for _ in range(2)]
    await until(lambda: engine.service.held_choices() == 10)
    status, body = await engine.post("/v1/chat/completions", chat("hi"))
    engine.runner.may_step.set()

    assert (status, body["error"]["code"], body["error"]["type"]) == (429, "engine_overloaded", "rate_limit_error")
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
