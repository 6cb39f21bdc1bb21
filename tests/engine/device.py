"""A device that computes in the order of plans and knows only what a real one would: tables, KV, the tokens it sampled.

A token depends on every token that is read through the block table, so a block that changed hands too early, a table
that was not told of a change, or KV that was never written comes out as another text.
"""

from __future__ import annotations

import numpy as np

from sluice_engine.core.drafts import num_accepted
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.request import Request

VOCAB = 1000
FIRST_TOKEN = 10


def next_token(tokens: list[int], vocab: int = VOCAB) -> int:
    return (sum(tokens) * 31 + len(tokens) ** 2 // 7) % vocab + FIRST_TOKEN


def undisturbed(request: Request, vocab: int = VOCAB) -> list[int]:
    """The output of a request that runs alone: its stop token included."""
    tokens = request.tokens[: request.num_prompt]
    output: list[int] = []
    while len(output) < request.sampling.max_tokens:
        output.append(next_token(tokens + output, vocab))
        if output[-1] in request.sampling.stop_token_ids:
            break
    return output


class Device:
    """Computes plans; the caller decides when results are seen."""

    def __init__(
        self, num_blocks: int, block_tokens: int, *, told_when_settled: bool = False, vocab: int = VOCAB
    ) -> None:
        """`told_when_settled`: the caller calls `settled`, so no block may change hands before.

        `vocab`: of two or three tokens a text repeats itself, and what comes next can be guessed.
        """
        self.block_tokens = block_tokens
        self._vocab = vocab
        self._told_when_settled = told_when_settled
        self._kv: list[list[int]] = [[-1] * block_tokens for _ in range(num_blocks)]
        self._host: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}
        self._written: dict[int, set[int]] = {}
        """Step in flight → blocks that it writes."""

    def execute(self, plan: StepPlan) -> StepResult:
        for block, kept in plan.swap_out:
            self._host[kept] = list(self._kv[block])
        for block, kept in plan.swap_in:
            self._kv[block] = list(self._host[kept])
        self._change_tables(plan)
        written: set[int] = set()
        if self._told_when_settled:
            self._written[plan.step] = written
        sampled = []
        for entry in plan.scheduled:
            decodes = entry not in plan.chunks
            fresh = [self._last[entry.slot]] if decodes else entry.tokens
            assert len(fresh) == entry.num_tokens, "a chunk of tokens that nobody knows yet"
            table = self._tables[entry.slot]
            for position, token in enumerate(fresh, start=entry.start):
                block = table[position // self.block_tokens]
                self._kv[block][position % self.block_tokens] = token
                written.add(block)
            for row in entry.sampling():
                upto = range(row.start + row.num_tokens)
                read = [self._kv[table[at // self.block_tokens]][at % self.block_tokens] for at in upto]
                sampled.append(next_token(read, self._vocab))
            if entry.samples:
                rows = sampled[-entry.num_sampled :]
                self._last[entry.slot] = rows[num_accepted(entry.drafts, rows)]
        return StepResult(plan.step, np.array(sampled, dtype=np.int64))

    def settled(self, step: int) -> None:
        """Its result has been taken."""
        self._written.pop(step, None)

    def _change_tables(self, plan: StepPlan) -> None:
        for change in plan.table_changes:
            table = self._tables.setdefault(change.slot, [])
            before = set(table)
            assert len(table) >= change.first, "a change beyond the end of a table"
            table[change.first :] = change.blocks
            for step, blocks in self._written.items():
                # A slot with a new owner has none of its blocks from before: only a table that grows keeps its own.
                early = blocks & (set(change.blocks) - (before if change.first else set()))
                assert not early or self._shared(plan, early), (
                    f"blocks {early} change hands before step {step} is settled"
                )

    def _shared(self, plan: StepPlan, blocks: set[int]) -> bool:
        """Whether these are read, not written, by the plan: full blocks out of the prefix cache."""
        writes = {
            self._tables[entry.slot][at // self.block_tokens]
            for entry in plan.scheduled
            if entry.slot in self._tables
            for at in range(entry.start, entry.start + entry.num_tokens)
            if at // self.block_tokens < len(self._tables[entry.slot])
        }
        return not blocks & writes
