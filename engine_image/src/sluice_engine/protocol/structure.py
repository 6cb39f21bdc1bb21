"""What an answer must look like: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

Nothing is compiled here: whether a grammar means anything is found out by `grammars`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from sluice_engine.bodies import shown
from sluice_engine.protocol.body import UNSUPPORTED, Fields, check_text, is_kind, kind_of

Kind = Literal["json_schema", "regex", "choice", "grammar", "tools"]

# A grammar of this size compiles within a fraction of a second, however it is written; a longer one could nest so deep
# that the compiler, which recurses, runs out of any stack.
MAX_SOURCE_BYTES = 64 * 1024
MAX_CHOICES_OF_TEXT = 1000
# A small model that may write any white space writes nothing else now and then.
WHITESPACE = r"[ \t\n\r]{0,8}"
_ANY_OBJECT = json.dumps({"type": "object"})
_KINDS: dict[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class Structure:
    """One grammar, as it was written."""

    kind: Kind
    source: str
    """A JSON schema, a regular expression, a JSON list of texts, or a grammar in Lark's or llama.cpp's notation.

    Of tools: a grammar in Lark's, where a function's name stands as a comment above what its arguments follow.
    """
    param: str
    """Where it stands in the body, for errors."""


def parse_structure(fields: Fields) -> Structure | None:
    """The one structure that a body asks for; None when it asks for none.

    Raises:
        InvalidRequest: several at once, one of no known kind, or one that is too large.
    """
    found = [
        structure
        for structure in (
            _response_format(fields),
            _structured_outputs(fields),
            *(_structure(fields, f"guided_{name}", kind) for name, kind in _KINDS.items()),
        )
        if structure is not None
    ]
    if len(found) > 1:
        fields.refuse(found[1].param, f"is one structure too many: {found[0].param} says already what is to come")
    return found[0] if found else None


def _response_format(fields: Fields) -> Structure | None:
    section = fields.section("response_format")
    if section is None:
        return None
    kind = section.required_text("type")
    structure = None
    if kind == "json_object":
        structure = Structure("json_schema", _ANY_OBJECT, "response_format")
    elif kind == "json_schema":
        schema = section.section("json_schema")
        if schema is None:
            section.missing("json_schema")
        schema.required_text("name")
        schema.text("description")
        # The grammar is the schema, so that an answer is strict whatever this says.
        schema.flag("strict")
        structure = _structure(schema, "schema", "json_schema")
        if structure is None:
            structure = Structure("json_schema", _ANY_OBJECT, schema.path("schema"))
        schema.end()
    elif kind != "text":
        section.refuse("type", f"must be text, json_object or json_schema, not {shown(kind)}", UNSUPPORTED)
    section.end()
    return structure


def _structured_outputs(fields: Fields) -> Structure | None:
    section = fields.section("structured_outputs")
    if section is None:
        return None
    found = [structure for name, kind in _KINDS.items() if (structure := _structure(section, name, kind)) is not None]
    if section.flag("json_object"):
        found.append(Structure("json_schema", _ANY_OBJECT, section.path("json_object")))
    section.end()
    if len(found) != 1:
        fields.refuse(
            "structured_outputs", f"must hold one of json, regex, choice, grammar, json_object, not {len(found)}"
        )
    return found[0]


def _structure(fields: Fields, name: str, kind: Kind) -> Structure | None:
    value = fields.value(name)
    if value is None:
        return None
    if kind == "json_schema":
        source = _schema(fields, name, value)
    elif kind == "choice":
        source = _texts(fields, name, value)
    else:
        source = fields.text(name) or ""
    if not source:
        fields.refuse(name, "must not be empty")
    if (size := len(source.encode("utf-8", "surrogatepass"))) > MAX_SOURCE_BYTES:
        fields.refuse(name, f"must be at most {MAX_SOURCE_BYTES} bytes, not {size}")
    return Structure(kind, source, fields.path(name))


def _schema(fields: Fields, name: str, value: object) -> str:
    """As an object, or as JSON's text of one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        fields.refuse(name, f"must be a JSON schema, not {kind_of(value)}", "invalid_type")
    try:
        return json.dumps(value)
    except RecursionError:
        fields.refuse(name, "is nested too deep")


def _texts(fields: Fields, name: str, value: object) -> str:
    if not isinstance(value, list):
        fields.refuse(name, f"must be an array of strings, not {kind_of(value)}", "invalid_type")
    if not 1 <= len(value) <= MAX_CHOICES_OF_TEXT:
        fields.refuse(name, f"must hold 1 to {MAX_CHOICES_OF_TEXT} texts, not {len(value)}")
    for index, text in enumerate(value):
        if not is_kind(text, str) or not text:
            fields.refuse(f"{name}[{index}]", "must be a string that is not empty", "invalid_type")
        check_text(text, fields.path(f"{name}[{index}]"))
    return json.dumps(value)
