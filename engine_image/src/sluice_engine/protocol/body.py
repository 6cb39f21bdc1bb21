"""A request body as an object whose fields are read strictly: types, bounds and unknown names, with the field's path.

JSON's null means that a field was left out, as OpenAI's clients use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from sluice_engine import bodies
from sluice_engine.bodies import shown
from sluice_engine.errors import InvalidRequest

_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


# The code of what OpenAI's API has, and this engine does not do.
UNSUPPORTED = "unsupported_parameter"


@dataclass(frozen=True, slots=True)
class Inert:
    """A field of OpenAI's that is accepted with the values that change nothing here."""

    kind: type
    harmless: Callable[[object], bool] = lambda _value: True


def parse_json(raw: bytes) -> object:
    """The document in `raw`.

    Raises:
        InvalidRequest: `bodies` says what is refused, and why.
    """
    try:
        return bodies.read_json(raw, strict=True)
    except bodies.Unreadable as error:
        raise _unreadable(str(error)) from error


def parse_object(raw: bytes) -> Fields:
    """The fields of the object in `raw`.

    Raises:
        InvalidRequest: as `parse_json`, or the document is not an object.
    """
    document = parse_json(raw)
    if not isinstance(document, dict):
        raise _unreadable(f"the body must be a JSON object, not {kind_of(document)}")
    return Fields(document)


class Fields:
    """One object's fields; each is read once, and `end` refuses those that nobody asked for."""

    def __init__(self, data: Mapping[str, object], where: str = "") -> None:
        self._data = data
        self._where = where
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The field's name as the caller would write it: `messages[0].content`."""
        return f"{self._where}.{name}" if self._where else name

    def refuse(self, name: str, problem: str, code: str = "invalid_value") -> NoReturn:
        """Answer 400 for this field."""
        raise InvalidRequest.field(self.path(name), problem, code=code)

    def names(self) -> list[str]:
        """The names of all fields, in the order in which they came."""
        return list(self._data)

    def value(self, name: str) -> object:
        """Whatever the field holds; None when it was left out."""
        self._read.add(name)
        return self._data.get(name)

    def text(self, name: str) -> str | None:
        """A string that is valid Unicode."""
        value = self._typed(name, str)
        if isinstance(value, str):
            check_text(value, self.path(name))
            return value
        return None

    def required_text(self, name: str) -> str:
        """A string that must be there."""
        value = self.text(name)
        if value is None:
            self.missing(name)
        return value

    def missing(self, name: str) -> NoReturn:
        """Answer 400: the field must be there."""
        self.refuse(name, "this field is required", "missing_required_parameter")

    def flag(self, name: str) -> bool:
        """A boolean; False when it was left out."""
        return self._typed(name, bool) is True

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer within the bounds."""
        value = self._typed(name, int)
        if value is None:
            return None
        assert isinstance(value, int)
        if not low <= value <= high:
            self.refuse(name, f"must be {low} to {high}, not {shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A number within the bounds; `above` leaves out the lower one itself."""
        value = self._typed(name, float)
        if value is None:
            return None
        assert isinstance(value, (int, float))
        if not (low < value if above else low <= value) or not value <= high:
            bounds = f"above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
            self.refuse(name, f"must be {bounds}, not {shown(value)}")
        return float(value)

    def section(self, name: str) -> Fields | None:
        """The fields of an object."""
        value = self._typed(name, dict)
        return Fields(value, self.path(name)) if isinstance(value, dict) else None

    def array(self, name: str) -> list[object] | None:
        """The items of an array."""
        value = self._typed(name, list)
        return value if isinstance(value, list) else None

    def item(self, name: str, value: object) -> Fields:
        """The fields of an array's item that must be an object; `name` with its index, as `messages[0]`."""
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, not {kind_of(value)}", "invalid_type")
        return Fields(value, self.path(name))

    def token_ids(self, name: str, most: int) -> tuple[int, ...] | None:
        """An array of at most so many token ids; whether the model has them is not known here."""
        ids = self.array(name)
        if ids is None:
            return None
        if len(ids) > most:
            self.refuse(name, f"must hold at most {most} token ids, not {len(ids)}")
        return self.as_token_ids(name, ids)

    def as_token_ids(self, name: str, items: list[object]) -> tuple[int, ...]:
        """Items of an array that were read as something that may be token ids; any other item is refused."""
        for index, item in enumerate(items):
            if not is_kind(item, int):
                self.refuse(f"{name}[{index}]", f"must be a token id, not {kind_of(item)}", "invalid_type")
        return tuple(item for item in items if isinstance(item, int))

    def accept_inert(self, inert: Mapping[str, Inert]) -> None:
        """Let through what changes nothing; refuse by name what would and is not supported."""
        for name, field in inert.items():
            value = self._typed(name, field.kind)
            if value is not None and not field.harmless(value):
                self.unsupported(name, value)

    def refuse_unsupported(self, names: frozenset[str]) -> None:
        """Refuse by name the fields of OpenAI's that have no harmless value but null."""
        for name in self._data:
            if name in names and self.value(name) is not None:
                self.unsupported(name)

    def unsupported(self, name: str, value: object = None) -> NoReturn:
        """Answer 400: the field is OpenAI's, and this engine does not do it."""
        with_value = "" if value is None else f" with the value {shown(value)}"
        self.refuse(name, f"this parameter is not supported{with_value}", UNSUPPORTED)

    def end(self) -> None:
        """Refuse any field that was not read."""
        for name in self._data:
            if name not in self._read:
                shown_name = name if name.isprintable() and len(name) <= 100 else "…"
                path = self.path(shown_name)
                raise InvalidRequest(f"Unknown parameter: '{path}'", param=path, code="unknown_parameter")

    def _typed(self, name: str, kind: type) -> object:
        value = self.value(name)
        if value is not None and not is_kind(value, kind):
            self.refuse(name, f"must be {_KINDS[kind]}, not {kind_of(value)}", "invalid_type")
        return value


def is_kind(value: object, kind: type) -> bool:
    """Whether a JSON value has this type: an integer is a number, a boolean is neither."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def kind_of(value: object) -> str:
    """A JSON value's type, for a person."""
    return "null" if value is None else _KINDS[type(value)]


def check_text(text: str, path: str) -> None:
    """Refuse half of a surrogate pair: JSON can spell it, and no text holds it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"is not valid Unicode: half a surrogate pair at character {error.start}"
        raise InvalidRequest.field(path, problem) from error


def _unreadable(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")
