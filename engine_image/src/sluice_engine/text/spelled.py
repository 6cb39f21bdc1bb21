"""Special tokens spelled out in what a caller says stay text: nobody ends a turn or forges a call by them.

A template's own special tokens are texts like any other in what it renders. So a mark is put into those that come from
the caller before rendering, and the text is cut there after: no piece holds such a token, and the letters stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

# Of Unicode's characters that are none, so that texts hardly ever have one.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def spelled_pattern(specials: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the first letter of each special token that is written out; None where there are none to find."""
    texts = sorted({text for text in specials if len(text) > 1})
    alternatives = [f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in _by_first_letter(texts)]
    return re.compile("|".join(alternatives)) if alternatives else None


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of these, sorted, that looks at each letter once: some models have a thousand special tokens."""
    branches = [re.escape(first) + _any_of(rests) for first, rests in _by_first_letter(texts)]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""


def _by_first_letter(texts: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    for first, group in groupby(texts, key=lambda text: text[0]):
        rests = [text[1:] for text in group]
        # Whoever begins with one of them is found by it: what is longer adds nothing.
        yield first, [] if "" in rests else rests


def marked(value: T, pattern: re.Pattern[str] | None) -> tuple[T, str | None]:
    """The same with a mark in every special token that is spelled out in it, and the mark; None where none is.

    Raises:
        ValueError: it has every character that could be one.
        RecursionError: it is nested too deep.
    """
    if pattern is None or not any(pattern.search(text) for text in _texts(value)):
        return value, None
    taken = {char for text in _texts(value) for char in _MARKS if char in text}
    mark = next((char for char in _MARKS if char not in taken), None)
    if mark is None:
        raise ValueError("it has all of Unicode's characters from U+FDD0 to U+FDEF, and special tokens of the model")
    return _with_mark(value, pattern, mark), mark


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _with_mark(value: T, pattern: re.Pattern[str], mark: str) -> T:
    def walk(each: object) -> object:
        if isinstance(each, str):
            return pattern.sub(lambda found: found[0] + mark, each)
        if isinstance(each, dict):
            return {str(walk(name)): walk(item) for name, item in each.items()}
        if isinstance(each, list | tuple):
            return [walk(item) for item in each]
        return each

    return walk(value)  # type: ignore[return-value]  # of the same shape
