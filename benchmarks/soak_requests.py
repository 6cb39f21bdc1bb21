"""What a client may ask of the soaked service, drawn by a seed, and what an answer to it has to look like. No I/O.

Many draws are of a kind that a server could remember for ever: users, schemas, expressions, beginnings of prompts. So
the variety here is far beyond what any of its tables should keep.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice_operator.bench.prompts import prompt
from soak_answers import Said

MODEL = "soak"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# A prompt of so many words and its answer are a third of the cache: with eight clients that is more than there is.
LONG_WORDS, LONG_TOKENS = (500, 800), 160

_SHARED = [prompt(random.Random(seed), 180, 180) for seed in range(12)]


Check = Callable[[Said], str]
"""What is wrong with a choice; empty where nothing is."""


@dataclass(slots=True, kw_only=True)
class Asked:
    """A call."""

    kind: str
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    choices: int = 1
    check: Check = lambda _: ""

    def problems(self, choices: Mapping[int, Said], usage: Mapping[str, Any]) -> list[str]:
        """What is not well-formed in an answer that came to its end."""
        found = []
        if sorted(choices) != list(range(self.choices)):
            found.append(f"choices {sorted(choices)} of {self.choices}")
        tokens, most = int(usage.get("completion_tokens", 0)), self.choices * int(self.body["max_tokens"])
        if not 0 < tokens <= most or usage["total_tokens"] != usage["prompt_tokens"] + tokens:
            found.append(f"usage {usage}, at most {most} output tokens")
        if self.body.get("ignore_eos") and tokens != most:
            found.append(f"{tokens} output tokens of {most}")
        for said in choices.values():
            if said.finish_reason not in {"stop", "length", "tool_calls"}:
                found.append(f"finish_reason {said.finish_reason!r}")
            if problem := self.check(said):
                found.append(problem)
        return found


def _message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _chat(rng: random.Random) -> Asked:
    n = rng.choice((1, 1, 2))
    body: dict[str, Any] = {"messages": _message(prompt(rng, 5, 120)), "max_tokens": rng.randint(4, 48), "n": n}
    if rng.random() < 0.4:
        body |= {"stop": [rng.choice("eaio"), "\n\n"]}
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 20)}
    if rng.random() < 0.3:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {str(rng.randint(100, 40_000)): 5}}
    return Asked(
        kind="chat", path=CHAT, body=body, choices=n, check=_with_logprobs if "logprobs" in body else _stopped(body)
    )


def _text(rng: random.Random) -> Asked:
    count, n = rng.choice(((1, 1), (1, 2), (3, 1)))
    prompts = [prompt(rng, 5, 60) for _ in range(count)]
    body: dict[str, Any] = {"prompt": prompts if count > 1 else prompts[0], "max_tokens": rng.randint(4, 32), "n": n}
    if rng.random() < 0.3:
        body |= {"echo": True}
        return Asked(kind="text", path=TEXT, body=body, choices=count * n, check=_echoed(prompts, n))
    body |= {"logprobs": rng.randint(0, 5)}
    return Asked(kind="text", path=TEXT, body=body, choices=count * n, check=_with_logprobs)


def _schema(rng: random.Random) -> Asked:
    names = [f"field_{rng.randint(0, 400)}" for _ in range(2)]
    schema = {
        "type": "object",
        "properties": {names[0]: {"enum": ["red", "green"]}, names[1]: {"type": "integer"}},
        "required": list(dict.fromkeys(names)),
        "additionalProperties": False,
    }
    body = {
        "messages": _message("Answer as asked: " + prompt(rng, 5, 20)),
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    return Asked(kind="json_schema", path=CHAT, body=body, check=_of_fields(set(names)))


def _regex(rng: random.Random) -> Asked:
    # Of every two one is known: a cache of grammars has to be right about those it has and those it dropped.
    expression = f"[a-z]{{{rng.randint(2, 9)}}}-{rng.randint(0, 30) if rng.random() < 0.5 else rng.randint(0, 10**6)}"
    kind, body = rng.choice((("guided_regex", expression), ("structured_outputs", {"regex": expression})))
    return Asked(
        kind="regex",
        path=TEXT,
        body={"prompt": prompt(rng, 5, 20), "max_tokens": 40, kind: body},
        check=lambda said: "" if said.finish_reason != "stop" or re.fullmatch(expression, said.text) else "no match",
    )


def _tools(rng: random.Random) -> Asked:
    name = f"look_up_{rng.randint(0, 200)}"
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    function = {"name": name, "description": prompt(rng, 3, 8), "parameters": schema, "strict": True}
    messages = _message("Which city? " + prompt(rng, 3, 30))
    if rng.random() < 0.3:
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": '{"city": "Rome"}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
    choice = rng.choice(("auto", "required", {"type": "function", "function": {"name": name}}))
    body = {
        "messages": messages,
        "max_tokens": 64,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "parallel_tool_calls": rng.random() < 0.5,
    }
    return Asked(kind="tools", path=CHAT, body=body, check=_calls(name, required=choice != "auto"))


def _shared(rng: random.Random) -> Asked:
    messages = [{"role": "system", "content": rng.choice(_SHARED)}, *_message(prompt(rng, 5, 20))]
    return Asked(kind="shared", path=CHAT, body={"messages": messages, "max_tokens": rng.randint(4, 32)})


def _long(rng: random.Random) -> Asked:
    body = {"messages": _message(prompt(rng, *LONG_WORDS)), "max_tokens": LONG_TOKENS, "ignore_eos": True}
    return Asked(kind="long", path=CHAT, body=body)


def _repeating(rng: random.Random) -> Asked:
    text = f"{prompt(rng, 6, 12)}. " * 6
    return Asked(kind="repeating", path=TEXT, body={"prompt": text, "max_tokens": 48, "temperature": 0})


def _bounded(rng: random.Random) -> Asked:
    headers = {rng.choice(("x-sluice-timeout-ms", "x-sluice-ttft-ms")): str(rng.randint(20, 2_000))}
    body = {"messages": _message(prompt(rng, 5, 100)), "max_tokens": 60}
    return Asked(kind="bounded", path=CHAT, body=body, headers=headers)


_MIX: dict[Callable[[random.Random], Asked], int] = {
    _chat: 20, _text: 14, _schema: 8, _regex: 8, _tools: 8, _shared: 12, _long: 10, _repeating: 6, _bounded: 5,
}  # fmt: skip


def drawn(rng: random.Random) -> Asked:
    """The next call of a client that stays to the end."""
    asked = rng.choices(list(_MIX), list(_MIX.values()))[0](rng)
    body = asked.body
    body |= {"model": MODEL, "temperature": body.get("temperature", rng.choice((0, 0.8))), "seed": rng.randint(0, 99)}
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.6:
        body["user"] = f"user {rng.randint(0, 10**6)}"
    if rng.random() < 0.1:
        body["service_tier"] = "flex"
    if rng.random() < 0.1:
        body["priority"] = rng.randint(0, 3)
    return asked


def wide(rng: random.Random) -> Asked:
    """Megabytes of answer: more than any buffer between engine and client takes."""
    body = {
        "model": MODEL, "messages": _message(prompt(rng, 5, 20)), "max_tokens": 60, "ignore_eos": True, "n": 8,
        "logprobs": True, "top_logprobs": 20, "stream": True,
    }  # fmt: skip
    return Asked(kind="wide", path=CHAT, body=body, choices=8)


def refused(rng: random.Random) -> tuple[str, str, bytes, dict[str, str], int]:
    """Method, path, body, headers and status of a request that has to be refused."""
    chat = {"model": MODEL, "messages": _message(prompt(rng, 2, 10)), "max_tokens": 4}
    json_type = {"Content-Type": "application/json"}
    odd: list[tuple[dict[str, Any], int]] = [
        ({"temperature": -rng.random()}, 400),
        ({"n": 17}, 400),
        ({"max_tokens": 10**7}, 400),
        ({f"unknown_{rng.randint(0, 10**6)}": 1}, 400),
        ({"model": f"none-{rng.randint(0, 10**6)}"}, 404),
        ({"messages": []}, 400),
        ({"guided_regex": f"({prompt(rng, 2, 4)}"}, 400),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {"const": 1}}}}},
            400,
        ),
        ({"messages": _message(prompt(rng, 9_000, 9_000))}, 400),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400),
    ]
    whole: list[tuple[str, str, bytes, dict[str, str], int]] = [
        ("POST", CHAT, rng.randbytes(rng.randint(1, 2_000)), json_type, 400),
        ("POST", CHAT, json.dumps(chat).encode()[: rng.randint(1, 60)], json_type, 400),
        ("POST", CHAT, json.dumps(chat).encode(), {**json_type, "Content-Encoding": "gzip"}, 415),
        ("POST", CHAT, b" " * (9 * 2**20), json_type, 413),
        ("GET", CHAT, b"", {}, 405),
        ("POST", f"/v1/none-{rng.randint(0, 10**6)}", b"{}", json_type, 404),
        ("GET", f"/v1/models/none-{rng.randint(0, 10**6)}", b"", {}, 404),
    ]
    if rng.random() < 0.6:
        change, status = rng.choice(odd)
        return "POST", CHAT, json.dumps(chat | change).encode(), json_type, status
    return rng.choice(whole)


def _stopped(body: Mapping[str, Any]) -> Check:
    stops = body.get("stop", ())
    return lambda said: f"a stop string in {said.text!r}" if any(stop in said.text for stop in stops) else ""


def _with_logprobs(said: Said) -> str:
    if not said.logprobs:
        return "no logprobs"
    return "" if all(value <= 0 for value in said.logprobs) else f"logprobs {said.logprobs}"


def _echoed(prompts: list[str], n: int) -> Check:
    del n
    return lambda said: "" if said.text.startswith(tuple(prompts)) else f"no echo in {said.text[:80]!r}"


def _of_fields(names: set[str]) -> Check:
    def check(said: Said) -> str:
        if said.finish_reason != "stop":
            return ""
        try:
            found = json.loads(said.text)
        except ValueError:
            return f"no JSON: {said.text!r}"
        return "" if set(found) == names else f"fields {sorted(found)}"

    return check


def _calls(name: str, *, required: bool) -> Check:
    def check(said: Said) -> str:
        if said.finish_reason != "tool_calls":
            return f"no call: {said.text!r}" if required and said.finish_reason == "stop" and not said.calls else ""
        for called, arguments in said.calls.values():
            if called != name or json.loads(arguments).get("city") not in {"Rome", "Oslo"}:
                return f"{called} {arguments}"
        return ""

    return check
