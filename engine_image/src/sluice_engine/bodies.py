"""Request bodies as gate and engine both read them: bounded before they are, and refused in their sender's words.

Python reads JSON in one go, and nothing else runs meanwhile. A body's length says little of how long that takes: eight
megabytes of text are read in six milliseconds, of empty arrays in seven hundred. Pure. Must not know fields, but for
those that hold a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn

# Texts, names, arrays and objects of a body together: each takes a third of a microsecond to read, and more to look at.
MAX_PARTS = 2**17
# Values of a body in arrays and objects, which token ids are too: as many as the longest prompt has.
MAX_VALUES = 2**20
# Messages of a conversation, with the content parts and the tool calls in them. No template says how little it makes of
# one, so that a conversation's length in tokens bounds nothing; what it takes to render one is some 20 microseconds.
MAX_PIECES = 8192
# Python reads no whole number of more digits: what it takes grows by the square of them.
MAX_DIGITS = 4300
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TOO_DEEP = "the body is nested too deep"
_LISTS_OF_A_MESSAGE = ("content", "tool_calls")


class Unreadable(ValueError):
    """A body that is no JSON, or more of it than is read; the text says so to its sender."""


def read_json(raw: bytes, *, strict: bool = False) -> object:
    """The document in `raw`. `strict` refuses what readers of JSON take differently: a name twice in one object, NaN.

    Raises:
        Unreadable: not UTF-8, not JSON, nested too deep, or too many things.
    """
    if raw.startswith(_BYTE_ORDER_MARK):
        raise Unreadable("the body begins with a byte order mark (BOM), which JSON does not have")
    _check_size(raw)
    try:
        text = raw.decode()
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique) if strict else json.loads(text)
    except UnicodeDecodeError as error:
        raise Unreadable(f"the body is not valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise Unreadable(TOO_DEEP) from error
    except (json.JSONDecodeError, _NotJson) as error:
        raise Unreadable(f"the body is not valid JSON: {error}") from error
    except ValueError as error:
        # Python's own words for it are about Python.
        raise Unreadable(f"the body has a whole number of more than {MAX_DIGITS} digits") from error


def too_many_pieces(messages: Sequence[object]) -> str | None:
    """Why a conversation is too long to be rendered, however little is in it; None when it is not."""
    count = len(messages)
    for message in messages if count <= MAX_PIECES else ():
        if isinstance(message, dict):
            inner = (message.get(name) for name in _LISTS_OF_A_MESSAGE)
            count += sum(len(items) for items in inner if isinstance(items, list))
    if count <= MAX_PIECES:
        return None
    return f"must hold at most {MAX_PIECES} messages, content parts and tool calls together, not {count}"


def _check_size(raw: bytes) -> None:
    """Refuse what has more parts or values than may be; each has two bytes at least."""
    if len(raw) < 2 * MAX_PARTS:
        return
    # In texts the same characters say nothing, but few texts have so many of them.
    if _num_marks(raw) + raw.count(b'"') // 2 <= MAX_PARTS and raw.count(b",") < MAX_VALUES:
        return
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = unescaped.count(b'"') // 2
    outside = b"" if num_texts > MAX_PARTS else b"".join(unescaped.split(b'"')[::2])
    if num_texts + _num_marks(outside) > MAX_PARTS:
        raise Unreadable(f"the body holds more than {MAX_PARTS} texts, names, arrays and objects together")
    if outside.count(b",") >= MAX_VALUES:
        raise Unreadable(f"the body holds more than {MAX_VALUES} values")


def _num_marks(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


class _NotJson(ValueError):
    """What Python reads and JSON is not."""


def _no_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        # Two readers of one body (a gate and an engine) must not each take another of the two.
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _NotJson(f"the name {shown(twice)} is there twice in one object")
    return fields


def shown(value: object) -> str:
    """A value in a message, cut short."""
    text = json.dumps(value[:60] if isinstance(value, str) else value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:60]}…"
