"""Frozen dataclasses in and out of JSON, strictly: an unknown key, a missing key or a wrong type is an error by name.

One small codec serves `engine.json`, `gate.json`, `live.json` and `/state`, so writer and reader share one type. Five
times a second a state of a thousand requests goes through it while tokens wait: each type's reader is made once, and a
value that is of the right type already costs one look.
Supported field types: bool, int, float, str, `Literal`, `X | None`, `tuple[X, ...]`, `dict[str, X]` and dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from sluice_engine.errors import InvalidConfig

T = TypeVar("T")
_Reader = Callable[[object, bool], object]
"""From parsed JSON, and whether unknown keys are passed over, to the value."""

_MOST = 2**63 - 1
_PLAIN = frozenset((bool, int, float, str, type(None)))
"""What is written as it is."""


def encode(value: object) -> Any:  # noqa: ANN401  # JSON has no narrower type
    """`value` as JSON-ready lists, dicts and scalars; a dataclass keeps the order of its fields."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names, values = _getter(type(value))
        document = dict(zip(names, values(value), strict=True))
        for name, item in document.items():
            if type(item) not in _PLAIN:
                document[name] = encode(item)
        return document
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
    try:
        reader = _reader(typing.cast("Any", cls))
        return typing.cast("T", reader(data, ignore_unknown))
    except _Mismatch as mismatch:
        raise InvalidConfig(where + "".join(reversed(mismatch.path)), mismatch.problem) from None


def to_json(value: object) -> str:
    """Canonical JSON: equal values give equal text, hence equal hashes."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def from_json(cls: type[T], text: str | bytes, where: str) -> T:
    """The inverse of `to_json`.

    Raises:
        InvalidConfig: not JSON, or not a `cls`.
    """
    try:
        data = loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(where, f"is not JSON: {error}") from error
    return decode(cls, data, where)


def loads(text: str | bytes) -> Any:  # noqa: ANN401  # JSON
    """Parsed JSON whose whole numbers have 64 bits: with longer ones, arithmetic would fail far from here.

    Raises:
        ValueError: it is no such JSON.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_int=_whole)


def _whole(digits: str) -> int:
    if len(digits) > len(str(-_MOST)) or not -_MOST <= (number := int(digits)) <= _MOST:
        raise ValueError(f"the number {digits[:20]}… does not fit in 64 bits")
    return number


def digest(value: object) -> str:
    """Ten hex digits that name this content, short enough for an object's name."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:10]


class _Mismatch(Exception):
    """A value that is not of its type, on its way up to where the whole path is known."""

    def __init__(self, problem: str, path: str = "") -> None:
        self.problem = problem
        self.path = [path]
        """From the innermost step outwards."""


@functools.cache
def _getter(cls: type) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]:
    """The names of a dataclass's fields, and what reads all of them."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    if len(names) < 2:  # attrgetter makes tuples of two and more only
        return names, lambda value: tuple(getattr(value, name) for name in names)
    return names, attrgetter(*names)


@functools.cache
def _reader(kind: Any) -> _Reader:  # noqa: ANN401  # a type, or what typing has in place of one
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast("type", kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        inner = _reader(next(arg for arg in args if arg is not type(None)))
        return lambda data, ignore_unknown: None if data is None else inner(data, ignore_unknown)
    if origin is typing.Literal:
        return _literal_reader(args)
    if origin is tuple:
        return _tuple_reader(args)
    if origin is dict:
        return _dict_reader(_reader(args[1]))
    return _scalar_reader(kind)


def _at_once(kind: Any) -> frozenset[type]:  # noqa: ANN401  # likewise
    """The exact types of values that are this kind without another look."""
    if kind in _PLAIN:
        return frozenset((kind,))
    if typing.get_origin(kind) is types.UnionType:
        return frozenset().union(*(_at_once(arg) for arg in typing.get_args(kind)))
    return frozenset()


def _dataclass_reader(cls: type) -> _Reader:
    hints = typing.get_type_hints(cls)
    fields = [
        (field.name, _at_once(hints[field.name]), _reader(hints[field.name])) for field in dataclasses.fields(cls)
    ]
    known = {name for name, _, _ in fields}
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def read(data: object, ignore_unknown: bool) -> object:  # noqa: FBT001  # as all readers
        if not isinstance(data, dict):
            raise _Mismatch(f"must be an object, not {_kind_of(data)}")
        if not ignore_unknown and (unknown := sorted(data.keys() - known)):
            raise _Mismatch(f"is not a known field; known are {', '.join(hints)}", f".{unknown[0]}")
        for name in required:
            if name not in data:
                raise _Mismatch("is missing", f".{name}")
        values = {}
        name = ""
        try:
            for name, at_once, reader in fields:
                if name in data:
                    value = data[name]
                    values[name] = value if type(value) in at_once else reader(value, ignore_unknown)
        except _Mismatch as mismatch:
            mismatch.path.append(f".{name}")
            raise
        return cls(**values)

    return read


def _tuple_reader(args: tuple[Any, ...]) -> _Reader:
    same = args[-1] is Ellipsis
    readers = [_reader(arg) for arg in args if arg is not Ellipsis]

    def read(data: object, ignore_unknown: bool) -> object:  # noqa: FBT001  # as all readers
        if not isinstance(data, list):
            raise _Mismatch(f"must be a list, not {_kind_of(data)}")
        if not same and len(data) != len(readers):
            raise _Mismatch(f"must have {len(readers)} items, not {len(data)}")
        items: list[object] = []
        try:
            for reader, item in zip(readers * len(data) if same else readers, data, strict=True):
                items.append(reader(item, ignore_unknown))  # one by one: the index of a bad one is told
        except _Mismatch as mismatch:
            mismatch.path.append(f"[{len(items)}]")
            raise
        return tuple(items)

    return read


def _dict_reader(reader: _Reader) -> _Reader:
    def read(data: object, ignore_unknown: bool) -> object:  # noqa: FBT001  # as all readers
        if not isinstance(data, dict):
            raise _Mismatch(f"must be an object, not {_kind_of(data)}")
        values: dict[str, object] = {}
        key = ""
        try:
            for key, item in data.items():
                values[key] = reader(item, ignore_unknown)
        except _Mismatch as mismatch:
            mismatch.path.append(f".{key}")
            raise
        return values

    return read


def _literal_reader(words: tuple[Any, ...]) -> _Reader:
    def read(data: object, _: bool) -> object:  # noqa: FBT001  # as all readers
        if data not in words:
            raise _Mismatch(f"must be one of {', '.join(map(str, words))}, not {data!r}")
        return data

    return read


def _scalar_reader(kind: type) -> _Reader:
    def read(data: object, _: bool) -> object:  # noqa: FBT001  # as all readers
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                raise _Mismatch("is out of the range of numbers") from None
        if not isinstance(kind, type) or not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
            raise _Mismatch(f"must be of type {getattr(kind, '__name__', kind)}, not {_kind_of(data)}")
        return data

    return read


def _kind_of(data: object) -> str:
    return "null" if data is None else type(data).__name__
