"""Steady overload: what the gate lets in is served within the promise, and as much as the engine can do.

The control is the same engine without a gate: a queue without bound, in which every request waits too long. Just below
the capacity that queue does well, and the gate must do no worse. For retries the control is a gate without a budget.
"""

from __future__ import annotations

from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, SDK, WARMUP_S, Ran, chat, ran, scene

# Rates of the goodput curve, in capacities.
CURVE = (0.5, 0.75, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)


# Where a queue without a gate still keeps the promise.
BELOW = (0.9, 0.95)


def at(rate: float, seconds: float, *, gate: bool, retries: bool = True, **changes: object) -> Ran:
    """A minute to warm up, then so many seconds at a steady rate."""
    load = chat([(rate, 1)], retries=SDK if retries else NO_RETRIES)
    return ran(scene([load], WARMUP_S + seconds, gate=gate, warmup_s=WARMUP_S, **changes))


def attempts(one: Ran) -> float:
    """For each request."""
    return one.load.attempts / max(1, one.load.requests)


def good_percent(one: Ran) -> float:
    """Of the requests."""
    return 100 * one.load.good / max(1, one.load.requests)


def capacity(seconds: float) -> float:
    """The largest rate at which the engine alone keeps the promise to 99 % of the requests."""
    low, high = 0.75 * CHAT_CAPACITY, 1.35 * CHAT_CAPACITY
    for _ in range(5):
        rate = (low + high) / 2
        load = at(rate, seconds, gate=False, retries=False).load
        low, high = (rate, high) if load.good >= 0.99 * load.requests else (low, rate)
    return low


def run(*, quick: bool) -> Findings:
    """The bars of steady overload."""
    findings = Findings()
    seconds = 60 if quick else 300
    most = CHAT_CAPACITY if quick else capacity(seconds)
    findings.data["capacity_per_s"] = round(most, 2)
    for factor in (1.2,) if quick else (1.2, 2.0):
        gated, control = (at(factor * most, seconds, gate=gate) for gate in (True, False))
        findings.data[f"{factor}x"] = {"gate": gated.row(), "no gate": control.row()}
        findings.bar(f"steady {factor}×: goodput of capacity", gated.goodput / most, "", 0.95)
        findings.most(f"steady {factor}×: answers that missed the promise", gated.missed_percent, "%", 1.0)
        findings.most(f"steady {factor}×: attempts for each request", attempts(gated), "", 1.35)
        findings.most(f"steady {factor}×, control without a gate: goodput of capacity", control.goodput / most, "", 0.5)
    if quick:
        return findings
    free = at(2.0 * most, seconds, gate=True, service__spec__admission__retryBudgetPercent=100)
    findings.data["2.0x"]["no budget"] = free.row()
    findings.bar("steady 2.0×, control without a budget: attempts for each request", attempts(free), "", 1.35)
    for factor in BELOW:
        gated, queue = (at(factor * most, seconds, gate=gate, retries=False) for gate in (True, False))
        findings.data[f"{factor}x"] = {"gate": gated.row(), "no gate": queue.row()}
        worse = good_percent(queue) - good_percent(gated)
        findings.most(f"steady {factor}×: points of good requests that a queue without a gate has more", worse, "", 1.0)
    _curve(findings, most)
    return findings


def _curve(findings: Findings, most: float) -> None:
    """Goodput from well below the capacity to far above it."""
    curves = {
        name: [round(at(factor * most, 120, gate=gate, retries=False).goodput, 3) for factor in CURVE]
        for name, gate in (("gate", True), ("no gate", False))
    }
    findings.data["curve"] = {"rate": [round(factor * most, 2) for factor in CURVE], **curves}
    findings.bar("goodput curve: the last over its peak", curves["gate"][-1] / max(curves["gate"]), "", 0.95)
    name = "goodput curve, control: the last over its peak"
    findings.most(name, curves["no gate"][-1] / max(curves["no gate"]), "", 0.5)
