"""How many KV blocks fit: arithmetic over what is free, what is asked for, and what steps were measured to need."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_engine.config import CacheConfig
from sluice_engine.errors import InvalidConfig

# What a library takes after the measurement (its workspaces, a kernel loaded late), and what fragments are lost.
MARGIN_BYTES = 256 << 20
MARGIN_PERCENT = 5


@dataclass(frozen=True, slots=True)
class Reserve:
    """Device memory beside weights and pool, as measured."""

    step_bytes: int = 0
    """The most that the largest step held at once."""
    first_graph_bytes: int = 0
    """What recording the largest decode step took."""
    next_graph_bytes: int = 0
    """What each smaller one took beside it."""
    num_graphs: int = 0

    @property
    def graph_bytes(self) -> int:
        """Of all recordings."""
        return self.first_graph_bytes + max(0, self.num_graphs - 1) * self.next_graph_bytes if self.num_graphs else 0

    @property
    def total_bytes(self) -> int:
        """With the margin; 0 where nothing was measured."""
        measured = self.step_bytes + self.graph_bytes
        return measured + max(MARGIN_BYTES, measured * MARGIN_PERCENT // 100) if measured else 0

    @property
    def free_bytes(self) -> int:
        """What of it is free between steps, and has to stay so: recordings hold theirs."""
        return self.total_bytes - self.graph_bytes


NO_RESERVE = Reserve()


def num_blocks(cache: CacheConfig, block_bytes: int, free_bytes: int, reserve: Reserve = NO_RESERVE) -> int:
    """Blocks that the pool hands out; one more, for scratch, comes out of the same memory.

    Raises:
        InvalidConfig: what is set is not there, or too little for the shortest request.
    """
    least = 2 * block_bytes
    left = max(0, free_bytes - reserve.total_bytes)
    beside = f"beside the weights{_and_steps(reserve)}"
    if cache.capacity_bytes is not None:
        if cache.capacity_bytes < least:
            raise InvalidConfig("cache.capacity_bytes", f"is {cache.capacity_bytes}; this model needs at least {least}")
        if cache.capacity_bytes > left:
            raise InvalidConfig("cache.capacity_bytes", f"is {cache.capacity_bytes}; {left} bytes are free {beside}")
        return cache.capacity_bytes // block_bytes - 1
    share = min(left, free_bytes * cache.memory_percent // 100)
    if share < least:
        raise InvalidConfig(
            "cache.memory_percent",
            f"{cache.memory_percent} % of the {free_bytes} bytes left {beside} is {share}; "
            f"this model needs at least {least}",
        )
    return share // block_bytes - 1


def num_host_blocks(wanted: int | None, block_bytes: int, free_bytes: int) -> int:
    """Blocks of host memory for swapped state.

    Raises:
        InvalidConfig: what is set is not there, or less than a block.
    """
    if wanted is None:
        return 0
    if wanted < block_bytes:
        raise InvalidConfig("cache.host_swap_bytes", f"is {wanted}; one block of this model is {block_bytes}")
    if wanted > free_bytes:
        raise InvalidConfig("cache.host_swap_bytes", f"is {wanted}; {free_bytes} bytes of host memory are free")
    return wanted // block_bytes


def _and_steps(reserve: Reserve) -> str:
    if not reserve.total_bytes:
        return ""
    return f" and the {reserve.total_bytes} that the largest step, recorded decode steps and a margin take"
