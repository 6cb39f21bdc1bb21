"""Durations and quantities as Kubernetes writes them: text in, integer microseconds or bytes out, and back. Pure."""

from __future__ import annotations

import re

from sluice_operator.errors import InvalidSpec

_DURATION = re.compile(r"([0-9]{1,5}(?:h|m|s|ms)){1,4}")
_DURATION_PART = re.compile(r"([0-9]+)(h|ms|m|s)")
_MICROSECONDS = {"h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000}

_QUANTITY = re.compile(r"([0-9]+)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_ANY_QUANTITY = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([num]|[kMGTPE]|[KMGTPE]i))?")
_BELOW_ONE = {"n": 1e-9, "u": 1e-6, "m": 1e-3}
_BYTES: dict[str | None, int] = {
    None: 1,
    **{suffix: 1000 ** (i + 1) for i, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": 1024 ** (i + 1) for i, suffix in enumerate("KMGTPE")},
}


def parse_duration_us(text: str, field: str) -> int:
    """Microseconds of `2s`, `150ms`, `1m30s`.

    Raises:
        InvalidSpec: not such a text.
    """
    if not _DURATION.fullmatch(text):
        raise InvalidSpec(
            field, f"{text!r} is no duration: write numbers with the units h, m, s, ms, for example 150ms"
        )
    return sum(int(number) * _MICROSECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def format_duration(microseconds: int) -> str:
    """A duration for people, in the largest unit that keeps three digits: `840ms`, `2.5s`, `12ms`, `90s`."""
    if microseconds < 1_000_000:
        milliseconds = microseconds / 1000
        return f"{milliseconds:.0f}ms" if milliseconds >= 10 else f"{milliseconds:.1f}ms"
    seconds = microseconds / 1_000_000
    if seconds >= 100:
        return f"{seconds:.0f}s"
    return f"{seconds:.1f}".rstrip("0").rstrip(".") + "s"


def parse_quantity_bytes(value: str | int, field: str) -> int:
    """Bytes of `256Mi`, `2G` or a plain number.

    Raises:
        InvalidSpec: not such a text.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise InvalidSpec(field, f"{value!r} is no size: write a whole number with Ki, Mi, Gi, Ti, k, M, G or T")
    return int(match[1]) * _BYTES[match[2]]


def quantity_bytes(text: str) -> int | None:
    """Bytes of a quantity of Kubernetes' own, which may have a point and an exponent; None where it is none."""
    match = _ANY_QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    factor = 10.0 ** int(exponent) if exponent else _BELOW_ONE.get(suffix) or _BYTES[suffix]
    return int(float(number) * factor)
