"""Prompts that begin alike share KV blocks: keys for the content of blocks, and when a request may give or take them.

A block's key is a strong hash chained over everything before it: the tenant, the adapter, the block size, and all
token ids up to the block's end. So equal keys mean equal KV, no tenant finds what another computed, and a hit is a walk
over one chain. Only full blocks whose tokens are settled get a key, once; a request takes blocks only when it enters.
Which block is dropped when room is needed is the pool's. Start reading at `match`, `take` and `settle`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.request import Request
from sluice_engine.core.state import PrefixState

# 128 bits: a second content of the same key is out of reach, by chance or on purpose.
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What of a request's known tokens is computed already; valid until blocks are taken or given back."""

    num_blocks: int
    num_tokens: int
    """At most all but one: the last known token is always computed, or there would be nothing to sample from."""
    num_unused: int
    """Of the blocks, those that nobody holds: taking them takes as many from the pool's free ones."""


MISS = PrefixHit(0, 0, 0)


class PrefixCache:
    """The shared blocks of one pool, and the count of what they saved."""

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self.enabled = enabled
        """Without, nothing is ever found and nothing kept."""
        self._pool = pool
        self.queried_tokens_total = 0
        """Prompt tokens of requests when they first entered."""
        self.hit_tokens_total = 0
        """Of those, tokens found computed."""
        self.hits_total = 0
        """Requests that found at least one block when they first entered."""
        self.resumed_tokens_total = 0
        """Tokens that preempted requests found computed when they came back: saved, but no hits."""

    def match(self, request: Request) -> PrefixHit:
        """What a waiting request would find now. It changes nothing and counts nothing."""
        block_tokens = self._pool.block_tokens
        usable = (request.num_tokens - 1) // block_tokens
        if not usable or not self.enabled:
            return MISS
        self._extend_keys(request, usable)
        found, unused = self._pool.matching(islice(request.block_keys, usable))
        return PrefixHit(found, found * block_tokens, unused)

    def may_find_more(self, request: Request, hit: PrefixHit) -> bool:
        """Whether there are blocks of a request's known tokens that it could find computed, and does not yet."""
        return self.enabled and hit.num_blocks < (request.num_tokens - 1) // self._pool.block_tokens

    def take(self, request: Request, hit: PrefixHit) -> None:
        """Give a request that enters, and holds no block yet, what was found: before it takes blocks of its own.

        Counted once for each request, at its first entry.
        """
        assert not request.blocks, "a hit is taken before anything else"
        self._pool.share(request.blocks, islice(request.block_keys, hit.num_blocks))
        request.num_settled_blocks = hit.num_blocks
        saved = max(0, hit.num_tokens - request.num_computed)
        request.num_computed += saved
        if request.num_preemptions:
            self.resumed_tokens_total += saved
            return
        request.num_cached_tokens = hit.num_tokens
        self.queried_tokens_total += request.num_prompt
        self.hit_tokens_total += hit.num_tokens
        self.hits_total += hit.num_blocks > 0

    def settle(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks of a request's first `num_tokens` tokens, which are computed and processed.

        Worth a call only when a block was filled: after a prefill, before a decode takes a new block, and before the
        blocks are given back.
        """
        first, end = request.num_settled_blocks, num_tokens // self._pool.block_tokens
        if first >= end or not self.enabled:
            return
        self._extend_keys(request, end)
        for index in range(first, end):
            self._pool.enter(request.blocks[index], request.block_keys[index])
        request.num_settled_blocks = end

    def forget(self, request: Request) -> None:
        """A request failed, perhaps for what is in its blocks: nobody new gets them."""
        self._pool.forget(request.blocks)

    def state(self) -> PrefixState:
        """What was counted, and whether anything can be."""
        return PrefixState(
            enabled=self.enabled,
            hits_total=self.hits_total,
            queried_tokens_total=self.queried_tokens_total,
            hit_tokens_total=self.hit_tokens_total,
            resumed_tokens_total=self.resumed_tokens_total,
            dropped_blocks_total=self._pool.dropped_total,
        )

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        """Keys of the first blocks; tokens are only ever appended, so each is hashed once."""
        keys, size = request.block_keys, self._pool.block_tokens
        first = len(keys)
        if first >= num_blocks:
            return
        key = keys[-1] if keys else _root(request.tenant, request.adapter, size)
        ids = array("q", request.tokens[first * size : num_blocks * size])
        packed, width = ids.tobytes(), size * ids.itemsize
        for at in range(0, len(packed), width):
            key = blake2b(key + packed[at : at + width], digest_size=KEY_BYTES).digest()
            keys.append(key)


def _root(tenant: str, adapter: str, block_tokens: int) -> bytes:
    """Where the chains of a tenant begin, with each adapter elsewhere: what it makes of a token is another state.

    `person` keeps a tenant's name from being taken for an adapter's key, and either for a block's content.
    """
    key = blake2b(f"{block_tokens} {tenant}".encode(), digest_size=KEY_BYTES, person=b"tenant").digest()
    return blake2b(key + adapter.encode(), digest_size=KEY_BYTES, person=b"adapter").digest() if adapter else key
