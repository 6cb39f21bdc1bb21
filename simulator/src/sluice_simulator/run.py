"""One run of a scenario: builds replicas, router and clients, lets virtual time pass, and returns what came of it.

The same scenario and seed give the same result, to the last digit: every source of randomness has its own seed, made of
the scenario's and its purpose. Start reading at `run`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from sluice_engine.core.assemble import Assembled, assemble
from sluice_engine.core.state import DerivedLimits
from sluice_operator.rendering.files import Paths, files
from sluice_sidecar.admission import Admission
from sluice_simulator.call import Call, Sender, Watch
from sluice_simulator.clients import RetryBudget
from sluice_simulator.events import Events
from sluice_simulator.executor import Durations, Executor, Noisy
from sluice_simulator.loads import Load
from sluice_simulator.replica import PodSettings, Replica
from sluice_simulator.router import router_of
from sluice_simulator.scenario import Scenario
from sluice_simulator.tally import Tally
from sluice_simulator.workload import Arrival, ClosedLoop, Source

# The timeline of a run has about this many slices; its width doubles where a run takes much longer.
_SLICES = 240

StepTimesOf = Callable[[int], Durations]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is over."""

    scenario: Scenario
    derived: DerivedLimits
    tally: Tally
    replicas: tuple[Replica, ...]


def run(scenario: Scenario, durations: StepTimesOf | None = None) -> Finished:
    """Let a scenario happen. `durations` gives each replica's step times, by its number, instead of the scenario's."""
    return World(scenario, durations).happen()


def assembled_of(scenario: Scenario) -> Assembled:
    """A new engine core for one of its replicas."""
    told = files(scenario.spec, Paths())
    machine = scenario.machine
    return assemble(
        told.engine,
        told.live,
        machine.times,
        machine.capacity,
        num_host_blocks=machine.num_host_blocks,
        link=machine.link,
    )


class World:
    """All that a run is made of. An experiment may change it before it happens, and watch while it does."""

    def __init__(self, scenario: Scenario, durations: StepTimesOf | None = None, watch: Watch | None = None) -> None:
        durations = durations or partial(_noisy, scenario)
        self.watch = watch or Watch()
        self.scenario = scenario
        self.events = Events()
        self.tally = Tally(
            [load.name for load in scenario.loads], scenario.warmup_us, max(1, scenario.end_us // _SLICES)
        )
        self.replicas = [self._replica(number, durations(number)) for number in range(scenario.spec.replicas)]
        self.derived = self.replicas[0].derived
        self.router = router_of(scenario.router, self.replicas)
        self._sending = len(scenario.loads)
        """Loads that may still send something."""
        self._numbers = iter(range(1 << 62))

    def happen(self) -> Finished:
        """Let time pass until nothing more will happen that counts."""
        for replica in self.replicas:
            replica.start(partial(assembled_of, self.scenario))
        for index, load in enumerate(self.scenario.loads):
            self._start(load, index)
        with _without_collector():
            self.events.run(lambda: self.is_over)
        return Finished(self.scenario, self.derived, self.tally, tuple(self.replicas))

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen that counts."""
        return not self._sending and not self.tally.open and all(replica.idle for replica in self.replicas)

    def _replica(self, number: int, durations: Durations) -> Replica:
        scenario = self.scenario
        told = files(scenario.spec, Paths())
        assembled = assembled_of(scenario)
        gate = None
        if scenario.has_gate:
            source = _source(scenario, f"gate {number}")
            gate = Admission(
                told.live,
                stale_after_us=told.gate.stale_after_us,
                blind_after_us=told.gate.blind_after_us,
                draw=source.randint,
            )
        overhead_us = scenario.machine.host_overhead_us
        promise_us = told.live.slo.inter_token_latency_us
        settings = PodSettings(
            inter_token_latency_us=promise_us,
            host_overhead_us=overhead_us,
            poll_us=told.gate.state_interval_us,
            told_factor=scenario.machine.told_factor,
            faults=scenario.faults,
            bytes_per_token=scenario.bytes_per_token,
        )
        return Replica(
            f"replica-{number}",
            assembled,
            Executor(durations, assembled.scheduler.rows.num_slots, scenario.machine.slowdowns),
            self.events,
            self.tally,
            gate,
            settings,
        )

    def _start(self, load: Load, index: int) -> None:
        scenario = self.scenario
        sender = Sender(
            name=load.name,
            config=load.client,
            slo=scenario.spec.live.slo,
            events=self.events,
            router=self.router,
            tally=self.tally,
            source=_source(scenario, f"clients of {load.name}"),
            budget=RetryBudget(load.client.retries.budget_percent),
            watch=self.watch,
        )
        source = _source(scenario, f"arrivals of {load.name}")
        if isinstance(load.source, ClosedLoop):
            self._start_loop(load.source, sender, source)
        else:
            self._next(_open(load.source, source, scenario.duration_us, index), sender)

    def _next(self, arrivals: Iterator[Arrival], sender: Sender) -> None:
        """Wait for the next arrival of an open stream."""
        arrival = next(arrivals, None)
        if arrival is None:
            self._sending -= 1
            return
        self.events.at(arrival.time_us, partial(self._arrive, arrival, arrivals, sender))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], sender: Sender) -> None:
        Call(next(self._numbers), arrival, sender).start()
        self._next(arrivals, sender)

    def _start_loop(self, loop: ClosedLoop, sender: Sender, source: random.Random) -> None:
        end_us = self.scenario.end_us

        def send() -> None:
            call = Call(next(self._numbers), loop.shape.draw(self.events.now_us, source), sender)
            call.then = again
            call.start()

        def again(call: Call) -> None:
            del call
            # A client that is refused at once, for ever, must not hold up the time.
            time_us = self.events.now_us + max(1, loop.think(source))
            if time_us < end_us:
                self.events.at(time_us, send)

        for _ in range(loop.clients):
            self.events.at(loop.think(source), send)
        self.events.at(end_us, self._loop_ended)

    def _loop_ended(self) -> None:
        self._sending -= 1


def _open(source: Source, randomness: random.Random, until_us: int | None, index: int) -> Iterator[Arrival]:
    """The arrivals of an open stream; shared heads of one load are no other's."""
    for arrival in source.arrivals(randomness, until_us):
        arrival.content = arrival.content.of_load(index)
        yield arrival


def _noisy(scenario: Scenario, number: int) -> Durations:
    machine = scenario.machine
    return Noisy(machine.real_times, machine.noise_sigma, _source(scenario, f"steps of {number}"), machine.slowdown)


def _source(scenario: Scenario, purpose: str) -> random.Random:
    return random.Random(f"{scenario.seed} {purpose}")  # noqa: S311  # reproducible, not secret


@contextmanager
def _without_collector() -> Iterator[None]:
    """A run makes millions of short-lived objects and no cycle: the collector would only walk them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        # A world refers to itself: the next run need not begin beside the last one's.
        gc.collect()
