"""When to come back: how far the suggested wait is from the time it takes, and whether the crowd comes back spread.

Chat at well above the capacity, long prompts among it, once without an end and once in bursts that end again and again.
What was refused is asked for at the door in thought, every 20 ms, until there would be room for it and for nobody
before it. Suggestion and observation are compared as a client can live them: nobody is told to come within less than a
second, so a room that is there sooner counts as a second. By kind, by tenth of the sizes and by scene the medians stand
in the data, with and without that floor. The largest tenth has no bar of its own: its wait is a matter of who else
takes what falls free, and nothing that a gate knows foretells it (docs/overload.md). The control tells everybody the
same: no spread.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, Document, Watched, chat, ran, scene
from sluice_sidecar.errors import Refusal
from sluice_sidecar.retries.retry_after import LEAST_US, MOST_WAIT_US, RetryAfter
from sluice_simulator.call import Call
from sluice_simulator.replica import Replica
from sluice_simulator.run import World

BURST_S, PAUSE_S = 20, 20
STEADY_S = 90
SMALL: Document = {"promptTokens": {"distribution": "LogNormal", "mean": 600, "sigma": 0.5, "most": 2000}}
LONG: Document = {"promptTokens": {"distribution": "Uniform", "least": 8000, "most": 14_000}}
LAST_S = 4.0
WARM_S = 30
LOOK_US = 20_000
GIVEN_UP_US = 40_000_000
LASTS = "overload that lasts"


class Wait(NamedTuple):
    """One that was refused."""

    tokens: int
    """Prompt and expected answer."""
    told_us: int
    seen_us: int
    """Until there was room for it."""


class Asked:
    """Looks when there is room for what was refused, of those that `counts` tells to look for."""

    def __init__(self, counts: Callable[[float], bool]) -> None:
        """`counts(now_s)`: whether one that is refused at that time is looked for."""
        self._counts = counts
        self.waits: dict[str, list[Wait]] = {}
        """By kind of load."""

    def prepare(self, world: World) -> None:
        (replica,) = world.replicas
        watched = world.watch
        assert isinstance(watched, Watched)
        refused = watched.refused

        def ask(call: Call, refusal: Refusal) -> None:
            refused(call, refusal)
            if refusal.wait_us and self._counts(world.events.now_us / 1e6):
                self._look(world, replica, call, refusal.wait_us, world.events.now_us)

        watched.refused = ask  # type: ignore[method-assign]  # an experiment's

    def _look(self, world: World, replica: Replica, call: Call, wait_us: int, asked_us: int) -> None:
        gate = replica.gate
        assert gate is not None, "an experiment with a gate"
        cost = replica.price(call)
        if isinstance(cost, Refusal):
            return
        now_us = world.events.now_us
        held = gate.classes.look(call.sender.config.terms.service_class, cost, gate.room, now_us, 0).held
        if (held is not None or gate.waiting) and now_us - asked_us < GIVEN_UP_US:
            world.events.after(LOOK_US, partial(self._look, world, replica, call, wait_us, asked_us))
            return
        tokens = cost.prompt_tokens + cost.decode_tokens
        self.waits.setdefault(call.sender.name, []).append(Wait(tokens, wait_us, max(LOOK_US, now_us - asked_us)))

    @property
    def all(self) -> list[Wait]:
        """Of every kind, the smallest first."""
        return sorted(wait for kind in self.waits.values() for wait in kind)

    def tenths(self) -> list[list[Wait]]:
        """Of all, by size."""
        waits = self.all
        return [waits[len(waits) * tenth // 10 : len(waits) * (tenth + 1) // 10] for tenth in range(10)]


def lived_us(wait_us: int) -> int:
    """A wait as a client lives it, who is told nothing below a second and nothing above the most."""
    return min(MOST_WAIT_US, max(LEAST_US, wait_us))


def median_error(waits: list[Wait], bound: Callable[[int], int] = lived_us) -> float:
    """How far suggestions were off in the median, in percent of what was observed."""
    return 100 * statistics.median(abs(bound(told) - bound(seen)) / bound(seen) for _, told, seen in waits)


def without_end() -> Asked:
    """Overload that lasts."""
    asked = Asked(lambda now_s: now_s > WARM_S)
    loads = [
        chat([(rate, STEADY_S)], name=name, retries=NO_RETRIES, timeout="300s", **shape)
        for name, rate, shape in (("chat", 1.6 * CHAT_CAPACITY, SMALL), ("long", 1.0, LONG))
    ]
    ran(scene(loads, STEADY_S), asked.prepare)
    return asked


def in_bursts(bursts: int) -> Asked:
    """Bursts and pauses: those that are refused just before a burst ends."""
    asked = Asked(lambda now_s: BURST_S - LAST_S <= now_s % (BURST_S + PAUSE_S) < BURST_S)
    loads = [
        chat([(rate, BURST_S), (0.0, PAUSE_S)] * bursts, name=name, retries=NO_RETRIES, timeout="300s", **shape)
        for name, rate, shape in (("chat", 2 * CHAT_CAPACITY, SMALL), ("long", 1.0, LONG))
    ]
    ran(scene(loads, bursts * (BURST_S + PAUSE_S)), asked.prepare)
    return asked


def returning(seconds: float, *, spread: bool) -> list[int]:
    """How many said that they would come again, in each second of a run with one big burst."""

    def narrow(world: World) -> None:
        for replica in world.replicas:
            assert replica.gate is not None, "an experiment with a gate"
            replica.gate.returning.retry_after = RetryAfter(lambda lo, hi: lo)  # noqa: ARG005  # an experiment's

    load = chat([(CHAT_CAPACITY, 60), (200.0, 1), (0.0, seconds)], retries=NO_RETRIES)
    one = ran(scene([load], 61 + seconds), None if spread else narrow)
    after = [second for second in (at_us // 1_000_000 for at_us in one.watched.retry_at) if second >= 60]
    counts = Counter(after)
    return [counts[second] for second in range(min(counts), max(counts) + 1)]


def run(*, quick: bool) -> Findings:
    """The bars of Retry-After."""
    findings = Findings()
    scenes = {LASTS: without_end(), "the end of a burst": in_bursts(3 if quick else 20)}
    told: dict[str, Document] = {}
    for where, asked in scenes.items():
        for kind, waits in sorted(asked.waits.items()):
            told[f"{where}: {kind}"] = {
                "count": len(waits),
                "median_error_percent": round(median_error(waits), 1),
                "median_error_without_floor_percent": round(median_error(waits, int), 1),
                "suggested_and_observed_ms": [(a // 1000, b // 1000) for _, a, b in waits[:20]],
            }
        tenths = asked.tenths()
        medians = [round(median_error(waits), 1) for waits in tenths]
        told[f"{where}, by tenth of the sizes"] = {
            "up_to_tokens": [waits[-1].tokens for waits in tenths],
            "median_error_percent": medians,
            "median_error_without_floor_percent": [round(median_error(waits, int), 1) for waits in tenths],
        }
        name = f"Retry-After: median error of the suggested wait, {where}"
        findings.most(name, median_error(asked.all), "%", 50)
        if where == LASTS:
            findings.most(f"{name}, the worst of the nine smaller tenths by size", max(medians[:-1]), "%", 50)
    findings.data["suggestions"] = told
    span_s = 1
    for spread in (True, False):
        counts = returning(30, spread=spread)
        # Over as many seconds as the gate makes of it.
        span_s = max(span_s, len(counts))
        mean = sum(counts) / span_s
        findings.data["returning" if spread else "returning, no spread"] = counts
        if spread:
            findings.most("Retry-After: fullest second of the returning over the mean", max(counts) / mean, "×", 2)
        else:
            findings.bar(
                "Retry-After, control without a spread: fullest second over the mean", max(counts) / mean, "×", 2
            )
    return findings
