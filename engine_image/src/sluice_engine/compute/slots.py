"""What the host knows of each running request's slot, and the shares of requests in a step as arrays.

A step's work follows what changed: a row is written where a plan says so, and read as it is by every step after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sluice_engine.compute.adapters import AdapterStore, StepAdapters
from sluice_engine.compute.step_message import Share
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.plan import Ints, TableChange


class SlotRows:
    """What lives as long as a request runs, one row a slot: its block table, its adapter, the token sampled last.

    Tables change only as plans say: what a step was planned with is what it runs with, whatever is planned meanwhile.
    """

    def __init__(self, block_tokens: int, max_length_tokens: int, adapters: AdapterStore | None) -> None:
        """`adapters`: what plans may name."""
        self._store = adapters
        self._adapters: Ints = np.zeros(0, dtype=np.int64)
        self._width = blocks_for(max_length_tokens, block_tokens)
        self.tables: Ints = np.zeros((0, self._width), dtype=np.int64)
        """[slots, M]: block ids; what lies beyond a request's own was another's."""
        self.last_tokens: Ints = np.zeros(0, dtype=np.int64)
        """[slots]: where the host is told of every token."""
        self._filled: Ints = np.zeros(0, dtype=np.int64)

    def apply(self, changes: Sequence[TableChange]) -> None:
        """Bring tables and adapters up to date."""
        for change in changes:
            if change.slot >= len(self.tables):
                self._grow(change.slot + 1)
            end = change.first + len(change.blocks)
            self.tables[change.slot, change.first : end] = change.blocks
            self._filled[change.slot] = end
            if not change.first:
                self._adapters[change.slot] = self._store.number(change.adapter) if self._store is not None else 0

    def check(self, slots: Ints, num_blocks: Ints) -> None:
        """Never read or write a block that is not the request's: a plan that would is broken."""
        assert (num_blocks <= self._filled[slots]).all(), "a request computes tokens that no block holds"

    def adapters(self, slots: Ints, device: torch.device) -> StepAdapters | None:
        """What rows of these slots run with; None where none has an adapter."""
        return None if self._store is None else self._store.step(self._adapters[slots], device)

    def _grow(self, num_slots: int) -> None:
        missing = max(num_slots, 2 * len(self.tables)) - len(self.tables)
        self.tables = np.concatenate([self.tables, np.zeros((missing, self._width), dtype=np.int64)])
        self.last_tokens = np.concatenate([self.last_tokens, np.zeros(missing, dtype=np.int64)])
        self._filled = np.concatenate([self._filled, np.zeros(missing, dtype=np.int64)])
        self._adapters = np.concatenate([self._adapters, np.zeros(missing, dtype=np.int64)])


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of some requests, as parallel arrays."""

    slots: Ints
    ends: Ints
    """Tokens attended to: up to the last of this step."""
    counts: Ints
    """Tokens computed."""

    def part(self, indices: Ints) -> Shares:
        """The requests at these indices alone."""
        return Shares(self.slots[indices], self.ends[indices], self.counts[indices])


def shares_of(slots: Ints, starts: Ints, shares: Sequence[Share]) -> Shares:
    """Decodes, whose tokens are at `starts`, then the others."""
    return Shares(
        np.concatenate([slots, ints([share.slot for share in shares])]),
        np.concatenate([starts + 1, ints([share.start + share.num_tokens for share in shares])]),
        np.concatenate([np.ones_like(starts), ints([share.num_tokens for share in shares])]),
    )


def ints(values: list[int]) -> Ints:
    """As an array, also of none."""
    return np.array(values, dtype=np.int64)
