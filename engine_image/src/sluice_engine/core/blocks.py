"""The pool of KV blocks: pure ids. Device memory behind an id is the runner's."""

from __future__ import annotations

from sluice_engine.core.fit import blocks_for


class BlockPool:
    """Every block is free or held by exactly one request; breaking that raises, it is never clamped away."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        # A stack, lowest id on top: a pool that is hardly used touches few pages of memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_tokens

    def missing(self, table: list[int], num_tokens: int) -> int:
        """Blocks that `table` still needs to hold `num_tokens`; never negative."""
        return max(0, blocks_for(num_tokens, self.block_tokens) - len(table))

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend `table` to hold `num_tokens`, or change nothing and return False."""
        missing = self.missing(table, num_tokens)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
            self._held[block] = 1
            table.append(block)
        return True

    def release(self, table: list[int]) -> int:
        """Free all blocks of `table`, empty it and return how many there were.

        Raises:
            RuntimeError: a block was not held; nothing is freed then.
        """
        if len(set(table)) != len(table) or not all(self._held[block] for block in table):
            raise RuntimeError(f"blocks freed twice: {table}")
        for block in reversed(table):
            self._held[block] = 0
            self._free.append(block)
        count = len(table)
        table.clear()
        return count

    def free_ids(self) -> list[int]:
        """The free ids, for checks of the invariant."""
        return list(self._free)
