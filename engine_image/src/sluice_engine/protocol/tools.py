"""The functions that a model may call, and whether it must: OpenAI's `tools`, `tool_choice`, `parallel_tool_calls`.

Nothing is looked up here: whether the model's template knows tools, and whether a schema compiles, is found out later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sluice_engine.bodies import shown
from sluice_engine.protocol.body import UNSUPPORTED, Fields, kind_of
from sluice_engine.protocol.structure import MAX_SOURCE_BYTES

# OpenAI's own bounds on their number and their names.
MAX_TOOLS = 128
NAME_PATTERN = "[a-zA-Z0-9_-]{1,64}"
# All of them together, as JSON: some 60,000 tokens, which is more than most prompts may have.
MAX_TOOLS_BYTES = 256 * 1024
# Objects and arrays in each other, of one tool. Llama's templates write each level on lines of its own, indented: of a
# short body that nests deep they make a prompt of any length.
MAX_DEPTH = 64
_NAME = re.compile(NAME_PATTERN)
CHOICES = ("none", "auto", "required")
# What was there before tools were, and what says the same now.
_LEGACY = {"functions": "tools", "function_call": "tool_choice"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function."""

    name: str
    description: str | None
    parameters: Mapping[str, object]
    """A JSON schema of an object."""
    strict: bool = False
    """Whether the arguments have to follow it."""

    def body(self) -> dict[str, object]:
        """As chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one call."""

    tools: tuple[Tool, ...]
    """All that the model is told of."""
    callable: tuple[Tool, ...]
    """Those that it may call now: all, or the one that was chosen by name."""
    required: bool = False
    """Whether the answer has to be a call."""
    parallel: bool = True
    """Whether one answer may have several."""


def parse_tool_use(fields: Fields) -> ToolUse | None:
    """The tools of a body; None when it has none, or none may be called.

    Raises:
        InvalidRequest: a tool is none, there are too many, or one is chosen that is not there.
    """
    for name, instead in _LEGACY.items():
        if fields.value(name) not in (None, [], "none", "auto"):
            fields.refuse(name, f"this parameter is not supported; its newer form is: give {instead}", UNSUPPORTED)
    tools = parse_tools(fields)
    parallel = fields.value("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    choice, named = _choice(fields, tools)
    if not tools or choice == "none":
        return None
    if named is not None:
        return ToolUse(tools=tools, callable=(named,), required=True, parallel=False)
    return ToolUse(tools=tools, callable=tools, required=choice == "required", parallel=parallel)


def parse_tools(fields: Fields) -> tuple[Tool, ...]:
    """The tools, whatever may be done with them.

    Raises:
        InvalidRequest: as `parse_tool_use`.
    """
    items = fields.array("tools") or []
    if len(items) > MAX_TOOLS:
        fields.refuse("tools", f"must hold at most {MAX_TOOLS} tools, not {len(items)}")
    for index, item in enumerate(items):
        _check_depth(fields, f"tools[{index}]", item)
    size = sum(_num_bytes(fields, f"tools[{index}]", item) for index, item in enumerate(items))
    if size > MAX_TOOLS_BYTES:
        fields.refuse("tools", f"must be at most {MAX_TOOLS_BYTES} bytes together, not {size}")
    tools = tuple(_tool(fields, f"tools[{index}]", item) for index, item in enumerate(items))
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if first.setdefault(tool.name, index) != index:
            problem = f"is the name of tools[{first[tool.name]}] already: {shown(tool.name)}"
            fields.refuse(f"tools[{index}].function.name", problem)
    return tools


def check_name(fields: Fields, name: str) -> str:
    """A function's name, which must be there.

    Raises:
        InvalidRequest: it is missing, or none.
    """
    value = fields.required_text(name)
    if not _NAME.fullmatch(value):
        fields.refuse(name, f"must be 1 to 64 letters, digits, _ or -, not {shown(value)}")
    return value


def function_of(fields: Fields) -> Fields:
    """The fields under `function` of an object of that type; it must hold nothing that was not read.

    Raises:
        InvalidRequest: it is of another type, or holds more.
    """
    kind = fields.required_text("type")
    if kind != "function":
        fields.unsupported("type", kind)
    function = fields.section("function")
    if function is None:
        fields.missing("function")
    fields.end()
    return function


def _check_depth(fields: Fields, name: str, item: object) -> None:
    level = [item]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for each in level if isinstance(each, dict) for inner in each.values()] + [
            inner for each in level if isinstance(each, list) for inner in each
        ]
    if level:
        fields.refuse(name, f"must be nested at most {MAX_DEPTH} levels deep")


def _num_bytes(fields: Fields, name: str, value: object) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        fields.refuse(name, "is not valid Unicode: it has half a surrogate pair")


def _tool(fields: Fields, name: str, item: object) -> Tool:
    function = function_of(fields.item(name, item))
    parsed = Tool(
        check_name(function, "name"), function.text("description"), _parameters(function), function.flag("strict")
    )
    function.end()
    return parsed


def _parameters(function: Fields) -> Mapping[str, object]:
    value = function.value("parameters")
    if value is None:
        # OpenAI: a function without parameters.
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        function.refuse("parameters", f"must be a JSON schema, not {kind_of(value)}", "invalid_type")
    if value.get("type", "object") != "object":
        function.refuse("parameters", f'must be a schema of the type "object", not {shown(value["type"])}')
    schema = value if "type" in value else {**value, "type": "object"}
    if (size := _num_bytes(function, "parameters", schema)) > MAX_SOURCE_BYTES:
        function.refuse("parameters", f"must be at most {MAX_SOURCE_BYTES} bytes, not {size}")
    return schema


def _choice(fields: Fields, tools: tuple[Tool, ...]) -> tuple[str, Tool | None]:
    value = fields.value("tool_choice")
    if value is None:
        return "auto", None
    if isinstance(value, str):
        if value not in CHOICES:
            fields.refuse("tool_choice", f"must be {', '.join(CHOICES)} or an object, not {shown(value)}")
        if value == "required" and not tools:
            fields.refuse("tool_choice", "is allowed only when tools are given")
        return value, None
    choice = fields.section("tool_choice")
    assert choice is not None
    function = function_of(choice)
    name = check_name(function, "name")
    function.end()
    named = next((tool for tool in tools if tool.name == name), None)
    if named is None:
        function.refuse("name", f"is none of the tools: {shown(name)}")
    return "required", named
