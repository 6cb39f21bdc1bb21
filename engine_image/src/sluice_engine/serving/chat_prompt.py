"""From a conversation and its tools to a prompt: what the model's chat template makes of them. No I/O."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sluice_engine.errors import InvalidRequest
from sluice_engine.protocol.body import UNSUPPORTED
from sluice_engine.protocol.messages import uses_tools
from sluice_engine.protocol.tools import Tool
from sluice_engine.text.spelled import marked
from sluice_engine.text.tokenizer import Tokenizer
from sluice_engine.text.tool_format import ToolFormat, ToolTemplate

_SHORT_ID = 9


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt's token ids, and where it stood in the body."""

    tokens: list[int]
    param: str
    text: str | None = None
    """As it was written, where it was text."""
    is_echoed: bool = False
    """Whether each answer begins with it."""

    def echo(self, tokenizer: Tokenizer) -> str:
        """What an answer begins with."""
        if not self.is_echoed:
            return ""
        return tokenizer.decode(self.tokens) if self.text is None else self.text


def chat_prompt(messages: Sequence[Mapping[str, object]], tools: Sequence[Tool], tokenizer: Tokenizer) -> Prompt:
    """The prompt that the model's chat template makes of a conversation.

    Raises:
        InvalidRequest: the template refuses it, the model has none, or it does not know tools where there are some.
    """
    template, told = tokenizer.chat_template, list(messages)
    used = uses_tools(messages)
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; /v1/completions takes prompts", param="messages", code="no_chat_template"
        )
    if tools or used is not None:
        known = tool_template(tokenizer, "tools" if tools else f"messages[{used}]")
        template, told = known.template, [_as_taught(message, known.form) for message in messages]
    try:
        (told, bodies), mark = marked((told, [tool.body() for tool in tools]), tokenizer.spelled_specials)
    except RecursionError as error:
        raise InvalidRequest.field("messages", "are nested too deep") from error
    except ValueError as error:
        raise InvalidRequest.field("messages", f"cannot be told apart: {error}") from error
    text = template.render(told, tools=bodies or None, clock=time.monotonic)
    tokens = tokenizer.encode(text, add_special=False) if mark is None else tokenizer.encode_pieces(text.split(mark))
    return Prompt(tokens, "messages")


def tool_template(tokenizer: Tokenizer, param: str) -> ToolTemplate:
    """The template that knows tools.

    Raises:
        InvalidRequest: there is none, and why; `param` is what asks for one.
    """
    if isinstance(tokenizer.tools, str):
        raise InvalidRequest.field(param, tokenizer.tools, code=UNSUPPORTED)
    return tokenizer.tools


def _as_taught(message: Mapping[str, object], form: ToolFormat) -> Mapping[str, object]:
    """A message with its calls as the template wants them."""
    changed = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call, form) for call in calls]
    if form.short_ids and "tool_call_id" in message:
        changed["tool_call_id"] = _short(str(message["tool_call_id"]))
    return changed


def _call(call: Mapping[str, object], form: ToolFormat) -> dict[str, object]:
    function = call["function"]
    assert isinstance(function, dict)
    arguments = function["arguments"] if form.arguments_as_text else _parsed(str(function["arguments"]))
    call_id = str(call["id"])
    return {
        **call,
        "id": _short(call_id) if form.short_ids else call_id,
        "function": {**function, "arguments": arguments},
    }


def _parsed(arguments: str) -> object:
    """As an object; what a model wrote that is none goes back to it as it was."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short(call_id: str) -> str:
    """An id as Mistral's templates want it; of one id always the same."""
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID]
