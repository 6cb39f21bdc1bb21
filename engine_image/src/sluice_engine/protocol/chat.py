"""`/v1/chat/completions`: messages in; chat completions and their chunks out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sluice_engine.protocol.body import UNSUPPORTED, Fields, Inert, parse_object
from sluice_engine.protocol.generation import Generation, parse_generation
from sluice_engine.protocol.messages import Message, parse_messages
from sluice_engine.protocol.reply import (
    Choice,
    ChunkWriter,
    FinishReason,
    Piece,
    RankedToken,
    ReplyHead,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from sluice_engine.protocol.tools import ToolUse, parse_tool_use

MAX_TOP_LOGPROBS = 20

_INERT = {
    "safety_identifier": Inert(str),
    "prompt_cache_key": Inert(str),
    "prompt_cache_retention": Inert(str),
    "modalities": Inert(list, lambda value: value == ["text"]),
}
_UNSUPPORTED = frozenset({"audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A conversation to go on with."""

    model: str
    messages: tuple[Message, ...]
    generation: Generation
    tool_use: ToolUse | None = None
    """None where nothing may be called."""


def parse_chat(raw: bytes) -> ChatCall:
    """The call in a request body.

    Raises:
        InvalidRequest: with `param` and `code`; nothing has been looked up yet.
    """
    fields = parse_object(raw)
    model = fields.required_text("model")
    messages = parse_messages(fields)
    tool_use = parse_tool_use(fields)
    fields.refuse_unsupported(_UNSUPPORTED)
    fields.accept_inert(_INERT)
    logprobs, top_logprobs = _logprobs(fields)
    generation = parse_generation(fields, logprobs=logprobs, top_logprobs=top_logprobs)
    structure = generation.structure
    if tool_use is not None and structure is not None and structure.kind != "json_schema":
        problem = "is not supported beside tools; a JSON schema is, and any structure where tool_choice is none"
        fields.refuse(structure.param, problem, UNSUPPORTED)
    fields.end()
    return ChatCall(model=model, messages=messages, generation=generation, tool_use=tool_use)


def _logprobs(fields: Fields) -> tuple[bool, int]:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        fields.refuse("top_logprobs", "is allowed only when logprobs is true")
    return wanted, top or 0


class ChatReply:
    """Chat completions: `Reply` in this endpoint's words."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._chunks = ChunkWriter(head, "chat.completion.chunk")

    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        """The role."""
        return self._chunks.choice(_chunk(index, {"role": "assistant", "content": ""}), so_far)

    def piece(self, index: int, piece: Piece, so_far: Usage | None = None) -> bytes:
        """A delta."""
        delta: dict[str, object] = {"content": piece.text} if piece.text or not piece.tool_calls else {}
        if piece.tool_calls:
            delta["tool_calls"] = [self._tool_call(index, call) for call in piece.tool_calls]
        return self._chunks.choice(_chunk(index, delta, self._logprobs(piece.logprobs)), so_far)

    def closing(self, index: int, finish_reason: FinishReason, so_far: Usage | None = None) -> bytes:
        """The reason."""
        return self._chunks.choice(_chunk(index, {}, finish_reason=finish_reason), so_far)

    def usage(self, usage: Usage) -> bytes:
        """The counts."""
        return self._chunks.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        """The completion."""
        return {
            **self._head.fields("chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": self._message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage.body(),
        }

    def _message(self, choice: Choice) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None}
        if not choice.tool_calls:
            return message
        calls = [self._tool_call(choice.index, call) for call in choice.tool_calls]
        for call in calls:
            del call["index"]
        return {**message, "content": choice.text or None, "tool_calls": calls}

    def _tool_call(self, index: int, call: ToolCallDelta) -> dict[str, object]:
        """As a stream has it: the id and the name once, with the beginning."""
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        digest = blake2b(f"{self._head.id}/{index}/{call.index}".encode(), digest_size=12).hexdigest()
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": f"call_{digest}", "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not self._head.logprobs:
            return None
        return {"content": [_token(token) for token in tokens], "refusal": None}


def _chunk(
    index: int,
    delta: dict[str, object],
    logprobs: dict[str, object] | None = None,
    finish_reason: FinishReason | None = None,
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(token: TokenLogprob) -> dict[str, object]:
    return {
        **_ranked(token.taken),
        "top_logprobs": [_ranked(each) for each in token.top],
    }


def _ranked(token: RankedToken) -> dict[str, object]:
    spelled = None if token.spelled is None else list(token.spelled)
    return {"token": token.text, "logprob": token.logprob, "bytes": spelled}
