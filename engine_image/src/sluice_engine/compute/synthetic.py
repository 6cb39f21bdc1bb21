"""Plans of steps that nobody asked for: those that are timed, and the first, which shows that a model speaks.

It knows blocks and plans, and neither weights nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sluice_engine.core.fit import blocks_for
from sluice_engine.core.plan import NO_POSITIONS, DecodeBatch, ScheduledRequest, StepPlan, TableChange
from sluice_engine.core.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Pool:
    """What a step may use."""

    num_blocks: int
    block_tokens: int
    longest_tokens: int
    """Of one request."""


def first_plan(tokens: list[int], block_tokens: int) -> StepPlan:
    """All tokens in one chunk that samples, in the pool's first blocks."""
    table = TableChange(0, 0, tuple(range(blocks_for(len(tokens), block_tokens))))
    chunk = _chunk(tokens, slot=0, start=0)
    return StepPlan(0, _decodes(0), NO_POSITIONS, (chunk,), len(tokens), 0, table_changes=(table,))


def piece_plan(tokens: list[int], start: int, end: int, block_tokens: int) -> StepPlan:
    """Tokens [start, end) of one text, each in a row of its own that samples: what is likely after every one of them.

    All rows share the text's blocks, the pool's first; tokens before `start` lie there from the plans before.
    """
    blocks = tuple(range(blocks_for(len(tokens), block_tokens)))
    chunks = tuple(_chunk(tokens[: at + 1], slot=at - start, start=at) for at in range(start, end))
    tables = tuple(TableChange(chunk.slot, 0, blocks) for chunk in chunks)
    return StepPlan(0, _decodes(0), NO_POSITIONS, chunks, len(chunks), 0, table_changes=tables)


def synthetic_plan(
    pool: Pool, decode_requests: int, prefill_tokens: int, context_tokens: int, start_tokens: int
) -> StepPlan:
    """Decodes that attend to `context_tokens` in equal shares, and one chunk at `start_tokens`, as far as it fits.

    Tokens mean nothing. A chunk ends within a request's length; what is left of it begins another.
    """
    longest = pool.longest_tokens
    decoded = min(longest, max(1, context_tokens // max(1, decode_requests)))
    shares = [(decoded - 1, 1)] * decode_requests
    left = prefill_tokens
    while left > 0:
        shares.append((start_tokens, min(left, longest - start_tokens)))
        left -= shares[-1][1]
    chunks, tables = [], []
    next_block = 0
    for slot, (start, num_tokens) in enumerate(shares):
        num_blocks = blocks_for(start + num_tokens, pool.block_tokens)
        # Different blocks for each, as long as there are any: what is read twice comes from a processor's cache.
        tables.append(TableChange(slot, 0, tuple((next_block + i) % pool.num_blocks for i in range(num_blocks))))
        next_block += num_blocks
        if slot >= decode_requests:
            chunks.append(_chunk([0] * (start + num_tokens), slot, start))
    return StepPlan(
        0,
        _decodes(decode_requests),
        np.full(decode_requests, decoded - 1, dtype=np.int64),
        tuple(chunks),
        prefill_tokens,
        context_tokens,
        table_changes=tuple(tables),
    )


def _chunk(tokens: list[int], slot: int, start: int) -> ScheduledRequest:
    request = Request("synthetic", tokens, len(tokens), SamplingParams(max_tokens=1, temperature=0.0), 0)
    return ScheduledRequest(request, 0, slot, start, len(tokens) - start, samples=True)


def _decodes(count: int) -> DecodeBatch:
    nobody = np.full(count, None, dtype=object)
    numbers = np.zeros(count, dtype=np.int64)
    return DecodeBatch(
        slots=np.arange(count),
        tenures=numbers,
        incarnations=numbers,
        requests=nobody,
        ids=nobody,
        plain=True,
        penalised=False,
    )
