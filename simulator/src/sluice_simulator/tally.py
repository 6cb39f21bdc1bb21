"""What came of a run: counts, quantiles and the timeline, in memory that does not grow with its length.

Owns the numbers; their words are `report`'s. A request counts where it arrived inside the measured window. It is good
when the gate's own measure says that the promise was kept and it ended by its deadline.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sluice_engine.core.plan import Ints
from sluice_simulator.histogram import Histogram
from sluice_simulator.timeline import Timeline


@dataclass(slots=True)
class LoadTally:
    """One load's numbers."""

    requests: int = 0
    """First attempts."""
    attempts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Final ones, one for each request."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Of attempts, by the gate's reason."""
    good: int = 0
    missed_ttft: int = 0
    missed_itl: int = 0
    missed_deadline: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    """From the arrival of the attempt that was served: what the gate measures."""
    ttft_with_retries: Histogram = field(default_factory=Histogram)
    """From the first attempt's."""
    gaps: Histogram = field(default_factory=Histogram)
    """Between tokens that came after the warm-up."""
    latency: Histogram = field(default_factory=Histogram)
    """Of those that finished, from the first attempt."""


class Tally:
    """All loads and all replicas."""

    def __init__(self, loads: list[str], window_from_us: int, slice_us: int) -> None:
        self.loads = {name: LoadTally() for name in loads}
        self.window_from_us = window_from_us
        self.timeline = Timeline(slice_us)
        self.open = 0
        """Requests that have not come to their end."""
        self.last_end_us = 0
        self.steps = 0
        self.empty_steps = 0
        self.busy_us = 0
        self.batch_most = 0
        self.used_blocks_most = 0
        self.door_wait = Histogram()

    def arrived(self, load: str, now_us: int) -> LoadTally | None:
        """A request came for the first time: where it is counted, None where it is outside the window."""
        self.open += 1
        self.timeline.at(now_us).arrived += 1
        if now_us < self.window_from_us:
            return None
        self.loads[load].requests += 1
        return self.loads[load]

    def counts(self, now_us: int) -> bool:
        """Whether the warm-up is over."""
        return now_us >= self.window_from_us

    def gaps(self, gaps_us: Ints, loads: list[str] | None) -> None:
        """Gaps before the tokens of a step, 0 where there is none; `loads` are theirs, None where there is only one."""
        if loads is None:
            (only,) = self.loads.values()
            only.gaps.add_all(gaps_us[gaps_us > 0])
            return
        for name, load in self.loads.items():
            load.gaps.add_all(gaps_us[[one == name for one in loads] & (gaps_us > 0)])

    def ended(self, tally: LoadTally | None, outcome: str, now_us: int, *, good: bool) -> None:
        """A request came to its end."""
        self.open -= 1
        self.last_end_us = max(self.last_end_us, now_us)
        moment = self.timeline.at(now_us)
        moment.ended += 1
        moment.good += good
        if tally is not None:
            tally.outcomes[outcome] += 1
            tally.good += good

    def step(  # one number a column of the timeline
        self, started_us: int, took_us: int, *,
        running: int, waiting: int, used_blocks: int, prefill: int, decodes: int, preempted: int,
    ) -> None:  # fmt: skip
        """A replica ran a step."""
        self.steps += 1
        self.busy_us += took_us
        self.batch_most = max(self.batch_most, running)
        self.used_blocks_most = max(self.used_blocks_most, used_blocks)
        moment = self.timeline.at(started_us)
        moment.busy_us += took_us
        moment.running_us += running * took_us
        moment.waiting_us += waiting * took_us
        moment.used_us += used_blocks * took_us
        moment.prefill_tokens += prefill
        moment.decode_tokens += decodes
        moment.preempted += preempted
