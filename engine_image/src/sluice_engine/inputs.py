"""A step plan as tensors: what the model needs to know about the batch, frozen before the device sees it.

Owns the per-slot rows (block tables) that live as long as a request runs, so that a step's work follows what changed.
It knows no weights and no sampling. Requests that compute one token are *single* rows, longest first and batched
together; the others are *chunks*, one by one. Rows of the batch: all singles, then the chunks' tokens. Where kernels
read the cache in place, all that is needed of either is *tiles*, and there are no buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice_engine.core.fit import blocks_for
from sluice_engine.core.plan import ScheduledRequest, StepPlan
from sluice_engine.core.request import Request
from sluice_engine.kernels.library import Tiles

Ints = npt.NDArray[np.int64]

# Blocks of padding that cost as much as attending to one more bucket: kernels of about 60 µs a layer against copies of
# some 5 µs a block, on two cores.
_BUCKET_WORTH_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class SingleBucket:
    """Single rows [first, first + num_rows) of like length, attended to in one call."""

    first: int
    num_rows: int
    blocks: Tensor
    """[num_rows × M] block ids, row after row; padding repeats a valid id."""
    num_tokens: int
    """Tokens attended to: of the longest row."""
    mask: Tensor | None
    """[num_rows, 1, 1, M × block_tokens]: 0 or −inf in the model's type; None when no row is padded."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, first + num_rows): consecutive tokens of one request, the first at position `start`."""

    first: int
    num_rows: int
    start: int
    blocks: Tensor
    """Block ids of [0, start + num_rows); empty when nothing precedes the chunk."""
    mask: Tensor | None
    """[num_rows, start + num_rows]: 0 or −inf; None for a chunk that starts at 0, which is plainly causal."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the forward pass reads of a step. T rows, S of which sample."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    kv_rows: Tensor
    """[T]: where each token's KV is written: block × block_tokens + offset."""
    singles: tuple[SingleBucket, ...]
    chunks: tuple[Chunk, ...]
    sample_rows: Tensor
    """[S]: the batch's rows after which a token is sampled."""
    sample_buckets: tuple[SingleBucket, ...]
    """The sampling rows as single rows, in the order of `sample_rows`: the last layer computes only them."""
    sampled: tuple[ScheduledRequest, ...]
    """Who samples, in the order of `sample_rows`."""
    tiles: Tiles | None
    """All rows, for kernels; there are no buckets and no chunks then."""
    sample_tiles: Tiles | None
    """The sampling rows, in the order of `sample_rows`."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One request's share, resolved."""

    entry: ScheduledRequest
    table: Ints
    """Block ids of all tokens up to the last of this step."""

    @property
    def end(self) -> int:
        return self.entry.start + self.entry.num_tokens


class SlotRows:
    """Block tables of running requests, one row a slot; a slot that changes hands is written anew."""

    def __init__(self, block_tokens: int, max_length_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._width = blocks_for(max_length_tokens, block_tokens)
        self._tables: Ints = np.zeros((0, self._width), dtype=np.int64)
        self._owners: list[tuple[Request, int] | None] = []
        self._filled: list[int] = []

    def table(self, entry: ScheduledRequest, num_tokens: int) -> Ints:
        """The block ids that hold a request's first `num_tokens` tokens; a view, valid until the slot changes hands."""
        slot, blocks = entry.slot, entry.request.blocks
        if slot >= len(self._owners):
            self._grow(slot + 1)
        owner = self._owners[slot]
        if owner is None or owner[0] is not entry.request or owner[1] != entry.incarnation:
            self._owners[slot], self._filled[slot] = (entry.request, entry.incarnation), 0
        filled = self._filled[slot]
        if filled < len(blocks):
            self._tables[slot, filled : len(blocks)] = blocks[filled:]
            self._filled[slot] = len(blocks)
        needed = blocks_for(num_tokens, self._block_tokens)
        assert needed <= self._filled[slot], "a request computes tokens that no block holds"
        return self._tables[slot, :needed]

    def _grow(self, num_slots: int) -> None:
        size = max(num_slots, 2 * len(self._owners))
        tables: Ints = np.zeros((size, self._width), dtype=np.int64)
        tables[: len(self._owners)] = self._tables
        missing = size - len(self._owners)
        self._tables, self._owners = tables, self._owners + [None] * missing
        self._filled += [0] * missing


class StepBuilder:
    """Turns plans into inputs for one device."""

    def __init__(
        self,
        block_tokens: int,
        max_length_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tile_rows: int | None = None,
    ) -> None:
        """`tile_rows`: rows that a tile of a chunk has at most; none without kernels."""
        self._block_tokens = block_tokens
        self._tile_rows = tile_rows
        self._dtype = dtype
        self._device = device
        self._slots = SlotRows(block_tokens, max_length_tokens)

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of a step that is not empty."""
        rows = [_Row(entry, self._slots.table(entry, entry.start + entry.num_tokens)) for entry in plan.scheduled]
        singles = sorted((row for row in rows if row.entry.num_tokens == 1), key=lambda row: -row.end)
        chunks = [row for row in rows if row.entry.num_tokens > 1]
        ordered = singles + chunks
        firsts = np.cumsum([0, *(row.entry.num_tokens for row in ordered)])
        positions = np.concatenate([np.arange(row.entry.start, row.end) for row in ordered])
        tokens = [token for row in ordered for token in row.entry.request.tokens[row.entry.start : row.end]]
        kv_rows = np.concatenate([self._kv_rows(row) for row in ordered])
        sampling = sorted(
            ((row, int(first) + row.entry.num_tokens - 1) for row, first in zip(ordered, firsts, strict=False)
             if row.entry.samples),
            key=lambda pair: -pair[0].end,
        )  # fmt: skip
        tiled = self._tile_rows is not None
        return StepInputs(
            token_ids=self._tensor(tokens),
            positions=self._tensor(positions),
            kv_rows=self._tensor(kv_rows),
            singles=() if tiled else self._buckets(singles),
            chunks=()
            if tiled
            else tuple(
                self._chunk(row, int(first)) for row, first in zip(chunks, firsts[len(singles) :], strict=False)
            ),
            sample_rows=self._tensor([index for _, index in sampling]),
            sample_buckets=() if tiled else self._buckets([row for row, _ in sampling]),
            sampled=tuple(row.entry for row, _ in sampling),
            tiles=self._tiles([(row, row.entry.num_tokens) for row in ordered]),
            sample_tiles=self._tiles([(row, 1) for row, _ in sampling]),
        )

    def _tiles(self, rows: list[tuple[_Row, int]]) -> Tiles | None:
        """Requests, each with as many of its last tokens as there are rows of it."""
        if self._tile_rows is None or not rows:
            return None
        tables: Ints = np.zeros((len(rows), max(len(row.table) for row, _ in rows)), dtype=np.int64)
        tiles = []
        first = 0
        for index, (row, num_rows) in enumerate(rows):
            tables[index, : len(row.table)] = row.table
            tiles += [
                (first + at, min(self._tile_rows, num_rows - at), row.end - num_rows + at + 1, index)
                for at in range(0, num_rows, self._tile_rows)
            ]
            first += num_rows
        # Long ones first: what is left for the last thread is short.
        tiles.sort(key=lambda tile: -tile[2])
        return Tiles(torch.from_numpy(tables), torch.tensor(tiles), max(row.end for row, _ in rows))

    def _kv_rows(self, row: _Row) -> Ints:
        positions = np.arange(row.entry.start, row.end)
        written: Ints = row.table[positions // self._block_tokens] * self._block_tokens + positions % self._block_tokens
        return written

    def _buckets(self, rows: list[_Row]) -> tuple[SingleBucket, ...]:
        """Rows, longest first, cut where padding the rest to the longest would cost more than another call."""
        buckets = []
        first = 0
        while first < len(rows):
            longest = len(rows[first].table)
            end, waste = first, 0
            while end < len(rows) and (waste := waste + longest - len(rows[end].table)) <= _BUCKET_WORTH_BLOCKS:
                end += 1
            buckets.append(self._bucket(rows[first:end], first))
            first = end
        return tuple(buckets)

    def _bucket(self, rows: list[_Row], first: int) -> SingleBucket:
        width = len(rows[0].table)
        tables: Ints = np.empty((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            tables[i, : len(row.table)] = row.table
            tables[i, len(row.table) :] = row.table[-1]
        ends = np.array([row.end for row in rows])
        mask = None
        if ends.min() != ends.max():
            beyond = np.arange(width * self._block_tokens) >= ends[:, None]
            mask = self._mask(torch.from_numpy(beyond))[:, None, None, :]
        return SingleBucket(first, len(rows), self._tensor(tables.reshape(-1)), int(ends.max()), mask)

    def _chunk(self, row: _Row, first: int) -> Chunk:
        start, num_rows = row.entry.start, row.entry.num_tokens
        if start == 0:
            return Chunk(first, num_rows, 0, self._tensor(np.zeros(0, dtype=np.int64)), None)
        future = torch.ones(num_rows, row.end, dtype=torch.bool).triu_(start + 1)
        return Chunk(first, num_rows, start, self._tensor(row.table.copy()), self._mask(future))

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        return mask.to(self._device)

    def _tensor(self, values: list[int] | Ints) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self._device)
