"""What a reply is made of, whatever the endpoint: pieces of text, their tokens, ends and usage; and SSE framing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sluice_engine.core.emissions import HELD_TOKEN
from sluice_engine.errors import RequestError

FinishReason = Literal["stop", "length", "tool_calls"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token and its log probability."""

    text: str
    """The token alone; half a character shows as U+FFFD, for which there is `spelled`. Of a special token, its name."""
    spelled: bytes | None
    """What it adds to a text; None of one that stands for no text."""
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token, and the likeliest beside it where they were asked for."""

    taken: RankedToken
    text_offset: int
    """Characters of the answer before it."""
    top: tuple[RankedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A tool call that begins, or more of the arguments of one."""

    index: int
    """Among the calls of its choice."""
    name: str | None = None
    """The function's, where it begins."""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is settled of one choice, with the tokens that made it where they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """Each as a whole."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""

    def body(self) -> dict[str, object]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What every object of one reply repeats."""

    id: str
    model: str
    created_s: int
    """Seconds since 1970, when the call was taken."""
    system_fingerprint: str
    """Changes with the engine's configuration, hence when equal seeds may give other answers."""
    logprobs: bool
    include_usage: bool
    service_tier: str | None = None
    """In which the call is served; None where it asked for none."""

    def fields(self, kind: str) -> dict[str, object]:
        """The fields before `choices`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **({} if self.service_tier is None else {"service_tier": self.service_tier}),
        }


class Reply(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        """The frame before a choice's first text, possibly none; `so_far` where each frame is to say the counts."""
        ...

    def piece(self, index: int, piece: Piece, so_far: Usage | None = None) -> bytes:
        """The frame of a piece of text."""
        ...

    def closing(self, index: int, finish_reason: FinishReason, so_far: Usage | None = None) -> bytes:
        """The frame that ends a choice."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The frame of the counts, after all choices."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        """The body of a reply that is not streamed."""
        ...


class ChunkWriter:
    """Frames of one stream: the part that all of them share is encoded once."""

    def __init__(self, head: ReplyHead, kind: str) -> None:
        shared = json.dumps(head.fields(kind), ensure_ascii=False, separators=(",", ":"))
        self._start = f'data: {shared[:-1]},"choices":['
        # With include_usage every chunk but the last says null, as OpenAI documents it.
        self._end = '],"usage":null}\n\n' if head.include_usage else "]}\n\n"

    def choice(self, choice: Mapping[str, object], so_far: Usage | None = None) -> bytes:
        """A chunk with one choice, and with the counts so far where they are given."""
        text = json.dumps(choice, ensure_ascii=False, separators=(",", ":"))
        return f"{self._start}{text}{self._end if so_far is None else _with(so_far)}".encode()

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices."""
        return f"{self._start}{_with(usage)}".encode()


def _with(usage: Usage) -> str:
    """How a chunk with counts ends."""
    return f'],"usage":{json.dumps(usage.body(), separators=(",", ":"))}}}\n\n'


def held_frame(index: int) -> bytes:
    """A token of a choice came, and what it says is not settled: a comment, which clients pass over."""
    return b'%b{"index":%d}\n\n' % (HELD_TOKEN, index)


def error_frame(error: RequestError) -> bytes:
    """An error after the headers: the stream ends with it, and without [DONE]."""
    return f"data: {json.dumps(error.body(), ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
