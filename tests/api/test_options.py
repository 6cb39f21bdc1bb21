"""The options of a call, through OpenAI's own client, the gate and a real engine: streamed equals whole for each."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from sidecar.running import RunningGate, until

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a gate that let in only as much work as the engine behind it could finish."
OPTIONS: list[Any] = [
    pytest.param({}, id="plainly"),
    pytest.param({"n": 3}, id="three choices"),
    pytest.param({"logprobs": 3}, id="log probabilities"),
    pytest.param({"logprobs": 0, "n": 2}, id="log probabilities of two choices"),
    pytest.param({"echo": True}, id="echo"),
    pytest.param({"echo": True, "n": 2, "max_tokens": 1}, id="echo before one token"),
    pytest.param({"logit_bias": {"101": 100}}, id="a bias"),
    pytest.param({"extra_body": {"min_tokens": 20}}, id="least tokens"),
    pytest.param({"extra_body": {"ignore_eos": True, "top_k": 5}}, id="no end"),
    pytest.param({"extra_body": {"stop_token_ids": list(range(32, 90))}}, id="stop tokens"),
    pytest.param({"stop": ["e", "a"], "logit_bias": {"101": 100}, "extra_body": {"min_tokens": 4}}, id="late stop"),
    pytest.param({"frequency_penalty": 1.5, "presence_penalty": -0.5, "logprobs": 2}, id="penalties"),
    pytest.param({"extra_body": {"service_tier": "flex"}}, id="a tier"),
]


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices as a whole reply has them, put together from a stream; and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    async for chunk in await client.completions.create(stream=True, stream_options={"include_usage": True}, **fields):
        for piece in chunk.model_dump()["choices"]:
            choice = choices.setdefault(piece["index"], {**piece, "text": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "nothing comes after the end"
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"]:
                held = choice["logprobs"] = choice["logprobs"] or dict.fromkeys(piece["logprobs"])
                for name, values in piece["logprobs"].items():
                    held[name] = (held[name] or []) + values if values is not None else held[name]
        if chunk.usage is not None:
            usage = chunk.usage.model_dump()
    return [choices[index] for index in sorted(choices)], usage


@pytest.mark.parametrize("fields", OPTIONS)
async def test_streamed_equals_whole(client: AsyncOpenAI, fields: dict[str, Any]) -> None:
    call: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 1.8, "seed": 5} | fields
    whole = (await client.completions.create(**call)).model_dump()
    again = (await client.completions.create(**call)).model_dump()
    choices, usage = await streamed(client, **call)

    assert again["choices"] == whole["choices"], "a seed says all"
    assert choices == whole["choices"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "the whole one computed it"


async def test_a_chat_has_its_likeliest_tokens(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=6, logprobs=True, top_logprobs=20, seed=1
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        values = [each.logprob for each in token.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        assert token.logprob <= values[0]


async def test_a_bias_of_100_bans_and_forces(client: AsyncOpenAI) -> None:
    forced = await client.completions.create(
        model="tiny", prompt="a", max_tokens=5, logit_bias={"98": 100}, temperature=0
    )
    assert forced.choices[0].text == "bbbbb"


async def test_choices_share_the_blocks_of_their_prompt(client: AsyncOpenAI, gate: RunningGate) -> None:
    """Only the first computes it; all others find it, and the prompt counts once."""
    prompt = f"{PROMPT} {PROMPT} shared"
    reply = await client.completions.create(model="tiny", prompt=prompt, max_tokens=9, n=5, temperature=2)

    def cached_tokens() -> dict[int, int]:
        state = gate.gate.engine.state
        finished = state.finished if state is not None else ()
        return {each.choice: each.cached_tokens for each in finished if each.prompt_tokens == len(prompt)}

    await until(lambda: len(cached_tokens()) == 5)
    usable = (len(prompt) - 1) // 16 * 16
    assert len({choice.text for choice in reply.choices}) > 1, "each draws its own"
    assert [cached_tokens()[index] for index in range(1, 5)] == [usable] * 4
    assert cached_tokens()[0] < usable


async def test_when_the_client_leaves_all_choices_end(gate: RunningGate) -> None:
    body = {
        "model": "tiny", "prompt": PROMPT, "n": 4, "max_tokens": 800, "ignore_eos": True, "stream": True
    }  # fmt: skip
    async with gate.client.post(f"{gate.url}/v1/completions", json=body) as response:
        assert response.status == 200
        await response.content.readline()
        await until(lambda: len(gate.gate.engine.state.requests) == 4 if gate.gate.engine.state else False)
    # The fixture waits until nothing is left in either program.


async def test_more_choices_than_may_ever_run_are_one_decision(client: AsyncOpenAI, gate: RunningGate) -> None:
    """All of them enter or none does."""
    calls = [
        client.completions.create(model="tiny", prompt=f"{i}", n=4, max_tokens=30, extra_body={"ignore_eos": True})
        for i in range(6)
    ]
    replies = await asyncio.gather(*calls, return_exceptions=True)

    refused = [reply for reply in replies if isinstance(reply, APIStatusError)]
    assert all(reply.status_code == 429 for reply in refused)
    served = [reply for reply in replies if not isinstance(reply, BaseException)]
    assert served
    assert all(len(reply.choices) == 4 for reply in served)
    assert len(refused) + len(served) == 6


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        pytest.param({"best_of": 3}, "best_of", "not supported", id="best_of"),
        pytest.param({"suffix": "x"}, "suffix", "not supported", id="suffix"),
        pytest.param({"echo": True, "logprobs": 1}, "echo", "with logprobs", id="log probabilities of the prompt"),
        pytest.param({"logit_bias": {"260": 1}}, "logit_bias", "0 to 259", id="a bias of no token"),
        pytest.param({"extra_body": {"stop_token_ids": [260]}}, "stop_token_ids", "0 to 259", id="no such stop token"),
        pytest.param({"extra_body": {"min_tokens": 5000}}, "min_tokens", "fit", id="more least tokens than fit"),
        pytest.param({"stop": [str(i) for i in range(2000)]}, "stop", "at most 4", id="2,000 stop strings"),
    ],
)
async def test_what_is_not_done_is_refused_by_name(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(APIStatusError) as caught:
        await client.completions.create(**{"model": "tiny", "prompt": "a"} | fields)
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert says in str(caught.value)


async def test_other_routes_say_what_they_would_be_for(client: AsyncOpenAI) -> None:
    with pytest.raises(APIStatusError) as caught:
        await client.embeddings.create(model="tiny", input="a")
    assert caught.value.status_code == 404
    assert "/v1/embeddings: embeddings is not what a server of one text model does" in str(caught.value)


async def test_a_prompt_of_special_tokens_is_a_prompt(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(model="tiny", prompt=[257, 258, 259, 256] * 4, max_tokens=3, echo=True)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.choices[0].finish_reason) in {(16, "length"), (16, "stop")}


async def test_text_and_tokens_both_ways(gate: RunningGate) -> None:
    text = "<|im_start|>user\nGrüße, 🙂<|im_end|>"
    async with gate.client.post(f"{gate.url}/tokenize", json={"model": "tiny", "prompt": text}) as response:
        tokens = (await response.json())["tokens"]
    async with gate.client.post(f"{gate.url}/detokenize", json={"tokens": tokens}) as response:
        assert await response.json() == {"prompt": text}
    async with gate.client.post(f"{gate.url}/detokenize", json={"tokens": [9999]}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "tokens")
    async with gate.client.get(f"{gate.url}/tokenize") as response:
        assert response.status == 405
