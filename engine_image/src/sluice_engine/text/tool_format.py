"""How a model writes tool calls, found out from its own chat template: a call is rendered, and looked at.

A template is a program, and which of its words are markers is not written anywhere; but what it makes of a conversation
with a call in it is how the model was taught to call. Start reading at `tool_format`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sluice_engine.errors import InvalidRequest
from sluice_engine.text.chat_template import ChatTemplate

Layout = Literal["object", "list", "named"]
Message = Mapping[str, object]

# Stands before the name of a special token in what a model writes: no character at all, by Unicode.
SPECIAL = "\ufdd0"
# Markers that may be special tokens of a tokenizer.
ARGUMENTS_MARK, ID_MARK = "[ARGS]", "[CALL_ID]"

_NAME, _KEY = "sluice_probe", "sluice_key"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "At what."}},
            "required": [_KEY],
        },
    },
}
_USER = {"role": "user", "content": "Look."}
# OpenAI's ids are long, Mistral's nine letters and digits.
_IDS = ("call_0123456789abcdef01234567", "a1b2c3d4e")
_ARGUMENTS = rf'\{{\s*"{_KEY}":\s*"v"\s*\}}'
_OTHER = r'"(?:type|id)":\s*"[^"]*"'
_STRAIGHT = rf'"name":\s*"{_NAME}",\s*"(?P<key>arguments|parameters)":\s*{_ARGUMENTS}'
_OBJECT = rf"\{{\s*(?:{_OTHER},\s*)?{_STRAIGHT}(?:,\s*{_OTHER})?\s*\}}"
_TURNED = rf'\{{\s*"(?P<turned>arguments|parameters)":\s*{_ARGUMENTS},\s*"name":\s*"{_NAME}"\s*\}}'
_ANY = f"(?:{_OBJECT}|{_TURNED})"
_HERMES = re.compile(rf"<tool_call>\s*(?P<list>\[\s*)?{_ANY}\s*(?:\]\s*)?</tool_call>")
_MISTRAL = re.compile(rf"\[TOOL_CALLS\]\s*\[\s*{_ANY}")
_NAMED = re.compile(rf"\[TOOL_CALLS\]\s*{_NAME}(?P<id>\[CALL_ID\][^\[]*)?(?P<mark>\[ARGS\])?\s*{_ARGUMENTS}")
_BARE = re.compile(rf"\s*(?P<tag><\|python_tag\|>)?\s*{_ANY}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """What a call looks like, and what the template wants of one."""

    family: str
    """For people."""
    opening: str
    """Where a call begins."""
    closing: str = ""
    """Where it ends; empty where its end shows."""
    layout: Layout = "object"
    """One object after an opening, a list of them, or the function's name followed by its arguments."""
    key: str = "arguments"
    """Under which name the arguments stand beside the function's."""
    arguments_first: bool = False
    bare: bool = False
    """Whether an answer that begins with an object is a call, without an opening."""
    opened: bool = True
    """Whether the model was taught to write the opening."""
    mark: str = ""
    """What stands between a name and its arguments."""
    parallel: bool = True
    """Whether a conversation may have several calls in one message."""
    arguments_as_text: bool = False
    """Whether the template wants the arguments as JSON's text, and not as an object."""
    short_ids: bool = False
    """Whether the template wants ids of nine letters and digits."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that may be special tokens."""
        return tuple(text for text in (self.opening, self.closing, ARGUMENTS_MARK, ID_MARK) if text)


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """A template that knows tools, how its model calls them, and which of the markers are special tokens."""

    template: ChatTemplate
    form: ToolFormat
    special: Mapping[str, int]
    """Those markers, and their token ids."""

    @property
    def spelled(self) -> dict[int, bytes]:
        """What these tokens stand for where calls are looked for."""
        return {token_id: f"{SPECIAL}{text}".encode() for text, token_id in self.special.items()}


def tool_format(template: ChatTemplate) -> ToolFormat | str:
    """How the model of this template calls tools, or in one sentence why it cannot."""
    told = _rendered(template, [_USER], tools=True)
    if told is None or _KEY not in told:
        return "this model's chat template does not know tools"
    for as_text in (False, True):
        for call_id in _IDS:
            text = _rendered(template, _conversation([call_id], as_text=as_text), tools=True)
            form = None if text is None else _recognised(text, told)
            if text is None or form is None:
                continue
            several = _rendered(template, _conversation([call_id, call_id[::-1]], as_text=as_text), tools=True) or ""
            return replace(
                form,
                parallel=several.count(_NAME) > text.count(_NAME),
                arguments_as_text=as_text,
                short_ids=call_id == _IDS[1],
            )
    return "this model's chat template writes tool calls in a form that is not known here"


def _conversation(call_ids: Sequence[str], *, as_text: bool) -> list[Message]:
    arguments: object = f'{{"{_KEY}": "v"}}' if as_text else {_KEY: "v"}
    calls = [
        {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}} for call_id in call_ids
    ]
    answers = [{"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": "seen"} for call_id in call_ids]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def _rendered(template: ChatTemplate, messages: Sequence[Message], *, tools: bool) -> str | None:
    try:
        return template.render(messages, tools=[_TOOL] if tools else None, clock=time.monotonic)
    except InvalidRequest:
        return None


def _recognised(text: str, told: str) -> ToolFormat | None:
    """`told`: what comes before the call, up to where the assistant's turn begins."""
    if (found := _HERMES.search(text)) is not None:
        layout: Layout = "object" if found["list"] is None else "list"
        form = ToolFormat(family="hermes", opening="<tool_call>", closing="</tool_call>", layout=layout)
    elif (found := _MISTRAL.search(text)) is not None:
        form = ToolFormat(family="mistral", opening="[TOOL_CALLS]", layout="list")
    elif (found := _NAMED.search(text)) is not None:
        return ToolFormat(family="mistral", opening="[TOOL_CALLS]", layout="named", mark=found["mark"] or "")
    # Only at the very beginning of the turn: elsewhere something stands before it that is not known here.
    elif text.startswith(told) and (found := _BARE.match(text, len(told))) is not None:
        form = ToolFormat(family="llama", opening="<|python_tag|>", bare=True, opened=found["tag"] is not None)
    else:
        return None
    return replace(form, key=found["key"] or found["turned"], arguments_first=found["key"] is None)
