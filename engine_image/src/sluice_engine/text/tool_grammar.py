"""The grammar of answers that call tools: how calls look, and what their arguments follow.

Where a call is required the answer is nothing else. Where it is not, anything may be written until a call is opened;
from there on to its end the grammar has the word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise

from sluice_engine.protocol.structure import WHITESPACE, Structure
from sluice_engine.protocol.tools import Tool, ToolUse
from sluice_engine.text.tool_format import ToolFormat

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_ANY_TEXT = r"/(.|\n)*/"
_NAMED, _JSON = "// ", ": %json "
# Of an answer that could begin with a call without an opening: text that does not begin like one.
_NO_OBJECT = r"/\s*([^{\s](.|\n)*)?/"


def tool_grammar(
    form: ToolFormat, special: Mapping[str, int], use: ToolUse, answer: Structure | None = None
) -> Structure | None:
    """What the answers of a call have to follow; None where the model is free.

    A model that need not call may still be held to a function's schema once it does: where one is strict. `answer`: the
    schema of an answer that is no call; a format whose calls are bare objects has no room for one.

    `special`: those markers that are special tokens.
    """
    if not use.required and not any(tool.strict for tool in use.callable) and answer is None:
        return None
    several = use.parallel and form.parallel
    if use.required or answer is not None:
        lines = _alone(form, special, several=several)
    else:
        lines = _free(form, special, several=several)
    if answer is not None and not use.required:
        lines[0] += " | answer"
        lines += [f"{_NAMED}{answer.param}", f"answer{_JSON}{_schema(json.loads(answer.source))}"]
    lines += [
        f"rest: {_rest(form, special, several=several)}",
        f"object: {' | '.join(f'call_{index}' for index in range(len(use.callable)))}",
    ]
    for index, tool in enumerate(use.callable):
        schema = tool.parameters if use.required or tool.strict else _ANY_OBJECT
        lines += [
            f"call_{index}: {_call(form, special, tool, f'arguments_{index}')}",
            f"{_NAMED}the parameters of {tool.name}",
            f"arguments_{index}{_JSON}{_schema(schema)}",
        ]
    return Structure("tools", "\n".join(lines), "tools")


def schemas_of(structure: Structure) -> Iterator[tuple[str, str]]:
    """The schemas of a grammar that `tool_grammar` made, each by what it is."""
    for above, line in pairwise(structure.source.splitlines()):
        if above.startswith(_NAMED):
            yield above.removeprefix(_NAMED), line.partition(_JSON)[2]


def _alone(form: ToolFormat, special: Mapping[str, int], *, several: bool) -> list[str]:
    opened = f"{_marker(form.opening, special)} rest" if form.opened else "rest"
    if not several or form.layout == "list":
        return [f"start: {opened}"]
    return [f"start: one ({_between(form)} one)*", f"one: {opened}"]


def _free(form: ToolFormat, special: Mapping[str, int], *, several: bool) -> list[str]:
    first, bare = (_NO_OBJECT, " | object") if form.bare else (_ANY_TEXT, "")
    lines = [f"FIRST: {first}", f"TEXT: {_ANY_TEXT}"]
    if form.opening in special:
        opening = _marker(form.opening, special)
        more = f"({opening} rest TEXT)*" if several else f"({opening} rest)?"
        return [f"start: FIRST {more}{bare}", *lines]
    lead = f"TEXT {_marker(form.opening, special)}"
    more = "(later rest)* TEXT" if several else ""
    return [
        f"start: FIRST | opened rest {more}{bare}",
        *lines,
        f"opened[lazy]: FIRST {_marker(form.opening, special)}",
        f"later[lazy]: {lead}",
    ]


def _rest(form: ToolFormat, special: Mapping[str, int], *, several: bool) -> str:
    """What follows an opening."""
    if form.layout == "list":
        more = ' ("," " "? object)*' if several else ""
        calls = f'" "? "[" object{more} "]"'
    else:
        calls = '"\\n"? object "\\n"?' if form.closing else "object"
    return f"{calls} {_marker(form.closing, special)}" if form.closing else calls


def _between(form: ToolFormat) -> str:
    return '"; "' if form.bare and not form.opened else '"\\n"' if form.closing else ""


def _call(form: ToolFormat, special: Mapping[str, int], tool: Tool, arguments: str) -> str:
    name = f'"name": {json.dumps(tool.name)}'
    if form.layout == "named":
        return " ".join([json.dumps(tool.name), *([_marker(form.mark, special)] if form.mark else []), arguments])
    if form.arguments_first:
        before, after = f'{{"{form.key}": ', f", {name}}}"
    else:
        before, after = f'{{{name}, "{form.key}": ', "}"
    return f"{json.dumps(before)} {arguments} {json.dumps(after)}"


def _marker(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else json.dumps(text)


def _schema(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
