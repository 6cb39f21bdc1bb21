"""The messages of a conversation: who says what, which tools were called, and what came of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice_engine.bodies import shown, too_many_pieces
from sluice_engine.protocol.body import Fields, Inert, check_text, kind_of
from sluice_engine.protocol.tools import MAX_TOOLS, check_name, function_of

Message = dict[str, object]

# "developer" is OpenAI's newer word for its system message.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_CALL_ID_CHARACTERS = 128


def parse_messages(fields: Fields) -> tuple[Message, ...]:
    """The messages as chat templates read them: role and content, a name where one was given, and tool calls.

    The arguments of a call are JSON's text, as OpenAI writes them.

    Raises:
        InvalidRequest: there are none or too many, or one is not text from a known role, or answers no call before it.
    """
    items = fields.array("messages")
    if items is None:
        fields.missing("messages")
    if not items:
        fields.refuse("messages", "must hold at least one message")
    if (problem := too_many_pieces(items)) is not None:
        fields.refuse("messages", problem)
    called: dict[str, str] = {}
    return tuple(_message(fields, index, item, called) for index, item in enumerate(items))


def uses_tools(messages: Sequence[Mapping[str, object]]) -> int | None:
    """The first message that calls a tool or is a tool's answer."""
    return next(
        (at for at, message in enumerate(messages) if message["role"] == "tool" or "tool_calls" in message), None
    )


def _message(fields: Fields, index: int, item: object, called: dict[str, str]) -> Message:
    """`called`: the calls before it, by their ids, with the functions' names."""
    message = fields.item(f"messages[{index}]", item)
    role = message.required_text("role")
    if role == "function":
        message.refuse("role", 'this value is not supported; its newer form is "tool"', "unsupported_parameter")
    if role not in ROLES:
        message.refuse("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    message.refuse_unsupported(frozenset({"function_call", "audio", "refusal"}))
    message.accept_inert({"annotations": Inert(list)})  # what OpenAI's replies carry comes back in the history
    calls = _calls(message, role)
    speaker = message.text("name")
    parsed: Message = {"role": ROLES[role], "content": _content(message, may_be_missing=bool(calls))}
    if calls:
        parsed["tool_calls"] = calls
        called |= {call_id: function for call_id, function, _ in map(_told, calls)}
    if role == "tool":
        parsed["tool_call_id"] = call_id = _answered(message, called)
        speaker = speaker or called[call_id]
    elif message.value("tool_call_id") is not None:
        message.refuse("tool_call_id", "is allowed only in a message of the role tool")
    if speaker is not None:
        parsed["name"] = speaker
    message.end()
    return parsed


def _calls(message: Fields, role: str) -> list[Message]:
    items = message.array("tool_calls")
    if not items:
        return []
    if role != "assistant":
        message.refuse("tool_calls", "is allowed only in a message of the role assistant")
    if len(items) > MAX_TOOLS:
        message.refuse("tool_calls", f"must hold at most {MAX_TOOLS} calls, not {len(items)}")
    return [_call(message, f"tool_calls[{index}]", item) for index, item in enumerate(items)]


def _call(message: Fields, name: str, item: object) -> Message:
    call = message.item(name, item)
    call_id = _call_id(call, "id")
    function = function_of(call)
    told = {"name": check_name(function, "name"), "arguments": function.required_text("arguments")}
    function.end()
    return {"id": call_id, "type": "function", "function": told}


def _told(call: Message) -> tuple[str, str, str]:
    function = call["function"]
    assert isinstance(function, dict)
    return str(call["id"]), str(function["name"]), str(function["arguments"])


def _answered(message: Fields, called: dict[str, str]) -> str:
    call_id = _call_id(message, "tool_call_id")
    if call_id not in called:
        message.refuse("tool_call_id", f"is the id of no tool call before it: {shown(call_id)}")
    return call_id


def _call_id(fields: Fields, name: str) -> str:
    value = fields.required_text(name)
    if not 1 <= len(value) <= MAX_CALL_ID_CHARACTERS:
        fields.refuse(name, f"must be 1 to {MAX_CALL_ID_CHARACTERS} characters long, not {len(value)}")
    return value


def _content(message: Fields, *, may_be_missing: bool) -> str:
    value = message.value("content")
    if value is None:
        if may_be_missing:
            return ""
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
    part = message.item(name, item)
    kind = part.required_text("type")
    if kind != "text":
        part.unsupported("type", kind)
    text = part.required_text("text")
    part.end()
    return text
