"""When to come back: how far the suggested wait is from the time it takes, and whether the crowd comes back spread.

Bursts of chat at twice the capacity, a few long prompts among it, end again and again; the long prompts that were
refused last are asked for at the door in thought, every 20 ms, until there would be room for them, and nobody before
them. They need the blocks of several others. (One that needs a single end waits for a moment that nobody knows better
than its mean, which half of such moments miss by more than half.) The control tells everybody the same: no spread.
"""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial

from experiments.scene import CHAT_CAPACITY, NO_RETRIES, Document, Findings, Watched, chat, ran, scene
from sluice_sidecar.errors import Refusal
from sluice_sidecar.retry_after import RetryAfter
from sluice_simulator.call import Call
from sluice_simulator.replica import Replica
from sluice_simulator.run import World

BURST_S, PAUSE_S = 20, 20
ASKED_FOR = "long"
SMALL: Document = {"promptTokens": {"distribution": "LogNormal", "mean": 600, "sigma": 0.5, "most": 2000}}
LONG: Document = {"promptTokens": {"distribution": "Uniform", "least": 8000, "most": 14_000}}
LAST_S = 4.0
LOOK_US = 20_000
GIVEN_UP_US = 40_000_000


class Asked:
    """Looks when there is room for what was refused."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        """Of the suggestion, relative to the observed time."""
        self.pairs: list[tuple[int, int]] = []

    def prepare(self, world: World) -> None:
        (replica,) = world.replicas
        watched = world.watch
        assert isinstance(watched, Watched)
        refused = watched.refused

        def ask(call: Call, refusal: Refusal) -> None:
            refused(call, refusal)
            into_s = world.events.now_us / 1e6 % (BURST_S + PAUSE_S)
            if refusal.wait_us and call.sender.name == ASKED_FOR and BURST_S - LAST_S <= into_s < BURST_S:
                self._look(world, replica, call, refusal, world.events.now_us)

        watched.refused = ask  # type: ignore[method-assign]  # an experiment's

    def _look(self, world: World, replica: Replica, call: Call, refusal: Refusal, asked_us: int) -> None:
        gate = replica.gate
        assert gate is not None, "an experiment with a gate"
        cost = replica.price(call)
        if isinstance(cost, Refusal):
            return
        now_us = world.events.now_us
        held = gate.classes.look(call.sender.config.terms.service_class, cost, gate.room, now_us, 0).held
        if (held is not None or gate.waiting) and now_us - asked_us < GIVEN_UP_US:
            world.events.after(LOOK_US, partial(self._look, world, replica, call, refusal, asked_us))
            return
        observed_us, wait_us = max(LOOK_US, now_us - asked_us), refusal.wait_us
        assert wait_us is not None, "asked for those with a suggestion only"
        self.pairs.append((wait_us, observed_us))
        self.errors.append(abs(wait_us - observed_us) / observed_us)


def suggestions(bursts: int) -> Asked:
    """Bursts and pauses."""
    asked = Asked()
    loads = [
        chat([(rate, BURST_S), (0.0, PAUSE_S)] * bursts, name=name, retries=NO_RETRIES, timeout="300s", **shape)
        for name, rate, shape in (("chat", 2 * CHAT_CAPACITY, SMALL), (ASKED_FOR, 1.0, LONG))
    ]
    ran(scene(loads, bursts * (BURST_S + PAUSE_S)), asked.prepare)
    return asked


def returning(seconds: float, *, spread: bool) -> list[int]:
    """How many said that they would come again, in each second of a run with one big burst."""

    def narrow(world: World) -> None:
        for replica in world.replicas:
            assert replica.gate is not None, "an experiment with a gate"
            replica.gate.retry_after = RetryAfter(lambda lo, hi: lo)  # noqa: ARG005  # an experiment's

    load = chat([(CHAT_CAPACITY, 60), (200.0, 1), (0.0, seconds)], retries=NO_RETRIES)
    one = ran(scene([load], 61 + seconds), None if spread else narrow)
    after = [second for second in (at_us // 1_000_000 for at_us in one.watched.retry_at) if second >= 60]
    counts = Counter(after)
    return [counts[second] for second in range(min(counts), max(counts) + 1)]


def run(*, quick: bool) -> Findings:
    """The bars of Retry-After."""
    findings = Findings()
    asked = suggestions(3 if quick else 20)
    error = 100 * statistics.median(asked.errors)
    findings.data["suggestions"] = {
        "count": len(asked.errors), "median_error_percent": round(error, 1),
        "suggested_and_observed_ms": [(round(a / 1000), round(b / 1000)) for a, b in asked.pairs[:40]],
    }  # fmt: skip
    findings.most("Retry-After: median error of the suggested wait", error, "%", 50)
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
