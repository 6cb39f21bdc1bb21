"""What it costs to move KV blocks between the device and the host: measured at start, used to price a swap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Times of copies, both ways; a copy of several blocks pays the fixed part once."""

    fixed_us: int
    out_ns_per_block: int
    """From the device to the host."""
    in_ns_per_block: int
    """From the host to the device."""

    def out_us(self, num_blocks: int) -> int:
        """µs to copy blocks to the host; 0 for none."""
        return self.fixed_us + -(-num_blocks * self.out_ns_per_block // 1000) if num_blocks else 0

    def in_us(self, num_blocks: int) -> int:
        """µs to copy blocks back; 0 for none."""
        return self.fixed_us + -(-num_blocks * self.in_ns_per_block // 1000) if num_blocks else 0
