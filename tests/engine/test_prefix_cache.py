"""Blocks that requests share: what is found, what is never found, what is dropped, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.prefix_cache import PrefixCache, PrefixHit
from sluice_engine.core.request import Request, SamplingParams

BLOCK_TOKENS = 4


def make(tokens: list[int], tenant: str = "") -> Request:
    return Request("r", list(tokens), len(tokens), SamplingParams(max_tokens=100), 0, tenant=tenant)


def enter(cache: PrefixCache, request: Request) -> PrefixHit | None:
    """What the scheduler does when a request enters; None, and nothing done, when there is no room."""
    pool = cache._pool
    hit = cache.match(request)
    if pool.missing([], request.num_tokens) - hit.num_blocks + hit.num_unused > pool.num_free:
        return None
    cache.take(request, hit)
    assert pool.grow(request.blocks, request.num_tokens), "entry was checked"
    return hit


def hold(pool: BlockPool, num_tokens: int) -> list[int]:
    table: list[int] = []
    assert pool.grow(table, num_tokens)
    return table


def compute(cache: PrefixCache, request: Request, num_tokens: int) -> None:
    """What the scheduler does when a step of the request is settled."""
    request.num_computed += num_tokens
    cache.settle(request, request.num_computed)


def leave(cache: PrefixCache, request: Request) -> None:
    cache._pool.release(request.blocks)
    request.num_computed = 0


def warmed(
    tokens: list[int], *, tenant: str = "", num_blocks: int = 16, block_tokens: int = BLOCK_TOKENS
) -> PrefixCache:
    """A cache that computed one request's tokens; the request has left."""
    cache = PrefixCache(BlockPool(num_blocks, block_tokens))
    request = make(tokens, tenant)
    enter(cache, request)
    compute(cache, request, len(tokens))
    leave(cache, request)
    return cache


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        pytest.param(list(range(10)), 8, id="whole-blocks-of-the-same-prompt"),
        pytest.param(list(range(8)), 4, id="the-last-known-token-is-always-computed"),
        pytest.param(list(range(9)), 8, id="one-token-past-the-last-block-is-enough-to-compute"),
        pytest.param([*range(8), 99, 98], 8, id="as-far-as-the-tokens-agree"),
        pytest.param([0, 1, 2, 99, *range(4, 12)], 0, id="nothing-behind-the-first-difference"),
        pytest.param(list(range(4, 12)), 0, id="nothing-of-the-same-tokens-at-another-place"),
        pytest.param([5], 0, id="a-single-token-has-no-prefix"),
    ],
)
def test_what_a_request_finds(asked: list[int], found: int) -> None:
    cache = warmed(list(range(10)))

    hit = enter(cache, request := make(asked))

    assert hit is not None
    assert (hit.num_tokens, request.num_computed, request.num_cached_tokens) == (found, found, found)


def test_tenants_never_find_each_other_s_blocks() -> None:
    cache = warmed(list(range(10)), tenant="green")

    assert cache.match(make(list(range(10)), "green")).num_tokens == 8
    assert cache.match(make(list(range(10)), "blue")).num_tokens == 0
    assert cache.match(make(list(range(10)))).num_tokens == 0


def test_adapters_never_find_each_other_s_blocks() -> None:
    cache = warmed(list(range(10)), tenant="green")
    for adapter, found in (("", 2), ("sql#1", 0)):
        request = make(list(range(10)), "green")
        request.adapter = adapter
        assert cache.match(request).num_blocks == found
    # Nor is a tenant's name taken for an adapter's key.
    for tenant, adapter in (("greensql#1", ""), ("", "greensql#1")):
        request = make(list(range(10)), tenant)
        request.adapter = adapter
        assert cache.match(request).num_blocks == 0


def test_a_key_depends_on_tenant_block_size_and_every_token_before_it() -> None:
    def keys(tokens: list[int], tenant: str, block_tokens: int) -> list[bytes]:
        cache = PrefixCache(BlockPool(16, block_tokens))
        cache.match(request := make(tokens, tenant))
        return request.block_keys

    variants = [
        keys(list(range(33)), "", 8),
        keys([7, *range(1, 33)], "", 8),
        keys(list(range(33)), "green", 8),
        keys(list(range(33)), "", 16),
    ]

    assert [len(each) for each in variants] == [4, 4, 4, 2]
    assert len({key for each in variants for key in each}) == 14, "no two are equal"
    assert keys(list(range(33)), "green", 8) == variants[2], "and the same content has the same keys"


def test_keys_made_block_by_block_are_those_made_at_once() -> None:
    cache = PrefixCache(BlockPool(16, BLOCK_TOKENS))
    slow, fast = make(list(range(2))), make(list(range(23)))
    enter(cache, slow)
    for token in range(2, 23):
        slow.tokens.append(token)
        cache._pool.grow(slow.blocks, slow.num_tokens)
        compute(cache, slow, slow.num_tokens - 1 - slow.num_computed)
    cache.match(fast)

    assert slow.block_keys == fast.block_keys[: len(slow.block_keys)]
    assert len(slow.block_keys) == 5


def test_only_settled_tokens_are_found() -> None:
    cache = PrefixCache(BlockPool(16, BLOCK_TOKENS))
    enter(cache, request := make(list(range(10))))
    assert cache.match(make(list(range(10)))) == PrefixHit(0, 0, 0), "nothing is computed yet"

    compute(cache, request, 7)

    assert cache.match(make(list(range(10)))) == PrefixHit(1, 4, 0), "the second block is not full"


def test_a_running_request_shares_its_blocks_and_both_count() -> None:
    cache = PrefixCache(pool := BlockPool(16, BLOCK_TOKENS))
    enter(cache, first := make(list(range(10))))
    compute(cache, first, 10)
    enter(cache, second := make(list(range(10))))
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]

    leave(cache, first)

    assert (pool.num_free, pool.num_cached) == (13, 0), "the second still holds what it shares"
    leave(cache, second)
    assert (pool.num_free, pool.num_cached) == (16, 2)


def test_cached_blocks_are_dropped_for_room_tails_first_and_the_shared_head_survives() -> None:
    cache = PrefixCache(pool := BlockPool(8, BLOCK_TOKENS))
    head = list(range(4))
    for tail in (100, 200):
        enter(cache, request := make([*head, *range(tail, tail + 8)]))
        compute(cache, request, request.num_tokens - request.num_computed)
        leave(cache, request)
    assert pool.num_cached == 5, "one head, two tails of two"

    table = hold(pool, 6 * BLOCK_TOKENS)

    assert pool.dropped_total == 3
    assert cache.match(make([*head, *range(100, 110)])).num_blocks == 1, "the tail used longest ago went whole"
    assert cache.match(make([*head, *range(200, 210)])).num_blocks == 2, "of the other one the end"
    pool.release(table)


def test_a_head_that_others_computed_again_is_not_dropped_before_its_tails() -> None:
    """Two requests that begin alike enter together, so both compute the head; the second one's copy is not kept."""
    cache = PrefixCache(pool := BlockPool(8, BLOCK_TOKENS))
    first, second = make([*range(4), *range(50, 54)]), make([*range(4), *range(60, 64)])
    enter(cache, first)
    enter(cache, second)
    for request in (first, second):
        compute(cache, request, 8)
        leave(cache, request)
    assert pool.num_cached == 3

    assert pool.grow([], 7 * BLOCK_TOKENS)

    assert cache.match(make([*range(4), *range(60, 64), 1])).num_blocks == 1, "what is left is the head"


def test_a_copy_takes_the_place_of_the_block_that_was_dropped_meanwhile() -> None:
    cache = PrefixCache(pool := BlockPool(6, BLOCK_TOKENS))
    first, second = make(list(range(5))), make(list(range(5)))
    enter(cache, first)
    enter(cache, second)
    compute(cache, first, 5)
    compute(cache, second, 5)
    leave(cache, first)
    table = hold(pool, 4 * BLOCK_TOKENS)
    assert pool.dropped_total == 1

    leave(cache, second)

    assert cache.match(make(list(range(5)))).num_blocks == 1
    pool.release(table)


def test_cached_blocks_count_as_free_and_what_a_hit_takes_is_not_counted_twice() -> None:
    cache = warmed(list(range(8)), num_blocks=3)
    assert cache._pool.num_free == 3

    enter(cache, request := make(list(range(12))))

    assert (len(request.blocks), request.num_computed, cache._pool.num_free) == (3, 8, 0)


def test_a_hit_is_counted_once_for_each_request_however_often_entry_was_tried() -> None:
    cache = warmed(list(range(8)), num_blocks=4)
    other = hold(cache._pool, 8)
    request = make(list(range(13)))
    for _ in range(5):
        assert enter(cache, request) is None, "no room"
    cache._pool.release(other)
    queried = cache.queried_tokens_total
    enter(cache, request)
    compute(cache, request, 5)
    leave(cache, request)
    request.num_preemptions += 1

    enter(cache, request)

    assert (cache.queried_tokens_total - queried, cache.hit_tokens_total, cache.hits_total) == (13, 8, 1)
    assert cache.resumed_tokens_total == 12
    assert request.num_cached_tokens == 8, "what the caller is told is the first entry's"


def test_what_a_failed_request_left_is_never_found() -> None:
    cache = PrefixCache(pool := BlockPool(8, BLOCK_TOKENS))
    enter(cache, request := make(list(range(10))))
    compute(cache, request, 10)

    cache.forget(request)
    leave(cache, request)

    assert cache.match(make(list(range(10)))).num_blocks == 0
    assert (pool.num_free, pool.num_cached) == (8, 0)


def test_a_cache_that_is_off_finds_and_keeps_nothing() -> None:
    cache = PrefixCache(pool := BlockPool(8, BLOCK_TOKENS), enabled=False)
    enter(cache, request := make(list(range(10))))
    compute(cache, request, 10)
    leave(cache, request)

    assert cache.match(make(list(range(10)))).num_blocks == 0
    assert (pool.num_cached, request.block_keys) == (0, [])


def test_a_fenced_block_is_had_again_only_when_its_step_is_settled() -> None:
    pool = BlockPool(2, BLOCK_TOKENS)
    pool.settled(4)
    table = hold(pool, 8)

    pool.release(table, fence=6)

    assert (pool.num_free, pool.num_fenced) == (0, 2)
    pool.settled(5)
    assert not pool.grow([], 4)
    pool.settled(6)
    assert (pool.num_free, pool.num_fenced) == (2, 0)
    assert pool.grow([], 8)


def test_a_fence_of_a_step_that_is_settled_already_holds_nothing_back() -> None:
    pool = BlockPool(2, BLOCK_TOKENS)
    pool.settled(6)
    table = hold(pool, 8)

    pool.release(table, fence=6)

    assert pool.num_free == 2


def test_a_block_that_can_be_found_needs_no_fence() -> None:
    cache = PrefixCache(pool := BlockPool(4, BLOCK_TOKENS))
    enter(cache, request := make(list(range(6))))
    compute(cache, request, 6)

    pool.release(request.blocks, fence=9)

    assert (pool.num_free, pool.num_cached, pool.num_fenced) == (3, 1, 1)


@pytest.mark.parametrize("wrong", ["twice-in-one-table", "not-held"])
def test_a_wrong_release_raises_and_changes_nothing(wrong: str) -> None:
    pool = BlockPool(4, BLOCK_TOKENS)
    table = hold(pool, 8)
    bad = [table[0], table[0]] if wrong == "twice-in-one-table" else [table[0], 3]

    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release(bad)

    assert pool.num_free == 2
    pool.release(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release([0])


def test_a_block_that_nobody_holds_or_that_has_a_key_is_given_none() -> None:
    pool = BlockPool(4, BLOCK_TOKENS)
    with pytest.raises(RuntimeError, match="not held"):
        pool.enter(0, b"key")
    table = hold(pool, 4)
    pool.enter(table[0], b"key")
    with pytest.raises(RuntimeError, match="cached already"):
        pool.enter(table[0], b"other")


class Machine(RuleBasedStateMachine):
    """Any order of entries, steps, ends, preemptions, failures and fences, over prompts that often begin alike."""

    @initialize(num_blocks=st.integers(1, 14), block_tokens=st.sampled_from([1, 2, 4]))
    def start(self, num_blocks: int, block_tokens: int) -> None:
        self.pool = BlockPool(num_blocks, block_tokens)
        self.cache = PrefixCache(self.pool)
        self.running: list[Request] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        """What a device would hold in each block: whose, and all tokens up to its end."""
        self.parents: dict[bytes, bytes] = {}
        self.orphaned: set[bytes] = set()
        self.step = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        tenant=st.sampled_from(["", "green"]),
    )
    def request_enters(self, tokens: list[int], tenant: str) -> None:
        request = make(tokens, tenant)
        before = self.pool.num_free
        hit = self.cache.match(request)
        assert hit == self.cache.match(request), "matching changes nothing"
        if enter(self.cache, request) is None:
            assert self.pool.num_free == before
            return
        assert hit.num_tokens < request.num_tokens
        assert self.pool.num_free == before - len(request.blocks) + hit.num_blocks - hit.num_unused
        for index in range(hit.num_blocks):
            end = (index + 1) * self.pool.block_tokens
            assert self.content[request.blocks[index]] == (tenant, tuple(tokens[:end])), "another content"
        for block in request.blocks[hit.num_blocks :]:
            self.content.pop(block, None)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), late=st.booleans())
    def step_settles(self, data: st.DataObject, num_tokens: int, late: bool) -> None:  # noqa: FBT001
        request = data.draw(st.sampled_from(self.running))
        computed = min(request.num_computed + num_tokens, request.num_tokens)
        for index in range(request.num_computed // self.pool.block_tokens, computed // self.pool.block_tokens):
            end = (index + 1) * self.pool.block_tokens
            self.content[request.blocks[index]] = (request.tenant, tuple(request.tokens[:end]))
        request.num_computed = computed
        if not late:
            self.cache.settle(request, computed)
        for parent, key in zip(request.block_keys, request.block_keys[1:], strict=False):
            self.parents[key] = parent

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def request_grows(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request.num_computed < request.num_tokens:
            return
        self.cache.settle(request, request.num_computed)
        held = len(request.blocks)
        if self.pool.grow(request.blocks, request.num_tokens + 1):
            request.tokens.append(token)
            for block in request.blocks[held:]:
                self.content.pop(block, None)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["ends", "fails", "leaves-a-step-in-flight"]))
    def request_leaves(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        if how == "fails":
            self.orphaned.update(request.block_keys)
            self.cache.forget(request)
        else:
            self.cache.settle(request, request.num_computed)
        self.step += 1
        self.pool.release(request.blocks, fence=self.step if how == "leaves-a-step-in-flight" else None)

    @rule()
    def steps_are_settled(self) -> None:
        self.pool.settled(self.step)
        assert not self.pool.num_fenced

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        held = [block for request in self.running for block in request.blocks]
        places = [*set(held), *pool.free_ids(), *pool.cached_ids(), *pool.fenced_ids()]
        assert sorted(places) == list(range(pool.num_blocks))
        assert [held.count(block) for block in range(pool.num_blocks)] == pool._holders
        assert pool.num_free == len(pool.free_ids()) + len(pool.cached_ids())

    @invariant()
    def a_key_leads_to_a_settled_block_with_that_key(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert all(pool._keys[block] == key for key, block in pool._by_key.items())
        assert all(block in self.content for block in pool._by_key.values())
        assert not any(pool._keys[block] for block in [*pool.free_ids(), *pool.fenced_ids()])
        assert all(pool._by_key[pool._keys[block] or b""] == block for block in pool.cached_ids())

    @invariant()
    def a_head_outlives_its_tails(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        place = {block: at for at, block in enumerate(pool.cached_ids())}
        for block, at in place.items():
            key = pool._keys[block] or b""
            parent = self.parents.get(key)
            if parent is not None and not self.orphaned & {key, parent}:
                head = pool._by_key[parent]
                assert pool._holders[head] or place[head] > at

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for request in self.running:
            self.pool.release(request.blocks)
        self.pool.settled(self.step)
        assert self.pool.num_free == self.pool.num_blocks, "nothing leaks"
        assert self.pool.grow([], self.pool.num_tokens), "and all of it can be had"
        assert not self.pool._by_key


TestPrefixCache = Machine.TestCase
TestPrefixCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
