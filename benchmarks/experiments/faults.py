"""Faults on the way of the state, at 1.2 times the capacity: the promise holds, blocks hold out, nothing is left over.

The control trusts the engine's last state alone, by thresholds, while that state hangs.
"""

from __future__ import annotations

from experiments.estimates import by_thresholds
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, Document, Findings, Ran, chat, ran, scene

AT_S, LASTS_S, AFTER_S = 60, 20, 40
# A fault, and the least share of the undisturbed goodput while it lasts. Nothing where there is no engine to serve;
# half of what ran while the gate is blind, which is the rule; an engine that is silent for 10 s is taken for dead.
FAULTS: dict[str, tuple[Document, float]] = {
    "state hangs": ({"kind": "StateHangs"}, 0.3),
    "state is an error": ({"kind": "StateFails"}, 0.4),
    "numbers are none": ({"kind": "StateNaN"}, 0.4),
    "parts are missing": ({"kind": "StateMissing"}, 0.4),
    "state stands still": ({"kind": "StateFrozen"}, 0.4),
    "counters begin anew": ({"kind": "CountersReset"}, 0.9),
    "engine restarts": ({"kind": "EngineRestarts", "lasting": "5s"}, 0.0),
    "clock jumps": ({"kind": "ClockJumps", "by": "60s"}, 0.85),
    "loop lags": ({"kind": "LoopStalls", "by": "500ms"}, 0.8),
}
QUICK = ("state hangs", "engine restarts", "clock jumps")
DECLARED_PER_MINUTE = 6.0


def happens(fault: Document | None, *, thresholds: bool = False) -> Ran:
    """A run in which it happens after a minute."""
    changes: Document = {}
    if fault is not None:
        lasting = {} if fault["kind"] in {"CountersReset", "ClockJumps"} else {"lasting": f"{LASTS_S}s"}
        changes["faults"] = [{"at": f"{AT_S}s", **lasting, **fault}]
    load = chat([(1.2 * CHAT_CAPACITY, 1)], retries=NO_RETRIES)
    return ran(scene([load], AT_S + LASTS_S + AFTER_S, **changes), by_thresholds if thresholds else None)


def run(*, quick: bool) -> Findings:
    """The bars of the fault matrix."""
    findings = Findings()
    plain = happens(None)
    until_s = AT_S + LASTS_S
    during, after = (
        plain.watched.good_per_second(AT_S, until_s),
        plain.watched.good_per_second(until_s + 5, until_s + 35),
    )
    allowed = DECLARED_PER_MINUTE * until_s / 60
    rows: Document = {"none": plain.row()}
    for name in QUICK if quick else FAULTS:
        fault, least = FAULTS[name]
        one = happens(fault)
        share = one.watched.good_per_second(AT_S, until_s) / during
        back = one.watched.good_per_second(until_s + 5, until_s + 35) / after
        rows[name] = {**one.row(), "share_during": round(share, 3), "share_after": round(back, 3)}
        findings.bar(f"{name}: goodput meanwhile of the undisturbed", share, "", least)
        findings.bar(f"{name}: goodput from 5 s after of the undisturbed", back, "", 0.9)
        findings.most(f"{name}: answers that missed the promise", one.missed_percent, "%", 1.0)
        findings.most(f"{name}: preemptions in the run", one.preemptions, "", allowed)
        findings.most(f"{name}: entries, requests and blocks left over", one.leftovers, "", 0)
    control = happens(FAULTS["state hangs"][0], thresholds=True)
    rows["state hangs, thresholds"] = control.row()
    findings.bar("state hangs, control by thresholds: preemptions in the run", control.preemptions, "", allowed)
    findings.data["faults"] = rows
    return findings
