"""Preemption storm: the gate believes that answers are short, they are long, and the engine runs out of blocks.

Both gates expect answers of 10 tokens, and of a longer one that it ends with its next token, so that only the engine's
preemptions can tell them of their error. The control does not listen to those. Answers are short enough that a single
long gap breaks the promise.
"""

from __future__ import annotations

from experiments.scene import NO_RETRIES, WARMUP_S, Document, Findings, Ran, chat, ran, scene
from sluice_simulator.run import World

EXPECTED_TOKENS = 10
RATE = 70.0
# The manifest's default.
DECLARED_PER_MINUTE = 6.0
LOAD: Document = {
    "promptTokens": {"distribution": "Uniform", "least": 30, "most": 80},
    "outputTokens": {"distribution": "Uniform", "least": 70, "most": 95},
    "maxTokens": 96,
    # All of the ceiling.
    "class": "critical",
    "retries": NO_RETRIES,
}
SETTINGS: Document = {"machine__kvCapacityTokens": 8192, "slo__interTokenLatency": "75ms"}


def optimistic(world: World) -> None:
    """Every answer is expected to end soon."""

    def expected(tenant: str, max_tokens: int, produced: int = 0) -> int:
        del tenant
        return min(max_tokens, max(EXPECTED_TOKENS, produced + 1))

    for replica in world.replicas:
        assert replica.gate is not None, "an experiment with a gate"
        room = replica.gate.room
        room.pricing.outputs.expected = expected  # type: ignore[method-assign]  # an experiment's
        room.ledger.expect = expected


def deaf(world: World) -> None:
    """And nobody listens to preemptions."""
    optimistic(world)
    for replica in world.replicas:
        assert replica.gate is not None, "an experiment with a gate"
        ceiling = replica.gate.room.ceiling
        ceiling.observe = lambda *_: None  # type: ignore[method-assign]  # an experiment's


def happens(seconds: float, *, listens: bool) -> Ran:
    """A run at about twice what fits."""
    document = scene([chat([(RATE, 1)], **LOAD)], WARMUP_S + seconds, warmup_s=WARMUP_S, **SETTINGS)
    return ran(document, optimistic if listens else deaf)


def preempted_per_minute(one: Ran, from_s: float, to_s: float) -> float:
    """Preemptions of a part of the run."""
    line = one.finished.tally.timeline
    slices = line.slices[int(from_s * 1e6) // line.width_us : int(to_s * 1e6) // line.width_us]
    return sum(moment.preempted for moment in slices) * 60e6 / max(1, len(slices) * line.width_us)


def run(*, quick: bool) -> Findings:
    """The bars of the preemption storm."""
    findings = Findings()
    seconds = 30 if quick else 180
    found = {}
    for listens in (True, False):
        one = happens(seconds, listens=listens)
        per_minute = preempted_per_minute(one, WARMUP_S, WARMUP_S + seconds)
        found[listens] = (one.goodput, per_minute)
        findings.data["gate" if listens else "deaf gate"] = {
            **one.row(),
            "preemptions_per_minute": round(per_minute, 1),
            "recomputed_tokens": sum(r.loop.scheduler.recomputed_tokens_total for r in one.finished.replicas),
        }
    (goodput, per_minute), (deaf_goodput, deaf_per_minute) = found[True], found[False]
    findings.most("preemption storm: preemptions a minute", per_minute, "", DECLARED_PER_MINUTE)
    name = "preemption storm, control deaf to them: preemptions a minute"
    findings.bar(name, deaf_per_minute, "", 5 * DECLARED_PER_MINUTE)
    findings.bar("preemption storm: goodput over the control's", goodput / max(0.01, deaf_goodput), "×", 1.05)
    return findings
