"""Public traces of real traffic, read unchanged: Azure LLM inference (CSV), Mooncake (JSON lines), BurstGPT (CSV).

Owns the three formats. Every broken line is refused with its number; nothing is guessed. Times become microseconds
since the first line. A request that produced nothing had failed and is left out, and counted.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from sluice_simulator.errors import InvalidInput
from sluice_simulator.fields import MOST_DURATION_US, shown

TraceFormat = Literal["Azure", "Mooncake", "BurstGPT"]
FORMATS: tuple[TraceFormat, ...] = ("Azure", "Mooncake", "BurstGPT")

# One id stands for this many prompt tokens. Source: the Mooncake traces (FAST'25).
MOONCAKE_BLOCK_TOKENS = 512

# No model that is served has a context of this many tokens: such a number is a mistake in the file.
MOST_TRACE_TOKENS = 999_999


@dataclass(slots=True)
class Trace:
    """Requests by arrival, column by column: a million of them stay small."""

    times_us: array[int] = field(default_factory=lambda: array("q"))
    """Since the first."""
    prompts: array[int] = field(default_factory=lambda: array("q"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    """Where each stands in its file."""
    heads: list[tuple[int, ...]] | None = None
    """Mooncake only: ids of the leading blocks; equal ids are equal tokens."""
    skipped: int = 0
    """Requests without output: they had failed."""

    def __len__(self) -> int:
        return len(self.times_us)


@dataclass(frozen=True, slots=True)
class _Row:
    time_us: int
    prompt: int
    output: int
    heads: tuple[int, ...] | None = None


def read_trace(path: Path, trace_format: TraceFormat) -> Trace:
    """The requests of a trace file.

    Raises:
        InvalidInput: the file cannot be read, or a line breaks the format; the text names file and line.
    """
    rows: Callable[[Path], Iterator[tuple[int, _Row]]] = {
        "Azure": _azure,
        "Mooncake": _mooncake,
        "BurstGPT": _burst_gpt,
    }[trace_format]
    trace = Trace(heads=[] if trace_format == "Mooncake" else None)
    first_us: int | None = None
    last_us = 0
    try:
        for line, row in rows(path):
            if first_us is None:
                first_us = last_us = row.time_us
            if row.time_us < last_us:
                raise InvalidInput(str(path), f"line {line}", "arrives before the line above: times must not fall")
            last_us = row.time_us
            if not row.output:
                trace.skipped += 1
                continue
            trace.times_us.append(row.time_us - first_us)
            trace.prompts.append(row.prompt)
            trace.outputs.append(row.output)
            trace.lines.append(line)
            if trace.heads is not None:
                trace.heads.append(row.heads or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = getattr(error, "strerror", None) or f"is not such a file: {' '.join(str(error).split())}"
        raise InvalidInput(str(path), "", problem) from error
    if not trace:
        raise InvalidInput(str(path), "", "holds no request")
    return trace


def _azure(path: Path) -> Iterator[tuple[int, _Row]]:
    for line, row in _csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ()):
        place = _Place(path, line)
        yield (
            line,
            _Row(
                _timestamp_us(row["TIMESTAMP"], place),
                place.tokens("ContextTokens", row["ContextTokens"], least=1),
                place.tokens("GeneratedTokens", row["GeneratedTokens"]),
            ),
        )


def _burst_gpt(path: Path) -> Iterator[tuple[int, _Row]]:
    needed = ("Timestamp", "Request tokens", "Response tokens")
    known = ("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time")
    for line, row in _csv(path, needed, known):
        place = _Place(path, line)
        output = place.tokens("Response tokens", row["Response tokens"])
        yield (
            line,
            _Row(
                place.time_us("Timestamp", row["Timestamp"], 1_000_000),
                # What failed need not have had a prompt.
                place.tokens("Request tokens", row["Request tokens"], least=1 if output else 0),
                output,
            ),
        )


def _mooncake(path: Path) -> Iterator[tuple[int, _Row]]:
    known = {"timestamp", "input_length", "output_length", "hash_ids"}
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            place = _Place(path, line)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(str(path), f"line {line}", f"is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise place.problem("", f"must be an object, not {shown(row)}")
            if unknown := sorted(row.keys() - known):
                raise place.problem(unknown[0], f"is not a known key; known are {', '.join(sorted(known))}")
            if missing := sorted(known - row.keys()):
                raise place.problem(missing[0], "is missing")
            prompt = place.tokens("input_length", row["input_length"], least=1)
            heads = row["hash_ids"]
            if not isinstance(heads, list) or not all(type(one) is int and one >= 0 for one in heads):
                raise place.problem("hash_ids", "must be a list of whole numbers")
            if len(heads) > -(-prompt // MOONCAKE_BLOCK_TOKENS):
                raise place.problem(
                    "hash_ids", f"{len(heads)} ids of {MOONCAKE_BLOCK_TOKENS} tokens for {prompt} tokens"
                )
            yield (
                line,
                _Row(
                    place.time_us("timestamp", row["timestamp"], 1_000),
                    prompt,
                    place.tokens("output_length", row["output_length"]),
                    tuple(heads),
                ),
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """One line of a file, for what is wrong in it."""

    path: Path
    line: int

    def problem(self, key: str, problem: str) -> InvalidInput:
        return InvalidInput(str(self.path), f"line {self.line}{f': {key}' if key else ''}", problem)

    def tokens(self, key: str, value: Any, least: int = 0) -> int:  # noqa: ANN401  # text or JSON
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, int):
            raise self.problem(key, f"must be a whole number of tokens, not {shown(value)}")
        if not least <= number <= MOST_TRACE_TOKENS:
            raise self.problem(key, f"must be {least} to {MOST_TRACE_TOKENS:,} tokens, not {number:,}")
        return number

    def time_us(self, key: str, value: Any, unit_us: int) -> int:  # noqa: ANN401  # text or JSON
        try:
            number = float(value) if isinstance(value, (str, int, float)) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.problem(key, f"must be a time, not {shown(value)}")
        time_us = round(number * unit_us)
        if not 0 <= time_us <= MOST_DURATION_US:
            raise self.problem(key, f"must be 0 to {MOST_DURATION_US // unit_us:,}, not {shown(value)}")
        return time_us


def _csv(path: Path, needed: tuple[str, ...], known: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Rows by column name, with the number of their line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        for column in needed:
            if column not in header:
                raise InvalidInput(str(path), "line 1", f"has no column {column}")
        for column in header:
            if column not in needed and column not in known:
                raise InvalidInput(str(path), "line 1", f"column {shown(column)} is not known")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                problem = f"has {len(row)} values, the header names {len(header)}"
                raise InvalidInput(str(path), f"line {reader.line_num}", problem)
            yield reader.line_num, dict(zip(header, row, strict=True))


def _timestamp_us(text: str, place: _Place) -> int:
    """Microseconds of `2023-11-16 18:17:03.9799600`, with an offset of zero or none."""
    whole, _, fraction = text.removesuffix("+00:00").partition(".")
    try:
        moment = datetime.fromisoformat(whole)
        microseconds = int((fraction + "000000")[:6]) if not fraction or fraction.isdecimal() else -1
    except ValueError:
        microseconds = -1
    if microseconds < 0:
        raise place.problem("TIMESTAMP", f"must be a time such as 2023-11-16 18:17:03.97, not {shown(text)}")
    since = moment.replace(tzinfo=None) - datetime(2000, 1, 1)  # noqa: DTZ001  # differences only
    seconds = since.days * 86_400 + since.seconds
    return seconds * 1_000_000 + microseconds
