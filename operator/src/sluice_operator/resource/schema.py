"""What the API server does to a manifest, offline: defaults, types and bounds, unknown fields, and the CEL rules.

Owns reading a structural OpenAPI schema (the CRD's own) and applying it to one object. Texts follow the API server's,
so that a problem reads the same here and from `kubectl apply`. Knows no file and no field of ours by name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sluice_operator.resource.cel import CelError, compile_rule

Schema = Mapping[str, Any]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
_INVALID = "Invalid value"


def version_schema(crd: Mapping[str, Any], api_version: str) -> Schema | None:
    """The schema that the CRD has for `group/version`; None when it has none."""
    group, _, name = api_version.partition("/")
    if group != crd["spec"]["group"]:
        return None
    found = [version for version in crd["spec"]["versions"] if version["name"] == name]
    return found[0]["schema"]["openAPIV3Schema"] if found else None


def api_versions(crd: Mapping[str, Any]) -> list[str]:
    """The `group/version` of every version that the CRD serves."""
    spec = crd["spec"]
    return [f"{spec['group']}/{version['name']}" for version in spec["versions"] if version["served"]]


def with_defaults(schema: Schema, value: Any) -> Any:  # noqa: ANN401  # JSON has no narrower type
    """A copy of `value` with every default of the schema filled in; null counts as absent where there is a default."""
    if isinstance(value, dict):
        result = dict(value)
        for name, child in schema.get("properties", {}).items():
            if "default" in child and result.get(name) is None:
                result[name] = copy.deepcopy(child["default"])
            if name in result:
                result[name] = with_defaults(child, result[name])
        return result
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def unknown_fields(schema: Schema, value: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401  # JSON
    """Problems of fields that the schema does not have, as strict decoding tells them."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, child in value.items():
            below = f"{path}.{name}" if path else name
            if name in properties:
                if below == "metadata":
                    continue  # the API server's own type
                yield from unknown_fields(properties[name], child, below)
            elif "additionalProperties" in schema:
                yield from unknown_fields(schema["additionalProperties"], child, below)
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f'unknown field "{below}"'
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(schema.get("items", {}), item, f"{path}[{index}]")


def problems(schema: Schema, value: Any, old: Any = None) -> list[str]:  # noqa: ANN401  # JSON
    """Everything that is wrong with a defaulted object; rules about a change (`oldSelf`) need the `old` object."""
    found = [*unknown_fields(schema, value), *_violations(schema, value, "")]
    # Rules read fields whose type they rely on: like the API server, say what is wrong with the types first.
    return found or list(_broken_rules(schema, value, old, ""))


def rules(schema: Schema, path: str = "") -> Iterator[tuple[str, Mapping[str, str]]]:
    """Every CEL rule with the path of the value it is evaluated on."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path, rule
    for name, child in schema.get("properties", {}).items():
        yield from rules(child, f"{path}.{name}" if path else name)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield from rules(schema[key], f"{path}[]")


def _violations(schema: Schema, value: Any, path: str) -> Iterator[str]:  # noqa: ANN401, C901  # JSON; one branch a type
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield f"{path}: {_INVALID}: {_shown(value)}: {path} in body must be an integer or a string"
            return
    elif kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        shown = f'"{_type_name(value)}"'
        yield f"{path}: {_INVALID}: {shown}: {path} in body must be of type {kind}: {shown}"
        return
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(f'"{item}"' for item in schema["enum"])
        yield f"{path}: Unsupported value: {json.dumps(value)}: supported values: {supported}"
    if isinstance(value, str):
        yield from _string_violations(schema, value, path)
    elif isinstance(value, (int, float)):
        yield from _number_violations(schema, value, path)
    elif isinstance(value, dict):
        yield from _object_violations(schema, value, path)
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{path}: Too many: {len(value)}: must have at most {schema['maxItems']} items"
        for index, item in enumerate(value):
            yield from _violations(schema.get("items", {}), item, f"{path}[{index}]")


def _number_violations(schema: Schema, value: float, path: str) -> Iterator[str]:
    if "minimum" in schema and value < schema["minimum"]:
        bound = f"greater than or equal to {schema['minimum']}"
        yield f"{path}: {_INVALID}: {value}: {path} in body should be {bound}"
    if "maximum" in schema and value > schema["maximum"]:
        bound = f"less than or equal to {schema['maximum']}"
        yield f"{path}: {_INVALID}: {value}: {path} in body should be {bound}"


def _string_violations(schema: Schema, value: str, path: str) -> Iterator[str]:
    if len(value) > schema.get("maxLength", len(value)):
        yield f"{path}: Too long: may not be more than {schema['maxLength']} bytes"
    if len(value) < schema.get("minLength", 0):
        bound = f"at least {schema['minLength']} chars long"
        yield f"{path}: {_INVALID}: {json.dumps(value)}: {path} in body should be {bound}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {_INVALID}: {json.dumps(value)}: {path} in body should match '{schema['pattern']}'"


def _object_violations(schema: Schema, value: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: Required value" if path else f"{name}: Required value"
    if len(value) > schema.get("maxProperties", len(value)):
        yield f"{path}: Too many: {len(value)}: must have at most {schema['maxProperties']} items"
    for name, item in value.items():
        child = properties.get(name, schema.get("additionalProperties"))
        if child:
            yield from _violations(child, item, f"{path}.{name}" if path else name)


def _broken_rules(schema: Schema, value: Any, old: Any, path: str) -> Iterator[str]:  # noqa: ANN401  # JSON
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        try:
            holds = compile_rule(rule["rule"])({"self": value, "oldSelf": old})
        except CelError as error:
            yield f"{path or '<root>'}: {_INVALID}: rule {rule['rule']!r} failed: {error}"
            continue
        if not holds:
            where = (path + rule.get("fieldPath", "")).lstrip(".") or "<root>"
            yield f"{where}: {_INVALID}: {rule['message']}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, item in value.items():
            child = properties.get(name, schema.get("additionalProperties"))
            if child:
                before = old.get(name) if isinstance(old, dict) else None
                yield from _broken_rules(child, item, before, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), item, None, f"{path}[{index}]")


def _shown(value: Any) -> str:  # noqa: ANN401  # JSON
    return f'"{_type_name(value)}"'


def _type_name(value: Any) -> str:  # noqa: ANN401  # JSON
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")
