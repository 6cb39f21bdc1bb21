"""Tool calls in what a model writes, found character by character: text outside of them, names, and arguments.

A call is told as soon as its function is known, and its arguments as they come; so a stream and a whole answer agree at
any cut. What begins like a call and is none stays text. It knows no tokens: markers that are special tokens come with
`SPECIAL` before their names, so that none is forged by its letters. Start reading at `ToolCallReader`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from sluice_engine.protocol.reply import CallDelta
from sluice_engine.protocol.tools import ToolUse
from sluice_engine.text.detokenizer import held_back
from sluice_engine.text.tool_format import ARGUMENTS_MARK, ID_MARK, SPECIAL, ToolFormat, ToolTemplate

_SPACE = " \t\r\n"
# Of white space before a call, which is no part of the text: more than any model writes there.
_MOST_SPACE = 64
# Of a key, a name, an id or a type.
_MOST_IN_STRING = 256
_MEMBERS = ('"name"', '"type"', '"id"')
_ARGUMENTS = ('"arguments"', '"parameters"')
_PAIRS = {"}": "{", "]": "["}

# Takes a character at each `yield`; gives back the first that is not its own.
Reading = Generator[None, str, str]


class _NoCall(Exception):
    """What came is no call, or not any more; `char` was not taken."""

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


@dataclass(slots=True)
class _Call:
    """A call as far as its object was read."""

    name: str = ""
    arguments: str = ""
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """What a piece of an answer settled."""

    text: str
    calls: tuple[CallDelta, ...]


@dataclass(frozen=True, slots=True)
class Calling:
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
    def of(cls, tools: ToolTemplate, use: ToolUse) -> Calling:
        """For what a request says, by what the model was taught."""
        names = frozenset(tool.name for tool in use.callable)
        # What the template could not put into the next prompt must not come out of this one.
        most = None if use.parallel and tools.form.parallel else 1
        return cls(tools.form, tools.special, tools.spelled, names, most)

    def reader(self) -> ToolCallReader:
        """One for each answer."""
        return ToolCallReader(self)


class ToolCallReader:
    """One answer's text and calls."""

    def __init__(self, calling: Calling) -> None:
        form = calling.form
        self._form = form
        self._opening, self._closing, self._arguments_mark, self._id_mark = (
            SPECIAL + mark if mark in calling.special else mark
            for mark in (form.opening, form.closing, ARGUMENTS_MARK, ID_MARK)
        )
        self._names = calling.names
        self._most = calling.most
        self.num_calls = 0
        self._num_complete = 0
        self._held: list[str] = []
        """What came and may become a call, or belongs to the form of one."""
        self._is_form = False
        """Whether what is held comes after a call's arguments: it is no text if the answer ends here."""
        self._text: list[str] = []
        self._deltas: list[CallDelta] = []
        self._pieces: list[str] = []
        """Arguments of the last call that are not told yet."""
        self._reading = self._answer()
        next(self._reading)

    @property
    def is_full(self) -> bool:
        """Whether as many calls as there may be are whole: nothing need follow."""
        return self._most is not None and self._num_complete >= self._most

    @property
    def all_complete(self) -> bool:
        """Whether there are calls, and the arguments of each are a JSON object."""
        return 0 < self.num_calls == self._num_complete

    def push(self, text: str) -> Settled:
        """What this piece of text settles; once full, nothing."""
        for char in text:
            if self.is_full:
                break
            self._reading.send(char)
        return self._settled()

    def finish(self) -> Settled:
        """What was held: no more will come."""
        self._give_up()
        return self._settled()

    def _settled(self) -> Settled:
        self._tell()
        settled = Settled("".join(self._text).replace(SPECIAL, ""), tuple(self._deltas))
        self._text.clear()
        self._deltas.clear()
        return settled

    # An answer: a program that is given one character after the other.

    def _answer(self) -> Generator[None, str, None]:
        char = yield from self._space((yield))
        if self._form.bare and char == "{":
            char = yield from self._attempt(self._objects, char)
        while True:
            char = yield from self._outside(char)
            char = yield from self._attempt(self._calls, char)

    def _outside(self, char: str) -> Reading:
        """Text, up to an opening; that stays held, with the white space before it."""
        while True:
            self._held.append(char)
            held = "".join(self._held)
            if held.endswith(self._opening):
                return (yield)
            keep = _may_open(held, self._opening)
            if keep < len(held):
                self._text.append(held[: len(held) - keep])
                self._held[:] = held[len(held) - keep :]
            char = yield

    def _attempt(self, reading: Callable[[str], Reading], char: str) -> Reading:
        """What looks like calls, and the white space after them, which is no part of the text."""
        try:
            char = yield from reading(char)
            while not self._held and char in _SPACE:
                char = yield
        except _NoCall as no_call:
            self._give_up()
            char = no_call.char
        self._is_form = False
        return char

    def _calls(self, char: str) -> Reading:
        """What follows an opening."""
        char = yield from self._space(char)
        if char == "[":
            char = yield from self._list(char)
        elif char == "{" or self._form.layout != "named":
            char = yield from self._object(char)
        else:
            char = yield from self._named(char)
        char = yield from self._space(char)
        self._held.clear()
        for expected in self._closing:
            if char != expected:
                return char  # the next opening may begin with what is held
            char = yield from self._taken(char)
        self._held.clear()
        return char

    def _list(self, char: str) -> Reading:
        char = yield from self._space((yield from self._taken(char)))
        while True:
            char = yield from self._space((yield from self._object(char)))
            if char not in ",]":
                raise _NoCall(char)
            self._held.clear()
            if char == "]":
                return (yield from self._taken(char))
            self._is_form = False
            char = yield
            while char in _SPACE:
                char = yield

    def _objects(self, char: str) -> Reading:
        """Objects one after the other, without an opening."""
        while char == "{":
            char = yield from self._object(char)
            self._held.clear()
            while char in _SPACE or char == ";":
                char = yield
        return char

    def _object(self, char: str) -> Reading:
        """A call as an object, its members in any order."""
        if char != "{":
            raise _NoCall(char)
        call = _Call()
        while char != "}":
            char = yield from self._space((yield from self._taken(char)))
            if char == "}":
                break
            char = yield from self._member(char, call)
            if char not in ",}":
                raise _NoCall(char)
        if not call.is_told:
            arguments = call.arguments or ("" if self._form.bare else "{}")
            if not call.name or not _is_object(arguments):
                raise _NoCall(char)
            self._begin(call.name)
            self._pieces.append(arguments)
            self._conclude(arguments)
        return (yield from self._taken(char))

    def _member(self, char: str, call: _Call) -> Reading:
        key, char = yield from self._string(char)
        if char != ":":
            raise _NoCall(char)
        char = yield from self._space((yield from self._taken(char)))
        if key in _MEMBERS:
            value, char = yield from self._string(char)
            call.name = self._known(value, char) if key == '"name"' else call.name
        elif key in _ARGUMENTS and char == "{" and not call.arguments:
            if call.name:
                self._begin(call.name)
                call.is_told = True
            call.arguments, char = yield from self._value(char, is_told=call.is_told)
        else:
            raise _NoCall(char)
        return char

    def _named(self, char: str) -> Reading:
        """A call as a function's name, and its arguments after it."""
        name: list[str] = []
        stops = {"{", self._arguments_mark[0], self._id_mark[0], *_SPACE}
        while char not in stops:
            if len(name) == _MOST_IN_STRING:
                raise _NoCall(char)
            name.append(char)
            char = yield from self._taken(char)
        known = self._known(json.dumps("".join(name)), char)
        char = yield from self._space(char)
        while char != "{":
            mark, char = yield from self._mark(char)
            while mark == self._id_mark and char.isalnum():
                char = yield from self._taken(char)
            char = yield from self._space(char)
        self._begin(known)
        return (yield from self._value(char, is_told=True))[1]

    def _mark(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """One of the marks between a name and its arguments, and the character after it."""
        text = ""
        while text not in {self._arguments_mark, self._id_mark}:
            text += char
            if not any(mark.startswith(text) for mark in (self._arguments_mark, self._id_mark)):
                raise _NoCall(char)
            char = yield from self._taken(char)
        return text, char

    def _string(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A JSON string as it is written, and the first character after it that is no white space."""
        if char != '"':
            raise _NoCall(char)
        text, ended, escaped = "", False, False
        while not ended:
            if len(text) == _MOST_IN_STRING or char == SPECIAL:
                raise _NoCall(char)
            ended = bool(text) and char == '"' and not escaped
            escaped = char == "\\" and not escaped
            text += char
            char = yield from self._taken(char)
        return text, (yield from self._space(char))

    def _value(self, char: str, *, is_told: bool) -> Generator[None, str, tuple[str, str]]:
        """An object as far as its brackets go, and the first character after it that is no white space."""
        text: list[str] = []
        open_brackets: list[str] = []
        in_string = escaped = False
        while True:
            if char == SPECIAL:
                raise _NoCall(char)
            if in_string:
                in_string = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif char == '"':
                in_string = True
            elif char in "{[":
                open_brackets.append(char)
            elif char in "}]" and open_brackets.pop() != _PAIRS[char]:
                raise _NoCall(char)
            text.append(char)
            (self._pieces if is_told else self._held).append(char)
            if not open_brackets:
                break
            char = yield
        whole = "".join(text)
        if is_told:
            self._conclude(whole)
        return whole, (yield from self._space((yield)))

    def _space(self, char: str) -> Reading:
        while char in _SPACE:
            char = yield from self._taken(char)
        return char

    def _taken(self, char: str) -> Reading:
        self._held.append(char)
        return (yield)

    # What is told.

    def _known(self, text: str, char: str) -> str:
        try:
            name = json.loads(text)
        except ValueError:
            name = None
        if name not in self._names:
            raise _NoCall(char)
        return str(name)

    def _begin(self, name: str) -> None:
        self._tell()
        self._held.clear()
        self._deltas.append(CallDelta(self.num_calls, name))
        self.num_calls += 1

    def _conclude(self, arguments: str) -> None:
        self._num_complete += _is_object(arguments)
        self._is_form = True

    def _tell(self) -> None:
        """The arguments that came since, with the call itself where that is to be told still."""
        if not self._pieces:
            return
        index, arguments = self.num_calls - 1, "".join(self._pieces)
        self._pieces.clear()
        if self._deltas and self._deltas[-1].index == index:
            last = self._deltas.pop()
            self._deltas.append(CallDelta(index, last.name, last.arguments + arguments))
        else:
            self._deltas.append(CallDelta(index, None, arguments))

    def _give_up(self) -> None:
        """What is held becomes no call: it is text, but for what belongs to the form of one that was told."""
        if not self._is_form:
            self._text.extend(self._held)
        self._held.clear()


def _may_open(held: str, opening: str) -> int:
    """Characters at the end of `held` that may belong to an opening: its beginning, and white space before that."""
    size = held_back(held, (opening,))
    before = held[: len(held) - size]
    return size + min(_MOST_SPACE, len(before) - len(before.rstrip(_SPACE)))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
