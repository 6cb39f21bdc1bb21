"""The pool of KV blocks: pure ids. Device memory behind an id is the runner's, and what a key means is its giver's.

A block is in exactly one place: held by requests (counted), cached (nobody holds it, but its content has a key and may
be asked for again), fenced (given back while a step that may write it is in flight), or free. Cached blocks count as
free: they are dropped when blocks are needed, the longest unused first, and of one chain the tail before the head.
Start reading at `grow` and `release`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sluice_engine.core.fit import blocks_for


class BlockPool:
    """Every block is in exactly one place; breaking that raises, it is never clamped away."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dropped_total = 0
        """Cached blocks that made room for others: the first rung of the memory ladder."""
        # A stack, lowest id on top: a pool that is hardly used touches few pages of memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, the next to be dropped first."""
        self._fenced: dict[int, list[int]] = {}
        self._settled_step = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be shared."""
        return len(self._unused)

    @property
    def num_fenced(self) -> int:
        """Blocks that were given back and wait for a step in flight."""
        return sum(map(len, self._fenced.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_tokens

    def freed_by(self, table: list[int]) -> int:
        """Blocks of `table` that nobody else holds: what would come free with it."""
        return sum(self._holders[block] == 1 for block in table)

    def missing(self, table: list[int], num_tokens: int) -> int:
        """Blocks that `table` still needs to hold `num_tokens`; never negative."""
        return max(0, blocks_for(num_tokens, self.block_tokens) - len(table))

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend `table` to hold `num_tokens`, or change nothing and return False."""
        missing = self.missing(table, num_tokens)
        if missing > self.num_free:
            return False
        free = self._free
        for _ in range(missing):
            block = free.pop() if free else self._drop()
            self._holders[block] = 1
            table.append(block)
        return True

    def release(self, table: list[int], *, fence: int | None = None) -> int:
        """Give all blocks of `table` back, empty it and return how many there were.

        With a `fence` (the last step in flight that may write them), they can be had again once that step is settled.
        Blocks with a key need no fence: their content was settled before they got it, and no step writes them again.

        Raises:
            RuntimeError: a block was not held; nothing is given back then.
        """
        holders, keys = self._holders, self._keys
        if len(set(table)) != len(table) or not all(holders[block] for block in table):
            raise RuntimeError(f"blocks freed twice: {table}")
        free = self._free
        if fence is not None and fence > self._settled_step:
            free = self._fenced.setdefault(fence, [])
        # From the tail, so that what is dropped first is what fewest others begin with.
        for block in reversed(table):
            holders[block] -= 1
            if holders[block]:
                continue
            key = keys[block]
            if key is None:
                free.append(block)
            else:
                self._set_unused(block, key)
        count = len(table)
        table.clear()
        return count

    def settled(self, step: int) -> None:
        """All steps up to this one were processed: what they fenced is free."""
        self._settled_step = step
        if self._fenced:
            for fence in sorted(self._fenced):
                if fence <= step:
                    self._free += self._fenced.pop(fence)

    def matching(self, keys: Iterable[bytes]) -> tuple[int, int]:
        """How many of these keys, from the first on, have a block; and how many of those blocks nobody holds."""
        found = unused = 0
        by_key, holders = self._by_key, self._holders
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            found += 1
            if not holders[block]:
                unused += 1
        return found, unused

    def share(self, table: list[int], keys: Iterable[bytes]) -> None:
        """Append the blocks of these keys to `table`, held once more each.

        Raises:
            KeyError: a key has no block: it was matched before other blocks were taken.
        """
        for block in [self._by_key[key] for key in keys]:
            if not self._holders[block]:
                del self._unused[block]
            self._holders[block] += 1
            table.append(block)

    def enter(self, block: int, key: bytes) -> None:
        """Name the content of a held block, which is settled and will not be written again.

        Where another block has that key already, it stays the one that is found.

        Raises:
            RuntimeError: nobody holds the block, or it has a key.
        """
        if not self._holders[block] or self._keys[block] is not None:
            raise RuntimeError(f"block {block} cannot be cached: it is not held, or is cached already")
        self._keys[block] = key
        self._by_key.setdefault(key, block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Take the keys of these held blocks away: their content must not be shared with anybody new."""
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None and self._by_key.get(key) == block:
                del self._by_key[key]

    def _set_unused(self, block: int, key: bytes) -> None:
        found = self._by_key.setdefault(key, block)
        if found == block:
            self._unused[block] = None
            return
        # The same content twice: the one that is found stays, as recent as if it had been the one in use. So a head is
        # never dropped before a tail.
        self._keys[block] = None
        self._free.append(block)
        if found in self._unused:
            self._unused.move_to_end(found)

    def _drop(self) -> int:
        block, _ = self._unused.popitem(last=False)
        key, self._keys[block] = self._keys[block], None
        assert key is not None, "a cached block has a key"
        del self._by_key[key]
        self.dropped_total += 1
        return block

    def free_ids(self) -> list[int]:
        """Ids of the blocks that hold nothing, for checks of the invariant."""
        return list(self._free)

    def cached_ids(self) -> list[int]:
        """Ids of the cached blocks, the next to be dropped first, for the same checks."""
        return list(self._unused)

    def fenced_ids(self) -> list[int]:
        """Ids of the blocks behind a fence, for the same checks."""
        return [block for blocks in self._fenced.values() for block in blocks]
