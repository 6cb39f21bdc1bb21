"""The future peak of KV blocks: what requests will hold together at a later step, kept up as they come and go.

Owns the arithmetic of blocks over time, as arrays sorted by the step at which each request ends. Must not know
requests, pools or ceilings. A thousand requests are a few operations on arrays, where a loop over them costs more than
a decision may (docs/decisions/0012). Start reading at `FuturePeak`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_LEAST_CAPACITY = 64


class Growth(NamedTuple):
    """One request's blocks over time: it holds `held` tokens, and after `prefill_steps` grows by one a step."""

    held: int
    """Its whole known input, in tokens."""
    grows: int
    """Tokens it will still add, at least 1."""
    prefill_steps: int
    """Steps until it holds its whole input."""
    shared_blocks: int = 0
    """Of its first blocks, those that it shares with others of the same key."""
    key: bytes = b""

    @property
    def end(self) -> int:
        """The step at which it ends."""
        return self.prefill_steps + self.grows


def growth(known_tokens: int, remaining_tokens: int, total_tokens: int, share_tokens: int) -> Growth:
    """The growth of a request whose share of each step's prefill is `share_tokens`.

    `total_tokens` is the prompt and the whole output; the last sampled token never holds state.
    """
    grows = total_tokens - 1 - known_tokens
    return Growth(known_tokens, grows if grows > 1 else 1, -(-remaining_tokens // (share_tokens or 1)))  # noqa: FURB136


class FuturePeak:
    """Most blocks held together at any future step, if nobody else enters and everybody stays to the end.

    Peak = max over all f_i of Σ over f_j ≥ f_i of blocks(held_j + min(g_j, max(0, f_i − p_j))), with f = p + g, and
    with shared blocks counted once. The sum only grows between two ends, so the ends are the only steps to look at.
    What is held at each of them is kept: who comes or goes changes the ends up to its own, by what it holds there.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._count = 0
        self._allocate(_LEAST_CAPACITY)
        self._groups: dict[bytes, list[tuple[int, int]]] = {}
        """By key, those that share: (end, shared blocks), in that order."""

    def __len__(self) -> int:
        return self._count

    def refill(self, growths: Sequence[Growth]) -> None:
        """Begin anew with these: n log n."""
        self._groups = {}
        count, self._count = len(growths), 0
        if count > self._ends.size:
            self._allocate(2 * count)
        if not count:
            return
        self._count = count
        held, grows, starts = np.array([one[:3] for one in growths], dtype=np.int64).T
        ends = starts + grows
        order = ends.argsort(kind="stable")
        held, starts, ends = held[order], starts[order], ends[order]
        self._ends[:count] = ends
        self._starts[:count] = starts
        self._bases[:count] = held + self._block_tokens - 1
        self._blocks[:count] = _usage_at_ends(held, starts, ends, self._block_tokens)
        self._group([one for one in growths if one.shared_blocks])

    def add(self, one: Growth) -> None:
        """Someone enters."""
        count, end = self._count, one.end
        if count == self._ends.size:
            self._allocate(2 * count)
        at = int(self._ends[:count].searchsorted(end, "right"))
        known = at > 0 and int(self._ends[at - 1]) == end
        blocks = self._blocks[at - 1] if known else self._usage_at(end, at)
        shared = self._shared[at - 1] if known else self._shared_at(at)
        for column, value in (
            (self._ends, end),
            (self._starts, one.prefill_steps),
            (self._bases, one.held + self._block_tokens - 1),
            (self._blocks, blocks),
            (self._shared, shared),
        ):
            column[at + 1 : count + 1] = column[at:count]
            column[at] = value
        self._count += 1
        self._blocks[: at + 1] += self._blocks_of(one, at + 1)
        if one.shared_blocks:
            self._join(one)

    def remove(self, one: Growth) -> None:
        """Someone leaves: anybody that grows as it does, for they are all alike."""
        count = self._count
        low, high = (int(self._ends[:count].searchsorted(one.end, side)) for side in ("left", "right"))
        alike = (self._starts[low:high] == one.prefill_steps) & (
            self._bases[low:high] == one.held + self._block_tokens - 1
        )
        assert alike.any(), "who leaves has entered"
        at = low + int(alike.argmax())
        if one.shared_blocks:
            self._leave(one)
        self._blocks[:high] -= self._blocks_of(one, high)
        for column in (self._ends, self._starts, self._bases, self._blocks, self._shared):
            column[at : count - 1] = column[at + 1 : count]
        self._count -= 1

    def peak(self) -> int:
        """The peak of those that are in."""
        count = self._count
        return int((self._blocks[:count] - self._shared[:count]).max()) if count else 0

    def peak_with(self, growths: Sequence[Growth]) -> int:
        """The peak if these entered as well."""
        if not growths or any(one != growths[0] for one in growths):
            trial = self._copy()
            for one in growths:
                trial.add(one)
            return trial.peak()
        one, number = growths[0], len(growths)
        # The choices of one prompt are all alike, and share among themselves what they share with others.
        double = (number - 1) * one.shared_blocks
        count, end = self._count, one.end
        at = int(self._ends[:count].searchsorted(end, "right"))
        held = self._blocks[:count] - self._shared[:count]
        held[:at] += self._blocks_of(one, at) * number - double
        own = -(-(one.held + one.grows) // self._block_tokens) * number - double
        if one.shared_blocks:
            for low, high, blocks in self._sharing(one):
                held[low:high] -= blocks
        peak = int(held.max()) if count else 0
        if at > 0 and int(self._ends[at - 1]) == end:
            return peak
        # At its own end nothing was reckoned yet; what the others hold there is at most what they hold at the next end.
        if at < count and int(held[at]) + own <= peak:
            return peak
        last = self._usage_at(end, at) - self._shared_at(at) + own
        if one.shared_blocks:
            last -= min(one.shared_blocks, self._most_shared(one.key, end))
        return max(peak, last)

    def steps_until_room(self, growths: Sequence[Growth], ceiling_blocks: int) -> int:
        """Steps until there is surely room for these below the ceiling, if nobody else enters before.

        As if they held from the first what they come to hold at last: long prompts nearly do.
        """
        count = self._count
        own = sum(-(-(one.held + one.grows) // self._block_tokens) for one in growths)
        held = self._blocks[:count] - self._shared[:count]
        # From the last end on backwards: the most that is held from there on.
        most = np.maximum.accumulate(held[::-1])
        first = count - int(most.searchsorted(ceiling_blocks - own, "right"))
        return int(self._ends[first - 1]) if first else 0

    def _blocks_of(self, one: Growth, count: int) -> Ints:
        """What it holds at the first `count` ends, none of which is later than its own."""
        tokens = self._ends[:count] - one.prefill_steps
        np.maximum(tokens, 0, out=tokens)
        tokens += one.held + self._block_tokens - 1
        tokens //= self._block_tokens
        return tokens

    def _usage_at(self, step: int, at: int) -> int:
        """What those from `at` on hold at a step that is no later than their ends, shared blocks as often as held."""
        tokens = step - self._starts[at : self._count]
        np.maximum(tokens, 0, out=tokens)
        tokens += self._bases[at : self._count]
        tokens //= self._block_tokens
        return int(tokens.sum())

    # Shared blocks: what is counted more than once changes only where somebody ends.

    def _shared_at(self, at: int) -> int:
        return int(self._shared[at]) if at < self._count else 0

    def _most_shared(self, key: bytes, step: int) -> int:
        return max((blocks for end, blocks in self._groups.get(key, ()) if end >= step), default=0)

    def _sharing(self, one: Growth) -> Iterator[tuple[int, int, int]]:
        """(from, to, blocks): at which ends it holds blocks that others of its group hold too, while they are there."""
        ends, most, members = self._ends[: self._count], 0, self._groups.get(one.key, ())
        for index in range(len(members) - 1, -1, -1):
            end, blocks = members[index]
            most = max(most, blocks)
            everything = most >= one.shared_blocks or not index
            # Before this one's end, down to the next that might share more.
            low = 0 if everything else int(ends.searchsorted(min(one.end, members[index - 1][0]), "right"))
            yield low, int(ends.searchsorted(min(one.end, end), "right")), min(most, one.shared_blocks)
            if everything:
                return

    def _group(self, growths: Sequence[Growth]) -> None:
        for one in growths:
            self._groups.setdefault(one.key, []).append((one.end, one.shared_blocks))
        double: list[tuple[int, int]] = []
        """(end, blocks that are counted twice until then)"""
        for members in self._groups.values():
            members.sort()
            most = 0
            for end, blocks in reversed(members):
                double.append((end, min(blocks, most)))
                most = max(most, blocks)
        self._shared[: self._count] = 0
        if double:
            ends = self._ends[: self._count]
            until, blocks_twice = np.array(double, dtype=np.int64).T
            np.add.at(self._shared, ends.searchsorted(until, "right") - 1, blocks_twice)
            self._shared[: self._count] = self._shared[: self._count][::-1].cumsum()[::-1]

    def _join(self, one: Growth) -> None:
        for low, high, blocks in self._sharing(one):
            self._shared[low:high] += blocks
        insort(self._groups.setdefault(one.key, []), (one.end, one.shared_blocks))

    def _leave(self, one: Growth) -> None:
        members = self._groups[one.key]
        members.remove((one.end, one.shared_blocks))
        if not members:
            del self._groups[one.key]
        for low, high, blocks in self._sharing(one):
            self._shared[low:high] -= blocks

    # The arrays.

    def _allocate(self, capacity: int) -> None:
        columns = np.zeros((5, capacity), dtype=np.int64)
        if self._count:
            columns[:, : self._count] = self._columns[:, : self._count]
        self._columns: Ints = columns
        self._ends, self._starts, self._bases, self._blocks, self._shared = columns

    def _copy(self) -> FuturePeak:
        copy = FuturePeak(self._block_tokens)
        copy._count = self._count
        copy._columns = self._columns.copy()
        copy._ends, copy._starts, copy._bases, copy._blocks, copy._shared = copy._columns
        copy._groups = {key: members.copy() for key, members in self._groups.items()}
        return copy


def _usage_at_ends(held: Ints, starts: Ints, ends: Ints, block_tokens: int) -> Ints:
    """What all hold together at each end, sorted by it.

    At step t a growing request holds ⌊(t + c) / B⌋ blocks with c = held − p + B − 1: the sum over those that grow needs
    only their number, the sum of ⌊c / B⌋ and how many of the residues c mod B overflow with that of t.
    """
    by_start = starts.argsort(kind="stable")
    started = starts[by_start].searchsorted(ends, "left")
    ended = ends.searchsorted(ends, "left")
    quotients, residues = np.divmod(held - starts + block_tokens - 1, block_tokens)
    blocks = -(-held // block_tokens)
    waiting: Ints = blocks.sum() - _sums(blocks[by_start])[started]
    whole, rest = np.divmod(ends, block_tokens)
    growing: Ints = _sums(quotients[by_start])[started] - _sums(quotients)[ended]
    growing += (started - ended) * whole
    growing += _overflows(residues[by_start], block_tokens)[started, rest]
    growing -= _overflows(residues, block_tokens)[ended, rest]
    growing += waiting
    return growing


def _sums(values: Ints) -> Ints:
    """Sums of the first 0, 1, … values."""
    return np.concatenate(([0], values.cumsum()))


def _overflows(residues: Ints, block_tokens: int) -> Ints:
    """Row k, column x: how many of the first k residues reach a whole block together with x."""
    table = np.zeros((residues.size + 1, block_tokens + 1), dtype=np.int64)
    table[np.arange(1, residues.size + 1), block_tokens - residues] = 1
    counts: Ints = table.cumsum(axis=0).cumsum(axis=1)
    return counts
