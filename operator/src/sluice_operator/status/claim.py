"""What a condition claims. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A condition before it is dated."""

    status: str
    """True, False or Unknown."""
    reason: str
    """A stable word for programs."""
    message: str
    """A sentence for people."""
