"""Faults on the way of the state, at 1.2 times the capacity: the promise holds, blocks hold out, nothing is left over.

The control trusts the engine's last state alone, by thresholds, while that state hangs, again and again at three times
the capacity. Whether the last state that it saw was above a threshold is a matter of chance: then it lets nobody in,
else everybody, which takes as long to work off as it lasted. Either way it loses goodput, in a hang or after it, so
both count, against the same gate undisturbed; preemptions and late answers there are only in the second case.
"""

from __future__ import annotations

from experiments.estimates import by_thresholds
from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, Document, Ran, chat, ran, scene

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
# At this many times the capacity the state hangs so often, for LASTS_S each, with as long between them.
FLOOD, HANGS = 3.0, 3
_HANGS_AT_S = range(AT_S, AT_S + 2 * LASTS_S * HANGS, 2 * LASTS_S)
_OVER_S = _HANGS_AT_S.stop


def happens(fault: Document | None) -> Ran:
    """A run in which it happens after a minute."""
    changes: Document = {}
    if fault is not None:
        lasting = {} if fault["kind"] in {"CountersReset", "ClockJumps"} else {"lasting": f"{LASTS_S}s"}
        changes["faults"] = [{"at": f"{AT_S}s", **lasting, **fault}]
    load = chat([(1.2 * CHAT_CAPACITY, 1)], retries=NO_RETRIES)
    return ran(scene([load], AT_S + LASTS_S + AFTER_S, **changes))


def hangs(*, fault: bool, thresholds: bool = False) -> Ran:
    """A run at FLOOD times the capacity in which the state hangs again and again, or never."""
    times = [{"kind": "StateHangs", "at": f"{at_s}s", "lasting": f"{LASTS_S}s"} for at_s in _HANGS_AT_S]
    changes: Document = {"faults": times} if fault else {}
    load = chat([(FLOOD * CHAT_CAPACITY, 1)], retries=NO_RETRIES)
    return ran(scene([load], _OVER_S, **changes), by_thresholds if thresholds else None)


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
    _hanging(findings, rows)
    findings.data["faults"] = rows
    return findings


def _hanging(findings: Findings, rows: Document) -> None:
    """What each gate makes of hangs and of what comes after them."""
    plain = hangs(fault=False)
    rows["never hangs, in a flood"] = plain.row()
    for thresholds in (False, True):
        one = hangs(fault=True, thresholds=thresholds)
        share = one.watched.good_per_second(AT_S, _OVER_S) / plain.watched.good_per_second(AT_S, _OVER_S)
        rows["hangs in a flood, thresholds" if thresholds else "hangs in a flood"] = {**one.row(), "share": share}
        name = "state hangs again and again in a flood: goodput from the first on, of the undisturbed"
        if thresholds:
            findings.most(f"{name}, control by thresholds", share, "", 0.6)
        else:
            findings.bar(name, share, "", 0.7)
