"""Tool calls in what a model writes: text outside of them, functions' names, and arguments.

A call is told as soon as its function is known, and its arguments as they come; so a stream and a whole answer agree at
any cut. What begins like a call and is none stays text. It knows no tokens: markers that are special tokens come with
`SPECIAL` before their names, so that none is forged by its letters. Start reading at `ToolCallReader`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from sluice_engine.protocol.tools import ToolUse
from sluice_engine.text.detokenizer import held_back
from sluice_engine.text.tool_call_text import (
    MOST_IN_STRING,
    SPACE,
    NoToolCall,
    Reading,
    ReadingText,
    Settled,
    ToolCallText,
    is_object,
)
from sluice_engine.text.tool_format import ARGUMENTS_MARK, ID_MARK, SPECIAL, ToolFormat, ToolTemplate

# Of white space before a call, which is no part of the text: more than any model writes there.
_MOST_SPACE = 64
_MEMBERS = ('"name"', '"type"', '"id"')
_ARGUMENTS = ('"arguments"', '"parameters"')


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """How the tools of one request are called."""

    form: ToolFormat
    special: Mapping[str, int]
    """Markers that are special tokens."""
    spelled: Mapping[int, bytes]
    """What those tokens stand for in the text that is read."""
    names: frozenset[str]
    """The functions that may be called."""
    most: int | None
    """Calls of one answer; None: as many as the model likes."""

    @classmethod
    def of(cls, tools: ToolTemplate, use: ToolUse) -> ToolCalling:
        """For what a request says, by what the model was taught."""
        names = frozenset(tool.name for tool in use.callable)
        # What the template could not put into the next prompt must not come out of this one.
        most = None if use.parallel and tools.form.parallel else 1
        return cls(tools.form, tools.special, tools.spelled, names, most)

    def reader(self) -> ToolCallReader:
        """One for each answer."""
        return ToolCallReader(self)


@dataclass(slots=True)
class _Call:
    """A call as far as its object was read."""

    name: str = ""
    arguments: str = ""
    is_told: bool = False


class ToolCallReader:
    """One answer's text and calls."""

    def __init__(self, calling: ToolCalling) -> None:
        form = calling.form
        self._form = form
        self._opening, self._closing, self._arguments_mark, self._id_mark = (
            SPECIAL + mark if mark in calling.special else mark
            for mark in (form.opening, form.closing, ARGUMENTS_MARK, ID_MARK)
        )
        self._names = calling.names
        self._most = calling.most
        self._read = ToolCallText()
        self._reading = self._answer()
        next(self._reading)

    @property
    def num_calls(self) -> int:
        """Those that were told."""
        return self._read.num_calls

    @property
    def num_complete(self) -> int:
        """Of those, the ones whose arguments are a JSON object."""
        return self._read.num_complete

    @property
    def is_full(self) -> bool:
        """Whether as many calls as there may be are whole: nothing need follow."""
        return self._most is not None and self.num_complete >= self._most

    @property
    def all_complete(self) -> bool:
        """Whether there are calls, and the arguments of each are a JSON object."""
        return 0 < self.num_calls == self.num_complete

    def push(self, text: str) -> Settled:
        """What this piece of text settles; once full, nothing."""
        for char in text:
            if self.is_full:
                break
            self._reading.send(char)
        return self._read.settled()

    def finish(self) -> Settled:
        """What was held: no more will come."""
        self._read.give_up()
        return self._read.settled()

    def _answer(self) -> Generator[None, str, None]:
        char = yield from self._read.space((yield))
        if self._form.bare and char == "{":
            char = yield from self._attempt(self._objects, char)
        while True:
            char = yield from self._outside(char)
            char = yield from self._attempt(self._calls, char)

    def _outside(self, char: str) -> Reading:
        """Text, up to an opening; that stays held, with the white space before it."""
        while True:
            self._read.held.append(char)
            held = "".join(self._read.held)
            if held.endswith(self._opening):
                return (yield)
            keep = _may_open(held, self._opening)
            if keep < len(held):
                self._read.say(held[: len(held) - keep])
                self._read.held[:] = held[len(held) - keep :]
            char = yield

    def _attempt(self, reading: Callable[[str], Reading], char: str) -> Reading:
        """What looks like calls, and the white space after them, which is no part of the text."""
        try:
            char = yield from reading(char)
            while not self._read.held and char in SPACE:
                char = yield
        except NoToolCall as no_call:
            self._read.give_up()
            char = no_call.char
        self._read.is_form = False
        return char

    def _calls(self, char: str) -> Reading:
        """What follows an opening."""
        char = yield from self._read.space(char)
        if char == "[":
            char = yield from self._list(char)
        elif char == "{" or self._form.layout != "named":
            char = yield from self._object(char)
        else:
            char = yield from self._named(char)
        char = yield from self._read.space(char)
        self._read.held.clear()
        for expected in self._closing:
            if char != expected:
                return char  # the next opening may begin with what is held
            char = yield from self._read.taken(char)
        self._read.held.clear()
        return char

    def _list(self, char: str) -> Reading:
        char = yield from self._read.after(char)
        while True:
            char = yield from self._read.space((yield from self._object(char)))
            if char not in ",]":
                raise NoToolCall(char)
            self._read.held.clear()
            if char == "]":
                return (yield from self._read.taken(char))
            self._read.is_form = False
            char = yield
            while char in SPACE:
                char = yield

    def _objects(self, char: str) -> Reading:
        """Objects one after the other, without an opening."""
        while char == "{":
            char = yield from self._object(char)
            self._read.held.clear()
            while char in SPACE or char == ";":
                char = yield
        return char

    def _object(self, char: str) -> Reading:
        """A call as an object, its members in any order."""
        if char != "{":
            raise NoToolCall(char)
        call = _Call()
        while char != "}":
            char = yield from self._read.after(char)
            if char == "}":
                break
            char = yield from self._member(char, call)
            if char not in ",}":
                raise NoToolCall(char)
        if not call.is_told:
            arguments = call.arguments or ("" if self._form.bare else "{}")
            if not call.name or not is_object(arguments):
                raise NoToolCall(char)
            self._read.whole(call.name, arguments)
        return (yield from self._read.taken(char))

    def _member(self, char: str, call: _Call) -> Reading:
        key, char = yield from self._read.string(char)
        if char != ":":
            raise NoToolCall(char)
        char = yield from self._read.after(char)
        if key in _MEMBERS:
            value, char = yield from self._read.string(char)
            call.name = self._known(value, char) if key == '"name"' else call.name
        elif key in _ARGUMENTS and char == "{" and not call.arguments:
            if call.name:
                self._read.begin(call.name)
                call.is_told = True
            call.arguments, char = yield from self._read.arguments(char, told=call.is_told)
        else:
            raise NoToolCall(char)
        return char

    def _named(self, char: str) -> Reading:
        """A call as a function's name, and its arguments after it."""
        name: list[str] = []
        stops = {"{", self._arguments_mark[0], self._id_mark[0], *SPACE}
        while char not in stops:
            if len(name) == MOST_IN_STRING:
                raise NoToolCall(char)
            name.append(char)
            char = yield from self._read.taken(char)
        known = self._known(json.dumps("".join(name)), char)
        char = yield from self._read.space(char)
        while char != "{":
            mark, char = yield from self._mark(char)
            while mark == self._id_mark and char.isalnum():
                char = yield from self._read.taken(char)
            char = yield from self._read.space(char)
        self._read.begin(known)
        return (yield from self._read.arguments(char, told=True))[1]

    def _mark(self, char: str) -> ReadingText:
        """One of the marks between a name and its arguments."""
        text = ""
        while text not in {self._arguments_mark, self._id_mark}:
            text += char
            if not any(mark.startswith(text) for mark in (self._arguments_mark, self._id_mark)):
                raise NoToolCall(char)
            char = yield from self._read.taken(char)
        return text, char

    def _known(self, text: str, char: str) -> str:
        try:
            name = json.loads(text)
        except ValueError:
            name = None
        if name not in self._names:
            raise NoToolCall(char)
        return str(name)


def _may_open(held: str, opening: str) -> int:
    """Characters at the end of `held` that may belong to an opening: its beginning, and white space before that."""
    size = held_back(held, (opening,))
    before = held[: len(held) - size]
    return size + min(_MOST_SPACE, len(before) - len(before.rstrip(SPACE)))
