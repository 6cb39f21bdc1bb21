"""Metastable failure: a service at 80 % load that a trigger pushes over, and that its own clients then keep down.

Triggers: a spike, an engine at half speed for a while, an engine that restarts with an empty prefix cache. Clients give
an answer 10 s and retry twice, as SDKs do, so without a gate all work is for nobody, for ever.
"""

from __future__ import annotations

from typing import Any

from experiments.findings import Findings
from experiments.scene import SHORT_CAPACITY, Document, Ran, ran, scene, short

LOAD = 0.8
TRIGGER_S, TRIGGER_LASTS_S = 120, 20
BACK_WITHIN_S = 10
# Ten minutes after the trigger.
AFTER_S = 600
# Short questions behind one of forty system prompts of 3,072 tokens: where that is computed already a request costs a
# tenth, so the load is some 90 % of what a warm cache bears, and several times what a cold one does.
WARM: Document = {
    "promptTokens": {"distribution": "Uniform", "least": 3136, "most": 3472},
    "sharedPrefix": {"tokens": 3072, "variants": 40},
    "outputTokens": {"distribution": "Uniform", "least": 8, "most": 40},
    "maxTokens": 40,
}
# Without a gate a warm cache bears 48 requests a second for as long as nothing happens, and not 56.
WARM_RATE = 48.0
WARM_POOL = 524_288


def spike(after_s: float) -> tuple[list[Document], Document]:
    """The load, and what else is set."""
    rate = LOAD * SHORT_CAPACITY
    return [short([(rate, TRIGGER_S), (2.5 * SHORT_CAPACITY, TRIGGER_LASTS_S), (rate, after_s)])], {}


def half_speed(after_s: float) -> tuple[list[Document], Document]:
    """The load, and what else is set."""
    slow = [{"at": f"{TRIGGER_S}s", "lasting": f"{TRIGGER_LASTS_S}s", "factor": 2}]
    return [short([(LOAD * SHORT_CAPACITY, after_s)])], {"machine__slowdowns": slow}


def cold_cache(after_s: float) -> tuple[list[Document], Document]:
    """The load, and what else is set."""
    restart = [{"kind": "EngineRestarts", "at": f"{TRIGGER_S}s", "lasting": f"{TRIGGER_LASTS_S}s"}]
    rate = WARM_RATE
    # It has to become warm first.
    load = short([(rate / 4, 40), (rate / 2, 20), (rate, after_s)], **WARM)
    return [load], {"faults": restart, "machine__kvCapacityTokens": WARM_POOL}


TRIGGERS = {"spike": spike, "half speed": half_speed, "cold cache": cold_cache}


def happens(trigger: str, after_s: float, *, gate: bool) -> Ran:
    """One run through a trigger."""
    loads, changes = TRIGGERS[trigger](after_s)
    return ran(scene(loads, TRIGGER_S + TRIGGER_LASTS_S + after_s, gate=gate, **changes))


def by_ten_seconds(one: Ran, seconds: int) -> list[float]:
    """Per cent of good requests, of those that came in each ten seconds."""
    return [round(one.watched.good_percent(second, second + 10), 1) for second in range(0, seconds, 10)]


def run(*, quick: bool) -> Findings:
    """The bars of metastable failure."""
    findings = Findings()
    after_s = 60 if quick else AFTER_S
    over_s = TRIGGER_S + TRIGGER_LASTS_S
    for trigger in ("spike",) if quick else TRIGGERS:
        series: dict[str, Any] = {}
        for gate, name in ((True, "gate"), (False, "no gate")):
            one = happens(trigger, after_s, gate=gate)
            series[name] = by_ten_seconds(one, over_s + after_s)
            # What comes in the last seconds of a run has less company than before.
            end_s = over_s + after_s - 10
            good = one.watched.good_percent(over_s + BACK_WITHIN_S, end_s)
            if gate:
                soon = one.watched.good_percent(over_s + BACK_WITHIN_S, over_s + BACK_WITHIN_S + 20)
                findings.bar(f"{trigger}: good from {BACK_WITHIN_S} s after it, for 20 s", soon, "%", 95)
                findings.bar(f"{trigger}: good from {BACK_WITHIN_S} s after it on", good, "%", 95)
            else:
                best = max(series[name][(over_s + 20) // 10 : end_s // 10], default=0.0)
                findings.most(f"{trigger}, control without a gate: best ten seconds after it", best, "% good", 50)
            series[f"{name}: figures"] = one.row()
        findings.data[trigger] = series
    return findings
