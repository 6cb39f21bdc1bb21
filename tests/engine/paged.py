"""A device that computes nothing but keeps books: what each cell of each block holds, on both sides of the link.

It knows block tables and copies only from plans, as a device does.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.scripted import Cell, cells_of, position_token, result_of
from sluice_engine.core.plan import ScheduledRequest, StepPlan, StepResult
from sluice_engine.core.request import RequestStatus


def _never(_plan: StepPlan) -> bool:
    return False


class PagedRunner:
    """Asserts that every token attends to the KV of exactly the tokens before it."""

    def __init__(self, block_tokens: int, fails: Callable[[StepPlan], bool] | None = None) -> None:
        self.block_tokens = block_tokens
        self.fails = fails or _never
        self.plans: list[StepPlan] = []
        self._tables: dict[int, list[int]] = {}
        self._device: dict[int, list[Cell]] = {}
        self._host: dict[int, list[Cell]] = {}

    @property
    def always_works(self) -> bool:
        return self.fails is _never

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        assert not plan.is_empty, "an empty plan reached the runner"
        for change in plan.table_changes:
            self._tables.setdefault(change.slot, [])[change.first :] = change.blocks
        if self.fails(plan):
            raise MemoryError("the device is gone")
        for device, host in plan.swap_out:
            self._host[host] = list(self._block(device))
        for device, host in plan.swap_in:
            self._device[device] = list(self._host[host])
        entries = plan.scheduled
        for entry in entries:
            self._write(entry)
        for entry in entries:
            self._read(entry)
        return result_of(plan, [position_token(entry) for entry in plan.sampling()])

    def _block(self, block: int) -> list[Cell]:
        return self._device.setdefault(block, [None] * self.block_tokens)

    def _write(self, entry: ScheduledRequest) -> None:
        cells, table = cells_of(entry), self._tables[entry.slot]
        for position in range(entry.start, entry.start + entry.num_tokens):
            # One that has ended meanwhile writes too, whatever comes of it.
            cell = cells[position] if position < len(cells) else ("nobody's", position)
            self._block(table[position // self.block_tokens])[position % self.block_tokens] = cell

    def _read(self, entry: ScheduledRequest) -> None:
        request = entry.request
        if request.status is not RequestStatus.RUNNING or request.incarnation != entry.incarnation:
            return  # its result is stale
        table = self._tables[entry.slot]
        for position, cell in enumerate(cells_of(entry)):
            found = self._block(table[position // self.block_tokens])[position % self.block_tokens]
            assert found == cell, f"{request.id} attends to KV at {position} that is not its own"
