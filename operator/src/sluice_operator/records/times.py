"""Times as people say them. Pure."""

from __future__ import annotations


def span(microseconds: int | None) -> str:
    """A time as people say it."""
    us = microseconds or 0
    if abs(us) < 1_000:
        return f"{us} µs"
    if abs(us) < 10_000:
        return f"{us / 1e3:.1f} ms"
    if abs(us) < 1_000_000:
        return f"{us / 1e3:.0f} ms"
    return f"{us / 1e6:.2f} s" if abs(us) < 10_000_000 else f"{us / 1e6:.1f} s"


def clock(microseconds: int) -> str:
    """A time since the arrival."""
    return f"{microseconds / 1e6:+.3f} s"
