"""From token ids to text, one token at a time: correct UTF-8, and stop strings that never leak.

A token is a run of bytes, so a character may arrive in pieces: incomplete bytes are held. Text is held back only while
its end is a proper prefix of a stop string. What is streamed therefore equals what a whole reply says, at any cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from types import MappingProxyType


class IncrementalDecoder:
    """The text of one choice, as far as it is settled."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        spelled: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """`min_tokens`: a stop string that is complete with one of so many tokens is text as any other.

        `spelled`: what those special tokens stand for here that are told by their names.
        """
        self._token_bytes = token_bytes
        self._spelled = spelled
        self._tokens_to_go = min_tokens
        self._stop = tuple(stop)
        # Bytes that can never become UTF-8 turn into U+FFFD at once; a character's first bytes wait for the rest.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.num_characters = 0
        """Characters decoded so far, those held back included."""
        self.stopped = False
        """Whether a stop string was produced; it and all that follows are not part of the text."""

    def push(self, token_id: int) -> str:
        """The text that this token settles, possibly none. Once stopped, always none."""
        # A model may have more tokens than its tokenizer knows: those stand for no text.
        added = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        if not added and token_id in self._spelled:
            added = self._spelled[token_id]
        settled = self._settle(self._utf8.decode(added))
        self._tokens_to_go -= 1
        return settled

    def finish(self) -> str:
        """What was held: the end of the text is settled now."""
        text = self._settle(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _settle(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        self.num_characters += len(new)
        if not self._stop:
            return new
        text = self._held + new
        start = _first_stop(text, self._stop) if self._tokens_to_go <= 0 else None
        if start is not None:
            self.stopped, self._held = True, ""
            return text[:start]
        num_held = held_back(text, self._stop)
        settled, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return settled


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first; the longest of those that end there.

    Completion counts, not the beginning: only then does the answer not depend on where tokens happen to be cut.
    """
    found = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    return min(found)[1] if found else None


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = min(max(map(len, stop)) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(each.startswith(text[-length:]) for each in stop if len(each) > length):
            return length
    return 0
