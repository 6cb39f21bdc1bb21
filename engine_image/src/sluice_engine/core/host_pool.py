"""Where swapped-out requests keep their KV: host blocks, as pure ids, and the copies that a step has to make for them.

A request that is swapped out gives its device blocks back and keeps its progress. It holds as many host blocks as its
computed tokens filled, and when it enters again they are copied into device blocks that it was given, so nothing is
computed twice. The copies are pairs (device block, host block) in the step's plan: the runner makes all copies out,
then all copies in, then computes. What a step reads or writes on the host is had again only when that step is settled.
Start reading at `swap_out` and `swap_in`.
"""

from __future__ import annotations

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.request import Request

Copies = tuple[tuple[int, int], ...]
"""(device block, host block), whichever way."""


class HostPool:
    """Host blocks within a budget; every one is free or held by one request that is swapped out."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._pool = BlockPool(num_blocks, block_tokens)
        self.swaps_total = 0
        """Requests swapped out."""
        self.blocks_out_total = 0
        self.blocks_in_total = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the budget; 0 where nothing is ever swapped."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once."""
        return self._pool.num_free

    def room_for(self, num_tokens: int) -> bool:
        """Whether a request with so many computed tokens could be swapped out now."""
        return 0 < blocks_for(num_tokens, self._pool.block_tokens) <= self._pool.num_free

    def swap_out(self, request: Request) -> Copies:
        """The copies that take a request's computed tokens to the host. Its device blocks are still to be released.

        Raises:
            RuntimeError: there is no room, or nothing to keep, or it is swapped out already.
        """
        if request.host_blocks or not self.room_for(request.num_computed):
            raise RuntimeError(f"request {request.id} cannot be swapped out: {self.num_free} host blocks are free")
        self._pool.grow(request.host_blocks, request.num_computed)
        self.swaps_total += 1
        self.blocks_out_total += len(request.host_blocks)
        return tuple(zip(request.blocks, request.host_blocks, strict=False))

    def swap_in(self, request: Request, *, first: int, step: int) -> Copies:
        """The copies that bring a request's state back in this step, into the device blocks it holds now.

        The blocks before `first` need none: they were found in the prefix cache.
        """
        copies = tuple(zip(request.blocks[first:], request.host_blocks[first:], strict=False))
        self.blocks_in_total += len(copies)
        self._pool.release(request.host_blocks, fence=step)
        return copies

    def drop(self, request: Request) -> None:
        """Give up what a request keeps here, if anything: it ended, or its copy cannot be trusted.

        A step that is still copying does no harm: copies out are made in the order of plans.
        """
        self._pool.release(request.host_blocks)

    def settled(self, step: int) -> None:
        """All steps up to this one were processed: what they copied from can be had again."""
        self._pool.settled(step)

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, for checks of the invariant."""
        return self._pool.free_ids()

    def fenced_ids(self) -> list[int]:
        """Ids of the blocks behind a fence, for the same checks."""
        return self._pool.fenced_ids()
