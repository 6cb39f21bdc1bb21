"""Decode steps recorded once for a few batch sizes and played back: one launch instead of hundreds.

Owns the persistent buffers that recorded steps read, and how a smaller batch fills them: rows beyond it attend to one
token of the scratch block and write there, so no live block is touched. What recording is comes in as a function: CUDA
graphs on a GPU, a plain call in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.paged_rows import PagedRows
from sluice_engine.compute.step_inputs import StepInputs
from sluice_engine.core.fit import blocks_for

Forward = Callable[[], Tensor]
Record = Callable[[Forward], Forward]
"""Takes a step over buffers; what it returns computes it anew, into the same result."""


def decode_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes that are recorded, so that padding costs little: up to a quarter of a small batch, 8 rows above."""
    sizes = [1, 2, 4, *range(8, min(most, 64) + 1, 8), *range(80, min(most, 256) + 1, 16), *range(288, most + 1, 32)]
    return tuple(sorted({size for size in sizes if size < most} | {most}))


def bucket_of(buckets: Sequence[int], num_rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None where all are too small. `buckets` rise."""
    return next((size for size in buckets if size >= num_rows), None)


class Buffers:
    """Inputs of a decode step at fixed addresses."""

    def __init__(
        self, size: int, max_length_tokens: int, block_tokens: int, scratch_block: int, device: torch.device
    ) -> None:
        width = blocks_for(max_length_tokens, block_tokens)
        self._scratch_block = scratch_block
        self._scratch_row = scratch_block * block_tokens
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._kv_rows = torch.full((size,), self._scratch_row, dtype=torch.int64, device=device)
        self._lengths = torch.ones(size, dtype=torch.int32, device=device)
        self._tables = torch.full((size, width), scratch_block, dtype=torch.int32, device=device)
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._sample_rows = torch.arange(size, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        tensors = (
            self._token_ids, self._positions, self._kv_rows, self._lengths, self._tables, self._starts,
            self._sample_rows,
        )  # fmt: skip
        return sum(tensor.nbytes for tensor in tensors)

    def inputs(self, size: int) -> StepInputs:
        """The first `size` rows as a step."""
        rows = PagedRows(0, size, self._starts[: size + 1], self._lengths[:size], self._tables[:size], 1)
        return StepInputs(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_rows=self._kv_rows[:size],
            singles=(),
            chunks=(),
            sample_rows=self._sample_rows[:size],
            sample_buckets=(),
            sampled=np.arange(size),
            tiles=None,
            sample_tiles=None,
            adapters=None,
            sample_adapters=None,
            paged=(rows,),
            sample_paged=rows,
            sampled_slots=None,
        )

    def fill(self, inputs: StepInputs, size: int) -> None:
        """A batch's rows, and scratch up to `size`."""
        (rows,) = inputs.paged
        num_rows = rows.num_rows
        self._token_ids[:num_rows].copy_(inputs.token_ids)
        self._positions[:num_rows].copy_(inputs.positions)
        self._kv_rows[:num_rows].copy_(inputs.kv_rows)
        self._lengths[:num_rows].copy_(rows.lengths)
        self._tables[:num_rows, : rows.tables.shape[1]].copy_(rows.tables)
        if num_rows < size:
            self._token_ids[num_rows:size] = 0
            self._positions[num_rows:size] = 0
            self._kv_rows[num_rows:size] = self._scratch_row
            self._lengths[num_rows:size] = 1
            self._tables[num_rows:size, 0] = self._scratch_block


class DecodeGraphs:
    """Recorded decode steps."""

    def __init__(
        self, forward: Callable[[StepInputs], Tensor], buffers: Buffers, buckets: Sequence[int], record: Record
    ) -> None:
        """Record all buckets, the largest first: the others find their memory in what it leaves."""
        self._buffers = buffers
        self._recorded: dict[int, Forward] = {}
        for size in sorted(buckets, reverse=True):
            inputs = buffers.inputs(size)
            self._recorded[size] = record(lambda inputs=inputs: forward(inputs))  # type: ignore[misc]  # a default binds it
        self._buckets = tuple(sorted(buckets))
        self.replays_total = 0

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Logits of a decode step, overwritten by the next; None for a step that no recording computes."""
        if len(inputs.paged) != 1 or inputs.paged[0].max_rows != 1 or inputs.adapters is not None:
            return None
        num_rows = inputs.paged[0].num_rows
        if len(inputs.sample_rows) != num_rows:
            return None  # a chunk of one token that does not sample
        size = bucket_of(self._buckets, num_rows)
        if size is None:
            return None
        self._buffers.fill(inputs, size)
        self.replays_total += 1
        return self._recorded[size]()[:num_rows]


def recorder(device: torch.device) -> Record:
    """CUDA graphs that share one pool of memory: they never run at once."""
    pool = torch.cuda.graph_pool_handle()

    def record(forward: Forward) -> Forward:
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own gap
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(2):  # what a first call sets up is no part of a recording
                forward()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return record
