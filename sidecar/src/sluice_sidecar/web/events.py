"""What the gate reads in the bytes of an answer: which choice moved, where an event ends, how the stream ended.

Pure, and by search: no event is parsed on its way. Must not know sockets.
"""

from __future__ import annotations

import re
from collections import Counter

from sluice_engine.core.emissions import HELD_TOKEN

# Usage and [DONE] stand within this much of a stream's end.
TAIL_BYTES = 2048
# An event that long is not one of an engine's: it is passed on in pieces.
_MOST_EVENT_BYTES = 256 * 1024
# The first event of a stream names the role and has no text; a token's has some. What a model thinks, and the
# name and the arguments of a tool that it calls, are tokens too. Of one whose text has to wait, Sluice's engine says so
# in a comment, which clients pass over.
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|arguments|name)":\s*"[^"]')
# How nearly every engine writes it: found faster than by the pattern.
_CONTENT = b'"content":"'
_INDEX = re.compile(rb'"index":\s*(\d+)')
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_PROMPT_USAGE = re.compile(rb'"prompt_tokens":\s*(\d+)')
_STOPPED = re.compile(rb'"finish_reason":\s*"(?:stop|tool_calls)"')
_EXPIRED = re.compile(rb'"code":\s*"deadline_missed"')
_REFUSED = re.compile(rb'"code":\s*"invalid_grammar"')
_DONE = re.compile(rb"data: ?\[DONE\]\s*$")
_ENDS = (b"\n\n", b"\r\n\r\n")


def has_text(chunk: bytes) -> bool:
    """Whether a token is in it."""
    end = chunk.find(_CONTENT) + len(_CONTENT)
    if end >= len(_CONTENT) and chunk[end : end + 1] not in {b'"', b""}:
        return True
    return _is_token(chunk)


def count_with_text(chunk: bytes) -> int:
    """How many of its events have text: several may have come at once. An engine writes each in one line."""
    if b"\n" not in chunk.rstrip():
        return int(has_text(chunk))
    return sum(map(_is_token, chunk.split(b"\n")))


def choices_with_text(chunk: bytes) -> Counter[int]:
    """The choices that the chunk has text of, each with the number of its events."""
    lines = filter(_is_token, chunk.split(b"\n"))
    return Counter(int(found[1]) for line in lines if (found := _INDEX.search(line)) is not None)


def _is_token(line: bytes) -> bool:
    return _TEXT.search(line) is not None or line.startswith(HELD_TOKEN)


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """(events that are whole, the beginning of the next)."""
    if data.endswith(_ENDS):
        return data, b""
    cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
    if not cut and len(data) > _MOST_EVENT_BYTES:
        return data, b""
    return data[:cut], data[cut:]


def output_tokens(tail: bytes) -> int | None:
    """The engine's own count in the end of an answer."""
    found = _USAGE.findall(tail)
    return int(found[-1]) if found else None


def prompt_tokens(tail: bytes) -> int | None:
    """The engine's own count of the prompts, in the end of an answer."""
    found = _PROMPT_USAGE.findall(tail)
    return int(found[-1]) if found else None


def has_stopped(tail: bytes) -> bool:
    """Whether a choice ended of itself: its last token was computed and is in no event."""
    return _STOPPED.search(tail) is not None


def is_complete(tail: bytes) -> bool:
    """Whether a stream came to its good end."""
    return _DONE.search(tail) is not None


def is_expired(tail: bytes) -> bool:
    """Whether the engine gave it up for its deadline."""
    return _EXPIRED.search(tail) is not None


def is_refused(tail: bytes) -> bool:
    """Whether the engine gave it up for what the request asked for: a grammar that cannot go on."""
    return _REFUSED.search(tail) is not None
