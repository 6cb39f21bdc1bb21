"""A step plan as tensors for attention that reads the cache in place: rows in the plan's order, decodes then chunks.

Owns what lives on the device as long as a request runs, one row a slot: its block table and the token sampled last. A
step's copies follow what changed; a decode's token is taken where it was sampled, and never crosses to the host and
back. It knows no weights and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.adapters import AdapterStore
from sluice_engine.compute.paged_rows import PagedRows
from sluice_engine.compute.slots import Shares, SlotRows, ints, shares_of
from sluice_engine.compute.step_inputs import StepInputs
from sluice_engine.compute.transfer import sent_together
from sluice_engine.core.drafts import num_accepted
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.plan import Ints, StepPlan, TableChange


class DeviceSlots:
    """Block tables and newest tokens, on the device."""

    def __init__(self, width: int, device: torch.device) -> None:
        """`width`: blocks of the longest request."""
        self._device = device
        self.tables = torch.zeros(0, width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)

    def apply(self, changes: Sequence[TableChange]) -> None:
        """Write the blocks that slots got, each slot's once: the order of writes to one place is nobody's promise."""
        if not changes:
            return
        slots = np.repeat([change.slot for change in changes], [len(change.blocks) for change in changes])
        columns = np.concatenate([np.arange(len(change.blocks)) + change.first for change in changes])
        blocks = ints([block for change in changes for block in change.blocks])
        most = max(change.slot for change in changes) + 1
        if most > len(self.tables):
            self._grow(max(most, 2 * len(self.tables)))
        at, ids = sent_together([slots * self.tables.shape[1] + columns, blocks], self._device)
        self.tables.view(-1).index_copy_(0, at, ids.to(torch.int32))

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self.tables)
        self.tables = torch.cat([self.tables, self.tables.new_zeros(missing, self.tables.shape[1])])
        self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(missing)])


class PagedBuilder:
    """Turns plans into inputs for one device."""

    def __init__(
        self, block_tokens: int, max_length_tokens: int, device: torch.device, adapters: AdapterStore | None = None
    ) -> None:
        self._block_tokens = block_tokens
        self._device = device
        self._host = SlotRows(block_tokens, max_length_tokens, adapters)
        self._slots = DeviceSlots(blocks_for(max_length_tokens, block_tokens), device)

    def adopt(self, changes: Sequence[TableChange]) -> None:
        """Bring the block tables up to date, also where the step that brings the changes is never built."""
        self._host.apply(changes)
        # A slot that changes hands within a step is written twice, and the later change stands.
        twice = len({change.slot for change in changes}) < len(changes)
        for part in ([change] for change in changes) if twice else [changes]:
            self._slots.apply(part)

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of a step that is not empty, and whose table changes were adopted."""
        num_decodes = len(plan.decodes)
        rows = shares_of(plan.decodes.slots, plan.decode_starts, list(plan.chunks))
        self._host.check(rows.slots, -(-rows.ends // self._block_tokens))
        starts = np.concatenate([[0], np.cumsum(rows.counts)])
        first_positions = rows.ends - rows.counts
        positions = np.arange(starts[-1]) + np.repeat(first_positions - starts[:-1], rows.counts)
        slots = np.repeat(rows.slots, rows.counts)
        size = self._block_tokens
        kv_rows = self._host.tables[slots, positions // size] * size + positions % size
        tokens = ints([0] * num_decodes + [token for chunk in plan.chunks for token in chunk.tokens])
        sampled = shares_of(
            plan.decodes.slots, plan.decode_starts, [row for chunk in plan.chunks for row in chunk.sampling()]
        )
        last_rows = starts[1:] - 1
        sample_rows = np.concatenate([
            last_rows[:num_decodes],
            *(last - np.arange(chunk.num_sampled - 1, -1, -1)
              for last, chunk in zip(last_rows[num_decodes:], plan.chunks, strict=True)),
        ])  # fmt: skip
        sent_rows = sent_together(
            [tokens, positions, kv_rows, sample_rows, sampled.slots, sampled.ends, rows.slots, rows.ends,
             starts[: num_decodes + 1], starts[num_decodes:] - num_decodes, np.arange(len(sampled.slots) + 1)],
            self._device,
        )  # fmt: skip
        token_ids, at, kv, last, sampled_slots, sampled_ends, request_slots, ends, *cuts = sent_rows
        singles = chunks = None
        if num_decodes:
            token_ids[:num_decodes] = self._slots.tokens.index_select(0, request_slots[:num_decodes])
            part = rows.part(np.arange(num_decodes))
            singles = self._rows(part, 0, request_slots[:num_decodes], ends[:num_decodes], cuts[0])
        if plan.chunks:
            part = rows.part(np.arange(num_decodes, len(rows.slots)))
            chunks = self._rows(part, num_decodes, request_slots[num_decodes:], ends[num_decodes:], cuts[1])
        sampling = singles
        if plan.chunks and len(sampled.slots):
            sampling = self._rows(sampled, 0, sampled_slots, sampled_ends, cuts[2], last_only=True)
        return StepInputs(
            token_ids=token_ids,
            positions=at,
            kv_rows=kv,
            singles=(),
            chunks=(),
            sample_rows=last,
            sample_buckets=(),
            sampled=np.arange(len(sampled.slots)),
            tiles=None,
            sample_tiles=None,
            adapters=self._host.adapters(slots, self._device),
            sample_adapters=self._host.adapters(sampled.slots, self._device),
            paged=tuple(part for part in (singles, chunks) if part is not None),
            sample_paged=sampling,
            sampled_slots=sampled_slots,
        )

    def remember(self, plan: StepPlan, token_ids: Ints) -> None:
        """The tokens that were sampled, by the plan's sampling rows: the next step's decodes begin with them."""
        newest = list(range(len(plan.decodes)))
        slots = plan.decodes.slots.tolist()
        row = len(plan.decodes)
        for chunk in plan.chunks:
            if chunk.samples:
                newest.append(row + num_accepted(chunk.drafts, token_ids[row : row + chunk.num_sampled]))
                slots.append(chunk.slot)
            row += chunk.num_sampled
        if slots:
            at, ids = sent_together([ints(slots), token_ids[newest]], self._device)
            self._slots.tokens.index_copy_(0, at, ids)

    def remember_on_device(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """The same of a step without guesses, whose tokens the host does not know yet; below 0 stands for none."""
        assert inputs.sampled_slots is not None
        self._slots.tokens.index_copy_(0, inputs.sampled_slots, token_ids.clamp_min(0))

    def _rows(
        self, rows: Shares, first: int, slots: Tensor, ends: Tensor, starts: Tensor, *, last_only: bool = False
    ) -> PagedRows:
        """`last_only`: of each share its last row alone."""
        counts = np.ones_like(rows.counts) if last_only else rows.counts
        width = blocks_for(int(rows.ends.max()), self._block_tokens)
        return PagedRows(
            first=first,
            num_rows=int(counts.sum()),
            starts=starts.to(torch.int32),
            lengths=ends.to(torch.int32),
            tables=self._slots.tables[:, :width].index_select(0, slots),
            max_rows=int(counts.max()),
        )
