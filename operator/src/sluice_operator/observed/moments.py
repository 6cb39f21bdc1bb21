"""Times as Kubernetes writes them, and the seconds between two of them. Pure."""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Mapping
from typing import Any

_MOMENT = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(\.\d+)?Z")


def seconds_between(earlier: str, later: str) -> float:
    """Seconds from one time to another; endless where one is not known."""
    first, second = _MOMENT.fullmatch(earlier), _MOMENT.fullmatch(later)
    return _seconds(second) - _seconds(first) if first and second else math.inf


def ago(earlier: str, now: str) -> str:
    """How long ago, for people; empty where it is not known."""
    passed = seconds_between(earlier, now)
    if passed == math.inf:
        return ""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if passed >= 2 * length:
            return f"{passed // length:.0f} {unit} ago"
    return f"{max(0, passed):.0f} s ago"


def last_told(event: Mapping[str, Any]) -> str:
    """When an Event was told last; empty where that is not known."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _seconds(match: re.Match[str]) -> float:
    year, month, day, hour, minute, second = (int(match[group]) for group in range(1, 7))
    return calendar.timegm((year, month, day, hour, minute, second)) + float(match[7] or 0)
