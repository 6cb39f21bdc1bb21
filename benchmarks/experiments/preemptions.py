"""Preemption storm: the gate believes that answers are short, they are long, and the engine runs out of blocks.

Both gates expect answers of 60 tokens, and of a longer one that it ends with its next token, so that only the engine's
preemptions can tell them of their error. The control does not listen to those.
"""

from __future__ import annotations

from experiments.scene import NO_RETRIES, WARMUP_S, Document, Findings, Ran, chat, ran, scene
from sluice_simulator.run import World

EXPECTED_TOKENS = 60
RATE = 9.0
# The manifest's default.
DECLARED_PER_MINUTE = 6.0
LONG: Document = {
    "promptTokens": {"distribution": "Uniform", "least": 1000, "most": 3000},
    "outputTokens": {"distribution": "Uniform", "least": 500, "most": 900},
    "timeout": "120s",
    "class": "critical",
    "retries": NO_RETRIES,
}


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
    """A run of long answers."""
    document = scene([chat([(RATE, 1)], **LONG)], WARMUP_S + seconds, warmup_s=WARMUP_S)
    return ran(document, optimistic if listens else deaf)


def run(*, quick: bool) -> Findings:
    """The bars of the preemption storm."""
    findings = Findings()
    seconds = 60 if quick else 300
    found = {}
    for listens in (True, False):
        one = happens(seconds, listens=listens)
        slices = one.finished.tally.timeline
        from_slice = WARMUP_S * 1_000_000 // slices.width_us
        to_slice = (WARMUP_S + int(seconds)) * 1_000_000 // slices.width_us
        preempted = sum(one.preempted for one in slices.slices[from_slice:to_slice])
        found[listens] = (one.goodput, preempted * 60 / seconds)
        findings.data["gate" if listens else "deaf gate"] = {
            **one.row(),
            "preemptions_per_minute": round(found[listens][1], 1),
            "recomputed_tokens": sum(r.loop.scheduler.recomputed_tokens_total for r in one.finished.replicas),
        }
    (goodput, per_minute), (deaf_goodput, deaf_per_minute) = found[True], found[False]
    findings.most("preemption storm: preemptions a minute", per_minute, "", DECLARED_PER_MINUTE)
    findings.bar(
        "preemption storm, control deaf to them: preemptions a minute", deaf_per_minute, "", 5 * DECLARED_PER_MINUTE
    )
    findings.bar("preemption storm: goodput over the control's", goodput / max(0.01, deaf_goodput), "×", 1.05)
    return findings
