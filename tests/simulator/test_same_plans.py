"""The engine with a scripted runner and the simulator plan the same, step for step: ten thousand random requests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from simulator.scenes import document
from sluice_engine.core.assemble import assemble
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.request import Request, SamplingParams
from sluice_operator.rendering.files import Paths, files
from sluice_simulator import scenario
from sluice_simulator.run import run
from sluice_simulator.scenario import Scenario
from sluice_simulator.workload import Arrival, Content, prompt_of

REQUESTS = 10_000
END = 0

Told = tuple[int, tuple[tuple[str, int, int, int, bool], ...], tuple[tuple[str, str, str], ...], int, int]


def told(plan: StepPlan) -> Told:
    """What a plan is, in values."""
    shares = tuple((one.request.id, one.slot, one.start, one.num_tokens, one.samples) for one in plan.scheduled)
    victims = tuple((one.request_id, one.choice, one.reason) for one in plan.preempted)
    return plan.step, shares, victims, plan.predicted_us, plan.free_blocks_after


class ScriptedEngine:
    """An engine's loop over a script, with a clock of its own: what `service.py` does, without its threads."""

    def __init__(self, described: Scenario) -> None:
        told_to = files(described.spec, Paths())
        machine = described.machine
        self._core = assemble(
            told_to.engine,
            told_to.live,
            machine.times,
            machine.capacity,
            num_host_blocks=machine.num_host_blocks,
            link=machine.link,
        )
        self._loop = EngineLoop(self._core.scheduler, self, lambda: self._now_us)
        self._now_us = 0
        self._ends: dict[str, int] = {}
        self.plans: list[Told] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(told(plan))
        self._now_us += max(1, plan.predicted_us)
        rows = plan.sampling()
        tokens = [END if row.start + row.num_tokens == self._ends.get(row.request.id) else 7 for row in rows]
        return StepResult(plan.step, np.array(tokens, dtype=np.int64))

    def serve(self, arrivals: list[Arrival]) -> list[Told]:
        coming = iter(enumerate(arrivals))
        number, arrival = next(coming, (0, None))
        while arrival is not None or self._loop.has_work:
            if arrival is not None and not self._loop.has_work:
                self._now_us = max(self._now_us, arrival.time_us)
            while arrival is not None and arrival.time_us <= self._now_us:
                self._add(number, arrival)
                number, arrival = next(coming, (0, None))
            self._loop.step()
        return self.plans

    def _add(self, number: int, arrival: Arrival) -> None:
        request_id = f"r{number}/0"
        if arrival.output_tokens < arrival.max_tokens:
            self._ends[request_id] = arrival.prompt_tokens + arrival.output_tokens - 1
        request = Request(
            id=request_id,
            tokens=prompt_of(dataclasses.replace(arrival, content=arrival.content.of_load(0)), number),
            num_prompt=arrival.prompt_tokens,
            sampling=SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, stop_token_ids=frozenset({END})),
            arrival_us=arrival.time_us,
            priority=arrival.priority if arrival.priority is not None else 4,
            tenant=arrival.tenant or "",
        )
        assert self._loop.add(request) is None


@dataclass
class Listed:
    """Arrivals as they are listed."""

    listed: list[Arrival]

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        return (dataclasses.replace(one) for one in self.listed)

    @property
    def last_us(self) -> int:
        return self.listed[-1].time_us


class Noting:
    """The predicted times, and every plan noted."""

    def __init__(self) -> None:
        self.plans: list[Told] = []

    def of(self, plan: StepPlan) -> int:
        self.plans.append(told(plan))
        return max(1, plan.predicted_us)


def random_arrivals(source: random.Random, count: int) -> list[Arrival]:
    arrivals, time_us = [], 0
    for _ in range(count):
        time_us += round(source.expovariate(source.choice([2, 20, 200])) * 1e6)
        output = source.randint(1, 60)
        arrivals.append(
            Arrival(
                time_us,
                source.choice([source.randint(1, 80), source.randint(1, 900)]),
                output,
                output + source.choice([0, 0, 30]),
                Content((source.randrange(3),), 64) if source.random() < 0.3 else Content(),
                priority=source.choice([0, 2, 4, 6, 8]),
                tenant=source.choice(["", "a", "b"]),
            )
        )
    return arrivals


# A pool so small that requests are preempted, one that is never full, a chunk, a share, and one request at a time.
CASES: dict[str, dict[str, object]] = {
    "a pool so small that requests are preempted": {"machine__kvCapacityTokens": 1600},
    "preempted requests kept on a host that is sometimes full": {
        "machine__kvCapacityTokens": 1600,
        "machine__kvBytesPerToken": 1 << 20,
        "cache__hostSwapCapacity": "640Mi",
    },
    "a pool that is never full": {"machine__kvCapacityTokens": 262_144},
    "a chunk of 128": {"scheduling__prefillChunkTokens": 128, "machine__kvCapacityTokens": 4096},
    "a share of 64": {"scheduling__maxPrefillTokensPerRequest": 64, "machine__kvCapacityTokens": 8192},
    "three at a time": {"scheduling__maxSequences": 3, "machine__kvCapacityTokens": 4096},
}


@pytest.mark.parametrize("case", CASES)
def test_engine_and_simulator_plan_the_same(case: str) -> None:
    changes = {"gate": "Disabled", "machine__maxLengthTokens": 1024, "loads__0__outputTokens": {"mean": 9, "most": 99}}
    described = scenario.parse(document(**changes, **CASES[case]), "small.yaml")
    arrivals = random_arrivals(random.Random(case), REQUESTS // len(CASES))
    listed = dataclasses.replace(described.loads[0], source=Listed(arrivals))
    noting = Noting()

    engine = ScriptedEngine(described).serve(arrivals)
    run(dataclasses.replace(described, loads=(listed,), duration_us=None), lambda _: noting)

    assert len(engine) > 1000
    assert [a[0] for a in engine] == list(range(1, len(engine) + 1))
    for ours, theirs in zip(noting.plans, engine, strict=True):
        assert ours == theirs
    if "preempted" in case:
        assert sum(len(plan[2]) for plan in engine) > 20
    if "host" in case:
        reasons = {reason for plan in engine for _, _, reason in plan[2]}
        assert reasons >= {"cheaper", "host_pool_full"}


def test_arrivals_are_in_order() -> None:
    arrivals = random_arrivals(random.Random(1), 1000)

    assert all(a.time_us <= b.time_us for a, b in pairwise(arrivals))
