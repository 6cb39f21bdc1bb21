"""What was seen of the room for one call, and what keeps it out.

Must not know how it was reckoned, nor what is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_sidecar.errors import Reason


@dataclass(frozen=True, slots=True)
class Held:
    """What keeps a request out now."""

    reason: Reason
    problem: str
    """The middle of a sentence."""
    wait_us: int | None
    """Measured time until there is room; None while the drain is unmeasured."""
    by_itself: bool = False
    """There is room; it asks for more than is promised to all."""


@dataclass(slots=True)
class Look:
    """What the door saw of the room for one call; None is what a cheaper test made needless."""

    inside: int
    sequences: int | None = None
    peak_blocks: int | None = None
    """The future peak with this call."""
    ceiling_blocks: int | None = None
    predicted_ttft_us: int | None = None
    """From now, the bias included."""
    unbiased_ttft_us: int | None = None
    """From now, by the step times alone: what the bias is learned from."""
    promised_ttft_us: int | None = None
    waited_us: int = 0
    """Of the promise, what has gone by."""
    predicted_finish_us: int | None = None
    """From now to the last token that is expected of it, what was learned included."""
    held: Held | None = None
    """What keeps it out; None when there is room."""
