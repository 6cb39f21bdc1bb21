"""`/tokenize` and `/detokenize`: text or a conversation in, token ids out, and back. Their words are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.protocol.body import parse_object
from sluice_engine.protocol.messages import Message, parse_messages
from sluice_engine.protocol.tools import Tool, parse_tool_use

# As long as any prompt: more ids are no text of one model's length.
MAX_TOKENS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """Text, or messages, to be counted."""

    model: str | None
    prompt: str | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    """Those that the model is told of beside them."""
    add_special: bool
    """Whether what the model expects at a text's start is added; a chat template does so itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall:
    """Token ids to be read."""

    model: str | None
    tokens: tuple[int, ...]


def parse_tokenize(raw: bytes) -> TokenizeCall:
    """The call in a request body.

    Raises:
        InvalidRequest: with `param` and `code`.
    """
    fields = parse_object(raw)
    model, prompt = fields.text("model"), fields.text("prompt")
    if (prompt is None) == (fields.value("messages") is None):
        fields.refuse("prompt", "give exactly one of prompt, messages", "missing_required_parameter")
    messages = parse_messages(fields) if prompt is None else ()
    # As in a chat: what may not be called is not told.
    tool_use = parse_tool_use(fields) if prompt is None else None
    add_special = fields.value("add_special_tokens") is None or fields.flag("add_special_tokens")
    fields.end()
    return TokenizeCall(
        model=model,
        prompt=prompt,
        messages=messages,
        tools=() if tool_use is None else tool_use.tools,
        add_special=add_special,
    )


def parse_detokenize(raw: bytes) -> DetokenizeCall:
    """The call in a request body.

    Raises:
        InvalidRequest: with `param` and `code`; whether the model has such tokens is not known here.
    """
    fields = parse_object(raw)
    model, tokens = fields.text("model"), fields.token_ids("tokens", MAX_TOKENS)
    if tokens is None:
        fields.missing("tokens")
    fields.end()
    return DetokenizeCall(model=model, tokens=tokens)
