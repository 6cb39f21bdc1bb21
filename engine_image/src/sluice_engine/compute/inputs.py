"""A step plan as tensors, for attention over gathered blocks or by own kernels.

It knows no weights and no sampling. Requests that compute one token are *single* rows, longest first and batched
together; the others are *chunks*, one by one. Rows of the batch: all singles, then the chunks' tokens. Where kernels
read the cache in place, all that is needed of either is *tiles*, and there are no buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.adapters import AdapterStore
from sluice_engine.compute.slots import Shares, SlotRows, ints, shares_of
from sluice_engine.compute.step_inputs import Chunk, SingleBucket, StepInputs
from sluice_engine.compute.step_message import Share
from sluice_engine.compute.transfer import sent
from sluice_engine.core.drafts import num_accepted
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.plan import NO_POSITIONS, Ints, StepPlan, TableChange
from sluice_engine.kernels.library import Tiles

# Blocks of padding that cost as much as attending to one more bucket: kernels of about 60 µs a layer against copies of
# some 5 µs a block, on two cores.
_BUCKET_WORTH_BLOCKS = 12
_NO_SHARES = shares_of(NO_POSITIONS, NO_POSITIONS, [])


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
        window: int | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """`tile_rows`: rows that a tile of a chunk has at most; none without kernels. `window`: that of some layers."""
        self._block_tokens = block_tokens
        self._tile_rows = tile_rows
        self._window = window
        self._dtype = dtype
        self._device = device
        self._slots = SlotRows(block_tokens, max_length_tokens, adapters)

    def adopt(self, changes: Sequence[TableChange]) -> None:
        """Bring the block tables up to date, also where the step that brings the changes is never built."""
        self._slots.apply(changes)

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of a step that is not empty, and whose table changes were adopted."""
        slots = plan.decodes.slots
        return self.inputs(slots, plan.decode_starts, self._slots.last_tokens[slots], plan.chunks)

    def last_tokens(self, slots: Ints) -> Ints:
        """What the decodes of these slots begin with."""
        return self._slots.last_tokens[slots]

    def inputs(self, decodes: Ints, starts: Ints, tokens: Ints, shares: Sequence[Share]) -> StepInputs:
        """The inputs of a step whose tables are known: decodes that compute `tokens` at `starts`, then the others."""
        if not shares and self._tile_rows is not None:
            return self._of_decodes(decodes, starts, tokens)
        short = [share for share in shares if share.num_tokens == 1]
        long = [share for share in shares if share.num_tokens > 1]
        singles = shares_of(decodes, starts, short)
        by_length = np.argsort(-singles.ends, kind="stable")
        chunks = shares_of(NO_POSITIONS, NO_POSITIONS, long)
        for part in (singles, chunks):
            self._slots.check(part.slots, -(-part.ends // self._block_tokens))
        single_tokens = np.concatenate([tokens, _tokens(short)])
        positions = np.concatenate([singles.ends[by_length] - 1, *(np.arange(c.start, _end(c)) for c in long)])
        slots = np.concatenate([singles.slots[by_length], np.repeat(chunks.slots, chunks.counts)])
        size = self._block_tokens
        # Where each of the plan's sampling rows lies in the batch: singles by length, then the last row of each chunk.
        row_of_single = np.empty_like(by_length)
        row_of_single[by_length] = np.arange(len(by_length))
        last_of_chunks = (len(by_length) + np.cumsum(chunks.counts) - 1).tolist()
        last_rows = {share.slot: row for share, row in zip(long, last_of_chunks, strict=True)}
        rows_of_short = row_of_single[len(decodes) :].tolist()
        last_rows |= {share.slot: row for share, row in zip(short, rows_of_short, strict=True)}
        sampling = [row for share in shares for row in share.sampling()]
        chunk_rows = [last_rows[share.slot] - back for share in shares for back in range(share.num_sampled - 1, -1, -1)]
        rows = np.concatenate([row_of_single[: len(decodes)], ints(chunk_rows)])
        sampled = shares_of(decodes, starts, sampling)
        order = np.argsort(-sampled.ends, kind="stable")
        sampled = sampled.part(order)
        tiled = self._tile_rows is not None
        ordered = singles.part(by_length)
        return StepInputs(
            token_ids=self._tensor(np.concatenate([single_tokens[by_length], _tokens(long)])),
            positions=self._tensor(positions),
            kv_rows=self._tensor(self._slots.tables[slots, positions // size] * size + positions % size),
            singles=() if tiled else self._buckets(ordered),
            chunks=() if tiled else tuple(self._chunks(long, len(by_length))),
            sample_rows=self._tensor(rows[order]),
            sample_buckets=() if tiled else self._buckets(sampled),
            sampled=order,
            tiles=self._tiles(ordered, chunks),
            sample_tiles=self._tiles(sampled, _NO_SHARES),
            adapters=self._slots.adapters(slots, self._device),
            sample_adapters=self._slots.adapters(sampled.slots, self._device),
        )

    def _of_decodes(self, slots: Ints, starts: Ints, tokens: Ints) -> StepInputs:
        """A step of decodes alone, as tiles: what `inputs` would say, in less of the time that one stream feels."""
        order = np.argsort(-starts, kind="stable")
        slots, positions = slots[order], starts[order]
        rows = Shares(slots, positions + 1, np.ones_like(slots))
        size = self._block_tokens
        self._slots.check(slots, positions // size + 1)
        tiles = self._tiles(rows, _NO_SHARES)
        adapters = self._slots.adapters(slots, self._device)
        return StepInputs(
            token_ids=self._tensor(tokens[order]),
            positions=self._tensor(positions),
            kv_rows=self._tensor(self._slots.tables[slots, positions // size] * size + positions % size),
            singles=(),
            chunks=(),
            sample_rows=self._tensor(np.arange(len(order))),
            sample_buckets=(),
            sampled=order,
            tiles=tiles,
            sample_tiles=tiles,
            adapters=adapters,
            sample_adapters=adapters,
        )

    def remember(self, plan: StepPlan, token_ids: Ints) -> None:
        """The tokens that were sampled, by the plan's sampling rows: the next step's decodes begin with them."""
        self._slots.last_tokens[plan.decodes.slots] = token_ids[: len(plan.decodes)]
        row = len(plan.decodes)
        for chunk in plan.chunks:
            if chunk.samples:
                newest = num_accepted(chunk.drafts, token_ids[row : row + chunk.num_sampled])
                self._slots.last_tokens[chunk.slot] = token_ids[row + newest]
            row += chunk.num_sampled

    def _tiles(self, singles: Shares, chunks: Shares) -> Tiles | None:
        """All rows in pieces that one thread computes: single rows (of a sampling batch, last rows), then chunks."""
        num_singles = len(singles.slots)
        if self._tile_rows is None or not num_singles + len(chunks.slots):
            return None
        slots, ends = np.concatenate([singles.slots, chunks.slots]), np.concatenate([singles.ends, chunks.ends])
        longest = int(ends.max())
        index = np.arange(num_singles)
        tiles = [np.stack([index, np.ones_like(index), singles.ends, index], axis=1)]
        first = num_singles
        for number, (end, count) in enumerate(zip(chunks.ends.tolist(), chunks.counts.tolist(), strict=True)):
            at = np.arange(0, count, self._tile_rows)
            num_rows = np.minimum(self._tile_rows, count - at)
            request = np.full_like(at, num_singles + number)
            tiles.append(np.stack([first + at, num_rows, end - count + at + 1, request], axis=1))
            first += count
        every = np.concatenate(tiles)
        # Long ones first: what is left for the last thread is short.
        every = every[np.argsort(-every[:, 2], kind="stable")]
        tables = self._slots.tables[slots, : blocks_for(longest, self._block_tokens)]
        return Tiles(torch.from_numpy(tables), torch.from_numpy(every), longest)

    def _buckets(self, rows: Shares) -> tuple[SingleBucket, ...]:
        """Rows, longest first, cut where padding the rest to the longest would cost more than another call."""
        lengths = -(-rows.ends // self._block_tokens)
        buckets = []
        first = 0
        while first < len(lengths):
            waste = np.cumsum(lengths[first] - lengths[first:])
            end = first + int(np.searchsorted(waste, _BUCKET_WORTH_BLOCKS, side="right"))
            buckets.append(self._bucket(rows.slots[first:end], rows.ends[first:end], lengths[first:end], first))
            first = end
        return tuple(buckets)

    def _bucket(self, slots: Ints, ends: Ints, lengths: Ints, first: int) -> SingleBucket:
        width = int(lengths[0])
        columns = np.minimum(np.arange(width), lengths[:, None] - 1)  # padding repeats a row's last block
        tables = self._slots.tables[slots[:, None], columns]
        mask = window_mask = None
        is_padded = ends[0] != ends[-1]
        window = self._window if self._window is not None and ends[0] > self._window else None
        if is_padded or window is not None:
            at = np.arange(width * self._block_tokens)
            beyond = at >= ends[:, None]
            if is_padded:
                mask = window_mask = self._mask(torch.from_numpy(beyond))[:, None, None, :]
            if window is not None:
                window_mask = self._mask(torch.from_numpy(beyond | (at < ends[:, None] - window)))[:, None, None, :]
        return SingleBucket(first, len(slots), self._tensor(tables.reshape(-1)), int(ends[0]), mask, window_mask)

    def _chunks(self, chunks: Sequence[Share], first: int) -> Iterator[Chunk]:
        for chunk in chunks:
            start, num_rows, end = chunk.start, chunk.num_tokens, _end(chunk)
            window = self._window if self._window is not None and end > self._window else None
            mask, window_mask, blocks = None, None, NO_POSITIONS
            if start or window is not None:
                future = torch.ones(num_rows, end, dtype=torch.bool).triu_(start + 1)
                mask = window_mask = self._mask(future) if start else None
                if window is not None:
                    near = torch.ones(num_rows, end, dtype=torch.bool).triu_(start + 1 - window)
                    window_mask = self._mask(future | ~near)
            if start:
                blocks = self._slots.tables[chunk.slot, : blocks_for(end, self._block_tokens)].copy()
            yield Chunk(first, num_rows, start, self._tensor(blocks), mask, window_mask)
            first += num_rows

    def _mask(self, hidden: Tensor) -> Tensor:
        return sent(torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf")), self._device)

    def _tensor(self, values: Ints) -> Tensor:
        return sent(torch.from_numpy(values), self._device)


def _end(chunk: Share) -> int:
    return chunk.start + chunk.num_tokens


def _tokens(chunks: Sequence[Share]) -> Ints:
    """What these chunks compute."""
    return ints([token for chunk in chunks for token in chunk.tokens])
