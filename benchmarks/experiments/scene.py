"""What the experiments have in common: one machine, one service, loads, and what is watched while a run happens.

The machine is a line that no real one is, and near enough to a GPU of the middle class: a step of 12 ms, 35 µs for each
token of prefill, 50 µs for each decode, 0.1 µs for each token of context, with a spread of 5 %; 81,920 tokens of KV.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from experiments import seeds
from sluice_engine.core.steptime import StepTable
from sluice_sidecar.errors import Refusal
from sluice_simulator import scenario
from sluice_simulator.call import Call, Watch
from sluice_simulator.run import Finished, World
from sluice_simulator.tally import LoadTally

Document = dict[str, Any]
Prepare = Callable[[World], None]

_DECODES, _PREFILLS, _CONTEXTS = (0, 1, 64, 256), (0, 1, 8192), (0, 131_072)
TABLE = StepTable(
    decode_axis=_DECODES,
    prefill_axis=_PREFILLS,
    context_axis=_CONTEXTS,
    median_us=tuple(
        round(12_000 + 50 * decodes + (2000 + 35 * prefill if prefill else 0) + 0.1 * context)
        for decodes in _DECODES
        for prefill in _PREFILLS
        for context in _CONTEXTS
    ),
    # As an engine of this machine keeps it: a spread of 5 %, at the quantile that 99 % of the answers need.
    tail_ratio=1.2,
    measured_on="the experiments' line",
)
# The `openai` library's.
SDK: Document = {"most": 2}
NO_RETRIES: Document = {"most": 0}
WARMUP_S = 60
# Requests a second at which an engine without a gate keeps the promise to 99 % of the chat load: measured by
# `steady.capacity`, rounded. The other experiments take their rates from it.
CHAT_CAPACITY = 7.0
SHORT_CAPACITY = 9.5


def chat(stages: list[tuple[float, float]], *, name: str = "chat", **changes: object) -> Document:
    """Conversations: prompts of 1,100 tokens on average, answers of 220, and clients that ask for 1,024.

    `stages`: (requests a second, so many seconds); the last holds on.
    """
    return {
        "name": name,
        "arrivals": {"stages": [{"requestsPerSecond": rate, "lasting": f"{seconds}s"} for rate, seconds in stages]},
        "promptTokens": {"distribution": "LogNormal", "mean": 1100, "sigma": 1.0, "most": 12_000},
        "outputTokens": {"distribution": "LogNormal", "mean": 220, "sigma": 0.8, "most": 1024},
        "maxTokens": 1024,
        "timeout": "30s",
        "retries": SDK,
        **changes,
    }


def short(stages: list[tuple[float, float]], *, name: str = "chat", **changes: object) -> Document:
    """Shorter conversations, whose clients wait 10 s for the whole answer: what is slow is work for nothing."""
    shorter: Document = {
        "promptTokens": {"distribution": "LogNormal", "mean": 1100, "sigma": 0.8, "most": 6000},
        "outputTokens": {"distribution": "LogNormal", "mean": 160, "sigma": 0.6, "most": 320},
        "maxTokens": 320,
        "timeout": "10s",
    }
    return chat(stages, name=name, **{**shorter, **changes})


def scene(
    loads: list[Document], seconds: float, *, gate: bool = True, warmup_s: float = 0, **changes: object
) -> Document:
    """A scenario of one replica, with the seed that is set. `changes`: keys of the scenario, with `__` for the dots."""
    document: Document = {
        "name": "overload",
        "seed": seeds.current(),
        "duration": f"{seconds}s",
        "warmup": f"{warmup_s}s",
        "gate": "Enabled" if gate else "Disabled",
        "service": {"spec": {"slo": {"timeToFirstToken": "2s", "interTokenLatency": "150ms"}}},
        "machine": {"kvCapacityTokens": 81_920, "maxLengthTokens": 16_384, "noisePercent": 5},
        "promptBytesPerToken": 4,
        "loads": loads,
    }
    settings = [(key.replace("__", "."), value) for key, value in changes.items()]
    return scenario.with_settings(document, settings, "overload")


@dataclass(slots=True)
class Second:
    """What came of the requests whose first attempt was made in one second."""

    requests: int = 0
    good: int = 0


class Watched(Watch):
    """Requests by the second of their first attempt, by size, and refusals as they are given."""

    def __init__(self) -> None:
        self.seconds: dict[int, Second] = collections.defaultdict(Second)
        self.sizes: list[tuple[int, bool]] = []
        """(tokens asked for, whether it was answered), of each request."""
        self.retry_at: list[int] = []
        """When clients said that they would come again, µs."""
        self.refusals: list[tuple[int, Call, Refusal]] = []
        self.keeps_refusals = False

    def refused(self, call: Call, refusal: Refusal) -> None:
        now_us = call.sender.events.now_us
        if refusal.retry_after_us is not None:
            self.retry_at.append(now_us + refusal.retry_after_us)
        if self.keeps_refusals:
            self.refusals.append((now_us, call, refusal))

    def over(self, call: Call, outcome: str, *, good: bool) -> None:
        second = self.seconds[call.first_us // 1_000_000]
        second.requests += 1
        second.good += good
        self.sizes.append((call.arrival.prompt_tokens + call.arrival.max_tokens, outcome == "finished"))

    def good_percent(self, from_s: float, to_s: float) -> float:
        """Of the requests that came in between, how many were good."""
        found = [one for second, one in self.seconds.items() if from_s <= second < to_s]
        requests = sum(one.requests for one in found)
        return 100 * sum(one.good for one in found) / max(1, requests)

    def good_per_second(self, from_s: float, to_s: float) -> float:
        """Goodput of the requests that came in between."""
        return sum(one.good for second, one in self.seconds.items() if from_s <= second < to_s) / (to_s - from_s)


@dataclass(slots=True)
class Ran:
    """A run that is over, and what was watched."""

    finished: Finished
    watched: Watched
    world: World

    @property
    def load(self) -> LoadTally:
        """The numbers of the only load."""
        (only,) = self.finished.tally.loads.values()
        return only

    @property
    def goodput(self) -> float:
        """Good requests a second of the window, over all loads."""
        good = sum(load.good for load in self.finished.tally.loads.values())
        return good / (self.finished.scenario.window_us / 1e6)

    @property
    def missed_percent(self) -> float:
        """Of what was answered, how much missed the promise of a first token, or of the gaps: the larger."""
        loads = self.finished.tally.loads.values()
        answered = max(1, sum(load.outcomes["finished"] for load in loads))
        return 100 * max(sum(load.missed_ttft for load in loads), sum(load.missed_itl for load in loads)) / answered

    @property
    def preemptions(self) -> int:
        """Of the whole run."""
        return sum(replica.loop.scheduler.preemptions_total for replica in self.finished.replicas)

    @property
    def leftovers(self) -> int:
        """Ledger entries, waiting requests and blocks that nobody gave back: 0."""
        left = 0
        for replica in self.finished.replicas:
            scheduler = replica.loop.scheduler
            left += scheduler.pool.num_blocks - scheduler.pool.num_free + len(scheduler.requests)
            if replica.gate is not None:
                ledger = replica.gate.room.ledger
                left += len(ledger.entries) + ledger.double_closes_total + replica.gate.waiting
        return left

    def row(self) -> Document:
        """The figures of a table's row."""
        total = LoadTally()
        for load in self.finished.tally.loads.values():
            total.requests += load.requests
            total.attempts += load.attempts
            total.good += load.good
            total.missed_ttft += load.missed_ttft
            total.missed_itl += load.missed_itl
            total.outcomes += load.outcomes
            total.refusals += load.refusals
            total.ttft.merge(load.ttft)
        window_s = self.finished.scenario.window_us / 1e6
        return {
            "offered_per_s": round(total.requests / window_s, 2),
            "attempts_per_s": round(total.attempts / window_s, 2),
            "goodput_per_s": round(total.good / window_s, 2),
            "missed_ttft": total.missed_ttft,
            "missed_itl": total.missed_itl,
            "ttft_p99_ms": round((total.ttft.quantile_us(99) or 0) / 1000),
            "preemptions": self.preemptions,
            "outcomes": dict(total.outcomes),
            "refusals": dict(total.refusals),
        }


def ran(document: Document, prepare: Prepare | None = None, *, keeps_refusals: bool = False) -> Ran:
    """Let a scene happen on the experiments' machine. `prepare` changes the world before."""
    read = scenario.parse(document, "overload")
    machine = replace(
        read.machine,
        times=TABLE,
        real_times=TABLE,
        times_source=TABLE.measured_on,
        capacity=replace(read.machine.capacity, max_prefill_tokens=_PREFILLS[-1]),
    )
    watched = Watched()
    watched.keeps_refusals = keeps_refusals
    world = World(replace(read, machine=machine), watch=watched)
    if prepare is not None:
        prepare(world)
    return Ran(world.happen(), watched, world)
