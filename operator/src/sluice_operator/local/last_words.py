"""What a local program's log says of its end, in one line.

Owns the choice of the line: our own programs end with it; another engine writes a traceback, whose first error is the
cause and whose last ones only follow from it.
"""

from __future__ import annotations

import json
import re
import signal

# At the start of a line, or behind a log's own beginning: `RuntimeError: no room for the KV cache`.
_ERROR = re.compile(r"(?:^|\] |\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*)")
_TRACEBACK = "Traceback (most recent call last)"
_MOST_CHARACTERS = 500


def last_words(log: str) -> str:
    """The line that tells most."""
    lines = log.strip().splitlines()
    if not lines:
        return "it said nothing"
    begin = next((index for index, line in enumerate(lines) if _TRACEBACK in line), None)
    if begin is not None and not lines[-1].startswith("{"):
        for line in lines[begin:]:
            if found := _ERROR.search(line):
                return found[1][:_MOST_CHARACTERS]
    return _told(lines[-1])


def _told(line: str) -> str:
    """What a line of a log says to a person: of a JSON line its message, and the error that it names."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(record, dict) or not isinstance(record.get("message"), str):
        return line
    # Of a group of exceptions the last lines only draw its frame.
    trace = [part for one in str(record.get("exception") or "").splitlines() if (part := one.strip(" |+-"))]
    error = record.get("error") or (trace[-1] if trace else "")
    return f"{record['message']}: {error}" if error else record["message"]


def signal_name(number: int) -> str:
    """A signal as people know it."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"signal {number}"
