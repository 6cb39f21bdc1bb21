"""Several seeds for each experiment: the scenes of one run share a seed, and a bar holds on the worst of them.

Owns which seeds there are and how the findings of several become one. An experiment knows nothing of it: its scenes
take the seed that is set, and what only one seed needs to show (a control that fails by far) asks `is_first`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from experiments.findings import Findings

SEEDS = (1, 2, 3)
_current: ContextVar[int] = ContextVar("seed", default=SEEDS[0])


def current() -> int:
    """The seed of every scene that is made now."""
    return _current.get()


def is_first() -> bool:
    """Whether this is the seed on which the costly controls run."""
    return current() == SEEDS[0]


@contextmanager
def using(seed: int) -> Iterator[None]:
    """Scenes that are made meanwhile have this seed."""
    token = _current.set(seed)
    try:
        yield
    finally:
        _current.reset(token)


def merged(found: Sequence[tuple[int, Findings]]) -> Findings:
    """One for all seeds: of each bar the worst, the figures of the first seed, and each bar's figures on all seeds."""
    whole = replace(found[0][1], bars=[], data=dict(found[0][1].data))
    names = dict.fromkeys(bar.name for _, findings in found for bar in findings.bars)
    spread = {}
    for name in names:
        bars = [(seed, bar) for seed, findings in found for bar in findings.bars if bar.name == name]
        values = [bar.value for _, bar in bars]
        worst = min if bars[0][1].better == "higher" else max
        whole.bars.append(replace(bars[0][1], value=worst(values), median=statistics.median(values)))
        spread[name] = {f"seed {seed}": bar.value for seed, bar in bars}
    whole.data["seeds"] = spread
    return whole
