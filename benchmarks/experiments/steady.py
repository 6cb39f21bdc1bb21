"""Steady overload: what the gate lets in is served within the promise, and as much as the engine can do.

The control is the same engine without a gate: a queue without bound, in which every request waits too long.
"""

from __future__ import annotations

from experiments.scene import CHAT_CAPACITY, NO_RETRIES, SDK, WARMUP_S, Findings, Ran, chat, ran, scene

# Rates of the goodput curve, in capacities.
CURVE = (0.5, 0.75, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)


def at(rate: float, seconds: float, *, gate: bool, retries: bool = True) -> Ran:
    """A minute to warm up, then so many seconds at a steady rate."""
    load = chat([(rate, 1)], retries=SDK if retries else NO_RETRIES)
    return ran(scene([load], WARMUP_S + seconds, gate=gate, warmup_s=WARMUP_S))


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
        attempts = gated.load.attempts / max(1, gated.load.requests)
        findings.most(f"steady {factor}×: attempts for each request", attempts, "", 1.35)
        findings.most(f"steady {factor}×, control without a gate: goodput of capacity", control.goodput / most, "", 0.5)
    if not quick:
        curves = {
            name: [round(at(factor * most, 120, gate=gate, retries=False).goodput, 3) for factor in CURVE]
            for name, gate in (("gate", True), ("no gate", False))
        }
        findings.data["curve"] = {"rate": [round(factor * most, 2) for factor in CURVE], **curves}
        findings.bar("goodput curve: the last over its peak", curves["gate"][-1] / max(curves["gate"]), "", 0.95)
        findings.most(
            "goodput curve, control: the last over its peak", curves["no gate"][-1] / max(curves["no gate"]), "", 0.5
        )
    return findings
