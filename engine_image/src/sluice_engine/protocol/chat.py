"""`/v1/chat/completions`: messages in; chat completions and their chunks out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice_engine.protocol.body import Fields, Inert, check_text, kind_of, parse_object, shown
from sluice_engine.protocol.generation import Generation, parse_generation
from sluice_engine.protocol.reply import (
    Choice,
    ChunkWriter,
    FinishReason,
    Piece,
    RankedToken,
    ReplyHead,
    TokenLogprob,
    Usage,
)

MAX_TOP_LOGPROBS = 20
# A model knows three roles; "developer" is OpenAI's newer word for its system message.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_INERT = {
    "safety_identifier": Inert(str),
    "prompt_cache_key": Inert(str),
    "prompt_cache_retention": Inert(str),
    "parallel_tool_calls": Inert(bool),
    "tools": Inert(list, lambda value: not value),
    "functions": Inert(list, lambda value: not value),
    "tool_choice": Inert(str, lambda value: value in {"none", "auto"}),
    "function_call": Inert(str, lambda value: value in {"none", "auto"}),
    "modalities": Inert(list, lambda value: value == ["text"]),
}
_UNSUPPORTED = frozenset({"audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation"})
# With an object in them, these two choose a tool: not a wrong type, but a thing that is not done here.
_OBJECT_CHOOSES_A_TOOL = ("tool_choice", "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A conversation to go on with."""

    model: str
    messages: tuple[dict[str, str], ...]
    """role, content, and name where it was given: what chat templates read."""
    generation: Generation


def parse_chat(raw: bytes) -> ChatCall:
    """The call in a request body.

    Raises:
        InvalidRequest: with `param` and `code`; nothing has been looked up yet.
    """
    fields = parse_object(raw)
    model = fields.required_text("model")
    messages = parse_messages(fields)
    for name in _OBJECT_CHOOSES_A_TOOL:
        if isinstance(fields.value(name), dict):
            fields.unsupported(name)
    fields.refuse_unsupported(_UNSUPPORTED)
    fields.accept_inert(_INERT)
    logprobs, top_logprobs = _logprobs(fields)
    generation = parse_generation(fields, logprobs=logprobs, top_logprobs=top_logprobs)
    fields.end()
    return ChatCall(model=model, messages=messages, generation=generation)


def parse_messages(fields: Fields) -> tuple[dict[str, str], ...]:
    """The messages, each with a role and text.

    Raises:
        InvalidRequest: there are none, or one is not text from a known role.
    """
    items = fields.array("messages")
    if items is None:
        fields.missing("messages")
    if not items:
        fields.refuse("messages", "must hold at least one message")
    return tuple(_message(fields, index, item) for index, item in enumerate(items))


def _message(fields: Fields, index: int, item: object) -> dict[str, str]:
    name = f"messages[{index}]"
    if not isinstance(item, dict):
        fields.refuse(name, f"must be an object, not {kind_of(item)}", "invalid_type")
    message = Fields(item, fields.path(name))
    role = message.required_text("role")
    if role in {"tool", "function"}:
        message.unsupported("role", role)
    if role not in ROLES:
        message.refuse("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    message.refuse_unsupported(frozenset({"tool_calls", "function_call", "tool_call_id", "audio", "refusal"}))
    message.accept_inert({"annotations": Inert(list)})  # what OpenAI's replies carry comes back in the history
    parsed = {"role": ROLES[role], "content": _content(message)}
    speaker = message.text("name")
    if speaker is not None:
        parsed["name"] = speaker
    message.end()
    return parsed


def _content(message: Fields) -> str:
    value = message.value("content")
    if value is None:
        message.missing("content")
    if isinstance(value, str):
        check_text(value, message.path("content"))
        return value
    if not isinstance(value, list):
        message.refuse("content", f"must be a string or an array of parts, not {kind_of(value)}", "invalid_type")
    if not value:
        message.refuse("content", "must hold at least one part")
    return "\n".join(_part(message, f"content[{index}]", part) for index, part in enumerate(value))


def _part(message: Fields, name: str, item: object) -> str:
    if not isinstance(item, dict):
        message.refuse(name, f"must be an object, not {kind_of(item)}", "invalid_type")
    part = Fields(item, message.path(name))
    kind = part.required_text("type")
    if kind != "text":
        part.unsupported("type", kind)
    text = part.required_text("text")
    part.end()
    return text


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

    def opening(self, index: int) -> bytes:
        """The role."""
        return self._chunks.choice(_chunk(index, {"role": "assistant", "content": ""}))

    def piece(self, index: int, piece: Piece) -> bytes:
        """A delta."""
        return self._chunks.choice(_chunk(index, {"content": piece.text}, self._logprobs(piece.logprobs)))

    def closing(self, index: int, finish_reason: FinishReason) -> bytes:
        """The reason."""
        return self._chunks.choice(_chunk(index, {}, finish_reason=finish_reason))

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
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage.body(),
        }

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
