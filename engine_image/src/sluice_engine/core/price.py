"""What a preemption costs, both ways it can be done: computing the state again, or moving it to the host and back.

Pure functions over measured numbers: step times beside other work, the link in both directions, what is queued on it,
how full the host pool is. The record keeps both prices and why one was taken. Start reading at `price`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from sluice_engine.config import Resume
from sluice_engine.core.fit import blocks_for, chunks_of
from sluice_engine.core.steptime import StepTimes

# Planning figures for a swap: 4,000 tokens of 320 KiB are 1.22 GiB, which this link moves in 25 ms each way, so that
# out and back take the 50 ms of docs/worked-example.md: about what PCIe 5.0 x16 gives. At 25 GB/s it would be 105 ms.
PLANNING_LINK_BYTES_PER_S = 52_428_800_000

# Planning bytes of one token's KV, for the same example: 320 KiB.
PLANNING_TOKEN_BYTES = 320 * 1024

PriceReason = Literal["cheaper", "set", "no_host_pool", "host_pool_full", "nothing_computed"]
"""`set`: `preemption.resume` leaves no choice. The others are about swapping."""


class Link(Protocol):
    """The measured way between device and host."""

    def out_us(self, num_blocks: int) -> int:
        """µs to copy blocks to the host."""
        ...

    def in_us(self, num_blocks: int) -> int:
        """µs to copy them back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """The host pool as it is now."""

    free_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPrice:
    """Both prices of one preemption, and which was taken."""

    recompute_us: int
    """Computing the state again beside other work."""
    swap_us: int | None
    """Copies, what is queued ahead of them, and the room held on the host; None where it cannot be swapped."""
    choice: Literal["recompute", "swap"]
    reason: PriceReason
    copy_us: int = 0
    """Of the swap: out and back."""
    queued_us: int = 0
    """Of the swap: what the link has to do first."""
    holding_us: int = 0
    """Of the swap: what its room on the host costs others while it is away."""

    @property
    def us(self) -> int:
        """The price of what was chosen."""
        return self.recompute_us if self.choice == "recompute" or self.swap_us is None else self.swap_us


def price(
    num_computed: int,
    block_tokens: int,
    recompute_us: int,
    *,
    resume: Resume = "Auto",
    link: Link | None = None,
    host: HostRoom | None = None,
    queued_us: int = 0,
    suspension_us: int = 0,
) -> PreemptionPrice:
    """Which way of losing `num_computed` tokens of state is the cheaper, and why.

    A swapped request holds its part of the host pool for as long as it is away. What that costs grows with its part,
    with the time, and with how full the pool is: holding a small part of an empty pool is as good as free, and filling
    the pool keeps every later victim from swapping. So short suspensions favour the swap and long queues the recompute.

    Args:
        num_computed: tokens whose KV it holds.
        block_tokens: tokens of one block.
        recompute_us: what computing them again costs (`recompute_us`).
        resume: what the user leaves open. `Swap` is obeyed wherever there is room on the host.
        link: the measured way to the host; None where there is none.
        host: the host pool.
        queued_us: copies that the link has been given and has not made.
        suspension_us: how long a preempted request is away, as measured lately.
    """
    if not num_computed:
        return PreemptionPrice(recompute_us=0, swap_us=None, choice="recompute", reason="nothing_computed")
    blocks = blocks_for(num_computed, block_tokens)
    if link is None or host is None or not host.total_blocks:
        return PreemptionPrice(recompute_us=recompute_us, swap_us=None, choice="recompute", reason="no_host_pool")
    if blocks > host.free_blocks:
        return PreemptionPrice(recompute_us=recompute_us, swap_us=None, choice="recompute", reason="host_pool_full")
    copy_us = link.out_us(blocks) + link.in_us(blocks)
    filled = host.total_blocks - host.free_blocks + blocks
    holding_us = suspension_us * blocks * filled // host.total_blocks**2
    swap_us = copy_us + queued_us + holding_us
    chosen: Literal["recompute", "swap"] = "swap" if swap_us < recompute_us else "recompute"
    if resume != "Auto":
        chosen = "swap" if resume == "Swap" else "recompute"
    return PreemptionPrice(
        recompute_us=recompute_us,
        swap_us=swap_us,
        choice=chosen,
        reason="cheaper" if resume == "Auto" else "set",
        copy_us=copy_us,
        queued_us=queued_us,
        holding_us=holding_us,
    )


def recompute_us(
    num_computed: int, times: StepTimes, *, chunk_tokens: int, decode_requests: int, context_tokens: int
) -> int:
    """What computing so many tokens again costs the others: each step with its chunk less the same step without."""
    without = times.predict_us(decode_requests, 0, context_tokens)
    return sum(
        # Each later chunk attends to all that was computed before it.
        max(0, times.predict_us(decode_requests, tokens, context_tokens, tokens * start) - without)
        for tokens, start in chunks_of(num_computed, chunk_tokens)
    )
