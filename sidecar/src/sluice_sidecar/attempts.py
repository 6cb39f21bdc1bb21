"""Which attempt of its caller's a request is.

Pure. Must not know what is done about it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a request."""

    number: int = 0
    """Attempts made before, as the caller says; 0: the first, or a caller that does not tell."""
    body_key: bytes = b""
    """Equal for equal bodies of one tenant; empty where the caller tells the number itself."""


FIRST = Attempt()
