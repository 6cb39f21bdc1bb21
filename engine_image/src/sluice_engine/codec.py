"""Frozen dataclasses in and out of JSON, strictly: an unknown key, a missing key or a wrong type is an error by name.

One small codec serves `engine.json`, `gate.json`, `live.json` and `/state`, so writer and reader share one type.
Supported field types: bool, int, float, str, `Literal`, `X | None`, `tuple[X, ...]`, `dict[str, X]` and dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from sluice_engine.errors import InvalidConfig

T = TypeVar("T")


def encode(value: object) -> Any:  # noqa: ANN401  # JSON has no narrower type
    """`value` as JSON-ready lists, dicts and scalars; a dataclass keeps the order of its fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(cls: type[T], data: object, where: str, *, ignore_unknown: bool = False) -> T:
    """An instance of dataclass `cls` from parsed JSON.

    `ignore_unknown` is for `/state`, whose readers accept fields that a newer writer added.

    Raises:
        InvalidConfig: a key is unknown or missing, or a value has the wrong type; `where` prefixes the field's path.
    """
    return typing.cast("T", _decode(cls, data, where, ignore_unknown))


def to_json(value: object) -> str:
    """Canonical JSON: equal values give equal text, hence equal hashes."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def from_json(cls: type[T], text: str | bytes, where: str) -> T:
    """The inverse of `to_json`.

    Raises:
        InvalidConfig: not JSON, or not a `cls`.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidConfig(where, f"is not JSON: {error}") from error
    return decode(cls, data, where)


def digest(value: object) -> str:
    """Ten hex digits that name this content, short enough for an object's name."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:10]


@functools.cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _field_types(cls: type) -> dict[str, tuple[Any, bool]]:
    """Field name → (resolved type, has a default)."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: (
            hints[field.name],
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


def _decode(kind: Any, data: object, where: str, ignore_unknown: bool) -> object:  # noqa: ANN401, FBT001
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type", kind), data, where, ignore_unknown)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        inner = next(arg for arg in args if arg is not type(None))
        return None if data is None else _decode(inner, data, where, ignore_unknown)
    if origin is typing.Literal:
        if data not in args:
            raise InvalidConfig(where, f"must be one of {', '.join(map(str, args))}, not {data!r}")
        return data
    if origin is tuple:
        return _decode_tuple(args, data, where, ignore_unknown)
    if origin is dict:
        if not isinstance(data, dict):
            raise InvalidConfig(where, f"must be an object, not {_kind_of(data)}")
        return {key: _decode(args[1], item, f"{where}.{key}", ignore_unknown) for key, item in data.items()}
    return _decode_scalar(kind, data, where)


def _decode_tuple(args: tuple[Any, ...], data: object, where: str, ignore_unknown: bool) -> object:  # noqa: FBT001
    if not isinstance(data, list):
        raise InvalidConfig(where, f"must be a list, not {_kind_of(data)}")
    kinds = (args[0],) * len(data) if args[-1] is Ellipsis else args
    if len(data) != len(kinds):
        raise InvalidConfig(where, f"must have {len(kinds)} items, not {len(data)}")
    return tuple(
        _decode(kind, item, f"{where}[{i}]", ignore_unknown)
        for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )


def _decode_dataclass(cls: type, data: object, where: str, ignore_unknown: bool) -> object:  # noqa: FBT001
    if not isinstance(data, dict):
        raise InvalidConfig(where, f"must be an object, not {_kind_of(data)}")
    fields = _field_types(cls)
    if not ignore_unknown and (unknown := sorted(data.keys() - fields.keys())):
        raise InvalidConfig(f"{where}.{unknown[0]}", f"is not a known field; known are {', '.join(fields)}")
    missing = [name for name, (_, optional) in fields.items() if not optional and name not in data]
    if missing:
        raise InvalidConfig(f"{where}.{missing[0]}", "is missing")
    values = {
        name: _decode(kind, data[name], f"{where}.{name}", ignore_unknown)
        for name, (kind, _) in fields.items()
        if name in data
    }
    return cls(**values)


def _decode_scalar(kind: object, data: object, where: str) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(kind, type) or not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        name = getattr(kind, "__name__", str(kind))
        raise InvalidConfig(where, f"must be of type {name}, not {_kind_of(data)}")
    return data


def _kind_of(data: object) -> str:
    return "null" if data is None else type(data).__name__
