"""What is read of an answer that may have tool calls, and what is told of it: a text taken character by character.

It knows what is held and what was settled, strings and objects as JSON writes them, and not where a call begins. Its
readings are programs that are given one character at each `yield`, and return the first that is not theirs.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass

from sluice_engine.protocol.reply import ToolCallDelta
from sluice_engine.text.tool_format import SPECIAL

SPACE = " \t\r\n"
# Of a key, a name, an id or a type.
MOST_IN_STRING = 256
_PAIRS = {"}": "{", "]": "["}

Reading = Generator[None, str, str]
# Likewise, with what was read.
ReadingText = Generator[None, str, tuple[str, str]]


class NoToolCall(Exception):
    """What came is no call, or not any more; `char` was not taken."""

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


@dataclass(frozen=True, slots=True)
class Settled:
    """What a piece of an answer settled."""

    text: str
    calls: tuple[ToolCallDelta, ...]


class ToolCallText:
    """An answer as far as it was read."""

    def __init__(self) -> None:
        self.held: list[str] = []
        """What came and may become a call, or belongs to the form of one."""
        self.is_form = False
        """Whether what is held comes after a call's arguments: it is no text if the answer ends here."""
        self.num_calls = 0
        self.num_complete = 0
        """Those whose arguments are a JSON object."""
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._pieces: list[str] = []
        """Arguments of the last call that are not told yet."""

    def settled(self) -> Settled:
        """What can be told since the last time."""
        self._flush()
        settled = Settled("".join(self._text).replace(SPECIAL, ""), tuple(self._deltas))
        self._text.clear()
        self._deltas.clear()
        return settled

    # What is read.

    def taken(self, char: str) -> Reading:
        """Hold a character; the next."""
        self.held.append(char)
        return (yield)

    def space(self, char: str) -> Reading:
        """White space, which is held."""
        while char in SPACE:
            char = yield from self.taken(char)
        return char

    def after(self, char: str) -> Reading:
        """A character and the white space after it, which are held."""
        return (yield from self.space((yield from self.taken(char))))

    def string(self, char: str) -> ReadingText:
        """A JSON string as it is written, and white space after it.

        Raises:
            NoToolCall: it is none, or too long for what is read here.
        """
        if char != '"':
            raise NoToolCall(char)
        text, ended, escaped = "", False, False
        while not ended:
            if len(text) == MOST_IN_STRING or char == SPECIAL:
                raise NoToolCall(char)
            ended = bool(text) and char == '"' and not escaped
            escaped = char == "\\" and not escaped
            text += char
            char = yield from self.taken(char)
        return text, (yield from self.space(char))

    def arguments(self, char: str, *, told: bool) -> ReadingText:
        """An object as far as its brackets go, and white space after it; `told` as it comes, else held.

        Raises:
            NoToolCall: its brackets do not match, or a special token comes in it.
        """
        text: list[str] = []
        open_brackets: list[str] = []
        in_string = escaped = False
        while True:
            if char == SPECIAL:
                raise NoToolCall(char)
            if in_string:
                in_string = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif char == '"':
                in_string = True
            elif char in "{[":
                open_brackets.append(char)
            elif char in "}]" and open_brackets.pop() != _PAIRS[char]:
                raise NoToolCall(char)
            text.append(char)
            (self._pieces if told else self.held).append(char)
            if not open_brackets:
                break
            char = yield
        whole = "".join(text)
        if told:
            self._conclude(whole)
        return whole, (yield from self.space((yield)))

    # What is told.

    def say(self, text: str) -> None:
        """This is text."""
        self._text.append(text)

    def begin(self, name: str) -> None:
        """A call of this function: what was held is its beginning."""
        self._flush()
        self.held.clear()
        self._deltas.append(ToolCallDelta(self.num_calls, name))
        self.num_calls += 1

    def whole(self, name: str, arguments: str) -> None:
        """A call whose arguments came before its function's name."""
        self.begin(name)
        self._pieces.append(arguments)
        self._conclude(arguments)

    def give_up(self) -> None:
        """What is held becomes no call: it is text, but for what belongs to the form of one that was told."""
        if not self.is_form:
            self._text.extend(self.held)
        self.held.clear()

    def _conclude(self, arguments: str) -> None:
        self.num_complete += is_object(arguments)
        self.is_form = True

    def _flush(self) -> None:
        """The arguments that came since, with the call itself where that is to be told still."""
        if not self._pieces:
            return
        index, arguments = self.num_calls - 1, "".join(self._pieces)
        self._pieces.clear()
        if self._deltas and self._deltas[-1].index == index:
            last = self._deltas.pop()
            self._deltas.append(ToolCallDelta(index, last.name, last.arguments + arguments))
        else:
            self._deltas.append(ToolCallDelta(index, None, arguments))


def is_object(text: str) -> bool:
    """Whether this is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
