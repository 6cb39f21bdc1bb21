"""LoRA adapters on the device: which are loaded, which rows of a step each is for, and what it adds to a product.

A step's rows are grouped by adapter once; each group is two small products beside each of the model's own, and rows
without an adapter are never touched. Must not know names' owners or requests: an adapter is a key. Start with
`AdapterStore.load`, then `StepAdapters.add`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.device import free_memory_bytes
from sluice_engine.core.plan import Ints
from sluice_engine.errors import AdapterRefused
from sluice_engine.model_files.adapter_weights import AdapterWeights, Part, open_adapter
from sluice_engine.model_files.architecture import Architecture


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The rows of a batch that run with an adapter."""

    groups: tuple[tuple[AdapterWeights, Tensor | None], ...]
    """Each adapter, and its rows; None: all rows of the batch are its."""

    def add(self, layer: int, part: Part, x: Tensor, out: Tensor, norm: Tensor | None = None) -> None:
        """Add to a product, in place, what the adapters make of its input; `norm`: what x lacks as a factor.

        Shapes: x [T, in], out [T, out], norm [in].
        """
        for adapter, rows in self.groups:
            delta = adapter.layers[layer].get(part)
            if delta is None:
                continue
            mine = x if rows is None else x.index_select(0, rows)
            small = (mine if norm is None else mine * norm) @ delta.down
            for up in delta.ups:
                rank, width = up.matrix.shape
                inside = small[:, up.first_rank : up.first_rank + rank]
                target = out[:, up.first_row : up.first_row + width]
                if rows is None:
                    target.addmm_(inside, up.matrix)
                else:
                    target.index_add_(0, rows, inside @ up.matrix)


class AdapterStore:
    """The loaded adapters, each by a key that is used once: what was unloaded is never taken for what came later.

    Loading and dropping may happen in any thread while steps run: a step keeps what it was built with.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        free_bytes: Callable[[torch.device], int] = free_memory_bytes,
    ) -> None:
        self._shape = architecture
        self._dtype = dtype
        self._device = device
        self._free_bytes = free_bytes
        self._numbers: dict[str, int] = {}
        self._weights: dict[int, AdapterWeights] = {}
        self._next = 1
        self.reserved_bytes = 0
        """Free memory of the device that loading leaves alone: steps take it."""

    def load(self, key: str, directory: Path) -> tuple[int, int]:
        """Read an adapter; its rank and its bytes.

        Raises:
            AdapterRefused: missing, damaged, not supported, for another model, or too large for the memory left.
        """
        file = open_adapter(directory, self._shape)
        needed = file.num_values * self._dtype.itemsize + (file.staged_bytes if self._device.type == "cpu" else 0)
        free = max(0, self._free_bytes(self._device) - self.reserved_bytes)
        if needed > free:
            beside = f" beside the {self.reserved_bytes} that steps need" if self.reserved_bytes else ""
            raise AdapterRefused(f"{directory} needs {needed} bytes of memory, and {free} are free{beside}")
        try:
            with torch.inference_mode():
                weights = file.load(self._dtype, self._device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise AdapterRefused(f"{directory} needs {needed} bytes of memory, which could not be had") from error
        number, self._next = self._next, self._next + 1
        self._weights[number] = weights
        self._numbers[key] = number
        return weights.rank, weights.num_bytes

    def size(self, key: str) -> tuple[int, int]:
        """Rank and bytes of an adapter; zeros of one that was dropped."""
        weights = self._weights.get(self.number(key))
        return (weights.rank, weights.num_bytes) if weights is not None else (0, 0)

    def drop(self, key: str) -> None:
        """Free an adapter that no request will run with any more."""
        self._weights.pop(self._numbers.pop(key), None)

    def number(self, key: str) -> int:
        """What stands for a key in arrays; 0 for none, and for one that was dropped: whose results are stale."""
        return self._numbers.get(key, 0)

    def step(self, numbers: Ints, device: torch.device) -> StepAdapters | None:
        """The groups of a batch whose rows have these numbers; None where no row has an adapter."""
        if not numbers.any():
            return None
        weights = self._weights.copy()  # an adapter may be dropped meanwhile
        groups = tuple(
            (weights[number], None if rows is None else torch.from_numpy(rows).to(device))
            for number, rows in grouped(numbers, weights)
        )
        return StepAdapters(groups) if groups else None


def grouped(numbers: Ints, known: Mapping[int, object]) -> list[tuple[int, Ints | None]]:
    """The rows of each number above zero, in order; None for one that has all rows. Unknown numbers have no group."""
    groups: list[tuple[int, Ints | None]] = []
    for number in np.unique(numbers).tolist():
        if number and number in known:
            rows = np.flatnonzero(numbers == number)
            groups.append((number, None if len(rows) == len(numbers) else rows))
    return groups
