"""Answers of the soaked pod, streamed or whole, put together choice by choice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Said:
    """One choice of an answer, streamed or whole."""

    text: str = ""
    finish_reason: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name and arguments by index."""
    logprobs: list[float] = field(default_factory=list)


async def streamed(response: aiohttp.ClientResponse) -> tuple[str, dict[int, Said], dict[str, Any]]:
    """How a stream ended (a code; empty: well), its choices and its usage."""
    choices: dict[int, Said] = {}
    usage: dict[str, Any] = {}
    done = ""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            done = "done"
            continue
        event = json.loads(payload)
        if "error" in event:
            return str(event["error"]["code"]), choices, usage
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            said = choices.setdefault(choice["index"], Said())
            _add(said, choice, choice.get("delta") or {"content": choice.get("text")})
    return "" if done else "no [DONE]", choices, usage


def whole(body: dict[str, Any]) -> tuple[dict[int, Said], dict[str, Any]]:
    """The choices and the usage of an answer in one piece."""
    choices: dict[int, Said] = {}
    for choice in body["choices"]:
        _add(choices.setdefault(choice["index"], Said()), choice, choice.get("message") or {"content": choice["text"]})
    return choices, body["usage"]


def _add(said: Said, choice: dict[str, Any], message: dict[str, Any]) -> None:
    said.text += message.get("content") or ""
    said.finish_reason = choice.get("finish_reason") or said.finish_reason
    for place, call in enumerate(message.get("tool_calls") or ()):
        parts = said.calls.setdefault(call.get("index", place), ["", ""])
        for number, part in enumerate(("name", "arguments")):
            parts[number] += call["function"].get(part) or ""
    logprobs = choice.get("logprobs") or {}
    said.logprobs += [token["logprob"] for token in logprobs.get("content") or ()]
    said.logprobs += logprobs.get("token_logprobs") or ()
