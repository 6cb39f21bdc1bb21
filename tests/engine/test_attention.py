"""Attention over blocks, in whatever order they lie, equals plain attention over the tokens in a row."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.scripted import plan_of
from sluice_engine.compute.attention import KVCache, attend_chunk, attend_singles, plain
from sluice_engine.compute.inputs import StepBuilder
from sluice_engine.compute.step_inputs import StepInputs
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.plan import NO_POSITIONS, ScheduledRequest, StepPlan
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.model_files.architecture import Architecture

BLOCK_TOKENS, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 8, 40, 6, 2, 16
SHAPE = Architecture(
    vocab_size=10,
    hidden_size=HEADS * HEAD_DIM,
    intermediate_size=8,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_length_tokens=256,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
)
CPU = torch.device("cpu")


class Batch:
    """Requests with random keys and values, some computed already and written block by block."""

    def __init__(self, shares: list[tuple[int, int]], seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(SHAPE, NUM_BLOCKS, BLOCK_TOKENS, torch.float32, CPU)
        # What nobody wrote must not matter.
        self.cache.write(0, torch.arange(NUM_BLOCKS * BLOCK_TOKENS), self.random(NUM_BLOCKS * BLOCK_TOKENS, 1e4))
        ids = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(ids)
        free = iter(ids)
        self.keys_values = [self.random(start + num_tokens, 1.0) for start, num_tokens in shares]
        entries = []
        for slot, (start, num_tokens) in enumerate(shares):
            end = start + num_tokens
            request = Request(f"r{slot}", [0] * end, end, SamplingParams(max_tokens=1), 0)
            request.blocks = list(itertools.islice(free, blocks_for(end, BLOCK_TOKENS)))
            entries.append(ScheduledRequest(request, 0, slot, start, num_tokens, samples=True))
            for position in range(start):
                block, offset = request.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                row = torch.tensor([block * BLOCK_TOKENS + offset])
                self.cache.write(0, row, self.keys_values[slot][position : position + 1])
        self.plan = plan_of(1, *entries)

    def random(self, rows: int, scale: float) -> Tensor:
        values: Tensor = torch.randn(rows, 2 * KV_HEADS * HEAD_DIM, generator=self.generator) * scale
        return values

    def ordered(self) -> list[ScheduledRequest]:
        """The requests in the order of the batch's rows: single tokens, longest first, then chunks."""
        singles = [entry for entry in self.plan.scheduled if entry.num_tokens == 1]
        chunks = [entry for entry in self.plan.scheduled if entry.num_tokens > 1]
        return sorted(singles, key=lambda entry: -entry.start) + chunks


def built(builder: StepBuilder, plan: StepPlan) -> StepInputs:
    builder.adopt(plan.table_changes)
    return builder.build(plan)


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 5, 30]),
    seed=st.integers(0, 99),
)
def test_attention_over_blocks_equals_plain_attention(
    shares: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    batch = Batch(shares, seed)
    inputs = built(StepBuilder(BLOCK_TOKENS, 256, torch.float32, CPU, window=window), batch.plan)
    ordered = batch.ordered()
    fresh = torch.cat([batch.keys_values[entry.slot][entry.start :] for entry in ordered])
    q = torch.randn(len(fresh), HEADS, HEAD_DIM, generator=batch.generator)
    batch.cache.write(0, inputs.kv_rows, fresh)

    own = fresh.view(-1, 2, KV_HEADS, HEAD_DIM)
    attended = [
        attend_singles(q[bucket.first : bucket.first + bucket.num_rows], bucket, batch.cache, 0, window)
        for bucket in inputs.singles
    ]
    for chunk in inputs.chunks:
        rows = slice(chunk.first, chunk.first + chunk.num_rows)
        attended.append(attend_chunk(q[rows], own[rows], chunk, batch.cache, 0, window))

    expected, first = [], 0
    for entry in ordered:
        keys_values = batch.keys_values[entry.slot].view(-1, 2, KV_HEADS, HEAD_DIM)
        rows = slice(first, first := first + entry.num_tokens)
        expected.append(plain(q[rows], keys_values[:, 0], keys_values[:, 1], entry.start, window))
    torch.testing.assert_close(torch.cat(attended), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_every_sampling_row_is_found_again_among_the_last_layer_s_rows() -> None:
    batch = Batch([(3, 5), (20, 1), (9, 1), (0, 12)], 1)
    inputs = built(StepBuilder(BLOCK_TOKENS, 256, torch.float32, CPU), batch.plan)

    # Rows: slot 1, slot 2 (singles, longest first), slot 0's five, slot 3's twelve.
    expected = {1: 0, 2: 1, 0: 6, 3: 18}
    assert inputs.sampled.tolist() == [1, 3, 2, 0]  # by length: 21, 12, 10, 8
    assert inputs.sample_rows.tolist() == [expected[slot] for slot in inputs.sampled.tolist()]
    assert sum(bucket.num_rows for bucket in inputs.sample_buckets) == 4


def test_decodes_alone_are_built_as_any_single_rows_are() -> None:
    """The short way says the same as the long one, adapters aside, of which there are none."""
    batch = Batch([(3, 1), (20, 1), (9, 1), (20, 1), (0, 1)], 1)
    builder = StepBuilder(BLOCK_TOKENS, 256, torch.float32, CPU, tile_rows=4)
    builder.adopt(batch.plan.table_changes)
    shares = batch.plan.scheduled
    for share in shares:
        share.request.tokens[-1] = share.slot
    slots = np.array([share.slot for share in shares])
    starts = np.array([share.start for share in shares])
    tokens = np.array([share.tokens[-1] for share in shares])
    short = builder.inputs(slots, starts, tokens, ())
    long = builder.inputs(NO_POSITIONS, NO_POSITIONS, NO_POSITIONS, shares)
    assert short.sampled.tolist() == long.sampled.tolist() == [1, 3, 2, 0, 4]
    for name in ("token_ids", "positions", "kv_rows", "sample_rows"):
        assert torch.equal(getattr(short, name), getattr(long, name)), name
    for name in ("tiles", "sample_tiles"):
        mine, theirs = getattr(short, name), getattr(long, name)
        assert torch.equal(mine.tables, theirs.tables)
        assert torch.equal(mine.rows, theirs.rows)
        assert mine.max_tokens == theirs.max_tokens
    assert [short.singles, short.chunks, short.sample_buckets] == [(), (), ()]
    with pytest.raises(AssertionError, match="no block holds"):
        builder.inputs(slots, starts + BLOCK_TOKENS, tokens, ())


def test_a_table_that_grows_is_appended_to_and_a_preempted_one_written_anew() -> None:
    builder = StepBuilder(BLOCK_TOKENS, 256, torch.float32, CPU)
    request = Request("r", [0] * 30, 30, SamplingParams(max_tokens=1), 0)

    def kv_rows(incarnation: int, position: int) -> list[int]:
        entry = ScheduledRequest(request, incarnation, 0, position, 1, samples=True)
        rows: list[int] = built(builder, plan_of(1, entry)).kv_rows.tolist()
        return rows

    request.blocks = [5]
    assert kv_rows(0, 7) == [5 * BLOCK_TOKENS + 7]
    request.blocks.append(2)
    assert kv_rows(0, 8) == [2 * BLOCK_TOKENS]
    request.blocks = [1, 9]
    assert kv_rows(1, 8) == [9 * BLOCK_TOKENS]


def test_a_request_whose_blocks_do_not_reach_its_tokens_is_a_broken_plan() -> None:
    request = Request("r", [0] * 30, 30, SamplingParams(max_tokens=1), 0)
    request.blocks = [0]
    entry = ScheduledRequest(request, 0, 0, 8, 1, samples=True)
    with pytest.raises(AssertionError, match="no block holds"):
        built(StepBuilder(BLOCK_TOKENS, 256, torch.float32, CPU), plan_of(1, entry))
