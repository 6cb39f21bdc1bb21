"""Pieces of JSON schemas as this API's documents use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_engine.protocol.tools import NAME_PATTERN

Schema = dict[str, Any]

FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def reference(name: str) -> Schema:
    """One of the document's own schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def an_object(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """An object of these fields and no others, as the parsers read it."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return schema | ({"required": list(required)} if required else {})


def a_reply(properties: Mapping[str, Schema]) -> Schema:
    """An object of a reply: these fields are always there, and others may come one day."""
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def optional(properties: Mapping[str, Schema]) -> Schema:
    """Fields that may be left out, which null says as well."""
    return {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in properties.items()}


def integer(low: int, high: int) -> Schema:
    """An integer within the bounds."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    """A number within the bounds."""
    return {"type": "number", "minimum": low, "maximum": high}
