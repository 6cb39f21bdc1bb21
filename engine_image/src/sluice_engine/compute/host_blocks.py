"""The host's copies of KV blocks: the memory behind `core.host_pool`'s ids, and the copies both ways.

One host block holds all layers of one device block, so a block crosses the link in one piece. On a GPU the memory is
pinned and blocks cross on a stream of their own, beside what computes: gathering and scattering alone keep the order of
the plans, and nobody waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from sluice_engine.compute.transfer import sent
from sluice_engine.core.link import Link

# Blocks are gathered on the device before they cross: this bounds the memory that takes.
STAGED_BYTES = 32 << 20

# Enough blocks for the part of a copy that grows with them to outweigh the rest, and few milliseconds in all.
MEASURED_BLOCKS = 32
MEASURED_ROUNDS = 8


class HostBlocks:
    """Memory for `num_blocks` blocks beside the cache's layers."""

    def __init__(self, layers: Sequence[Tensor], num_blocks: int, block_tokens: int) -> None:
        """`layers`: each [rows, width] with `block_tokens` rows a block, on one device."""
        self._layers = [layer.view(-1, block_tokens * layer.shape[1]) for layer in layers]
        self._device = layers[0].device
        dtype, width = layers[0].dtype, self._layers[0].shape[1]
        shape = (num_blocks, len(layers), width)
        # Filled, not merely reserved: memory that is not there must be missed at the start.
        self._memory = torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda").zero_()
        self._staged = self._device.type == "cuda"
        """Whether blocks are gathered first and cross in one piece; on a CPU that would be one copy more."""
        self._aside = torch.cuda.Stream(self._device) if self._staged else None  # type: ignore[no-untyped-call]  # torch's own gap
        self._most_staged = max(1, STAGED_BYTES // (len(layers) * width * dtype.itemsize))

    def copy_out(self, copies: Sequence[tuple[int, int]]) -> None:
        """Device to host, for pairs (device block, host block)."""
        for part in self._parts(copies):
            blocks, hosts = [device for device, _ in part], [host for _, host in part]
            taken = self._ids(blocks)
            if self._staged:
                # Gathered in the order of the steps: what overwrites these blocks comes after.
                staged = torch.stack([layer.index_select(0, taken) for layer in self._layers], dim=1)
                with self._crossing(staged, after=True):
                    for first, host, count in _runs(hosts):
                        self._memory[host : host + count].copy_(staged[first : first + count], non_blocking=True)
            else:
                for index, layer in enumerate(self._layers):
                    self._memory[:, index].index_copy_(0, torch.tensor(hosts), layer.index_select(0, taken))

    def copy_in(self, copies: Sequence[tuple[int, int]]) -> None:
        """Host to device, for pairs (device block, host block)."""
        for part in self._parts(copies):
            blocks, hosts = [device for device, _ in part], [host for _, host in part]
            given = self._ids(blocks)
            if self._staged:
                staged = torch.empty(len(part), *self._memory.shape[1:], dtype=self._memory.dtype, device=self._device)
                with self._crossing(staged, after=False):
                    for first, host, count in _runs(hosts):
                        staged[first : first + count].copy_(self._memory[host : host + count], non_blocking=True)
                for index, layer in enumerate(self._layers):
                    layer.index_copy_(0, given, staged[:, index])
            else:
                for index, layer in enumerate(self._layers):
                    layer.index_copy_(0, given, self._memory[:, index].index_select(0, torch.tensor(hosts)))

    @contextmanager
    def _crossing(self, staged: Tensor, *, after: bool) -> Iterator[None]:
        """Queue copies on the stream beside, in the order they are asked for: a host block is read as it was written.

        `after`: they read `staged` once it is computed; else what computes reads it once they are done.
        """
        if self._aside is None:
            yield  # a CPU's copies are done when they return
            return
        computing = torch.cuda.current_stream(self._device)
        # Also where nothing is read: the memory of `staged` may have been another's until what is queued is done.
        self._aside.wait_stream(computing)
        staged.record_stream(self._aside)
        with torch.cuda.stream(self._aside):
            yield
        if not after:
            computing.wait_stream(self._aside)

    def _ids(self, blocks: list[int]) -> Tensor:
        return sent(torch.tensor(blocks), self._device)

    def measure(self) -> Link:
        """What such copies cost: the best of a few, of one block and of many. It overwrites blocks on both sides."""
        most = min(MEASURED_BLOCKS, len(self._memory), len(self._layers[0]))
        one, many = [(0, 0)], [(block, block) for block in range(most)]
        out_one, out_many = self._time_ns(self.copy_out, one), self._time_ns(self.copy_out, many)
        in_one, in_many = self._time_ns(self.copy_in, one), self._time_ns(self.copy_in, many)
        if most == 1:
            return Link(0, out_one, in_one)
        out_ns, in_ns = (max(1, (b - a) // (most - 1)) for a, b in ((out_one, out_many), (in_one, in_many)))
        return Link(max(0, out_one - out_ns, in_one - in_ns) // 1000, out_ns, in_ns)

    def _time_ns(self, copy: Callable[[Sequence[tuple[int, int]]], None], copies: Sequence[tuple[int, int]]) -> int:
        times = []
        for _ in range(MEASURED_ROUNDS):
            started = time.perf_counter_ns()
            copy(copies)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter_ns() - started)
        return min(times)  # whatever disturbs a copy only makes it longer

    def _parts(self, copies: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        return (copies[at : at + self._most_staged] for at in range(0, len(copies), self._most_staged))


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first index, first id, count) of stretches in which ids rise by one: each crosses in one piece."""
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(ids), 1) if b != a + 1), len(ids)]
    return ((first, ids[first], end - first) for first, end in pairwise(cuts))
