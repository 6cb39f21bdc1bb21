"""Preemption storm: the gate believes that answers are short, they are long, and the engine runs out of blocks.

The history of answers says 10 tokens, and of a longer one that it ends with its next token, in five scenes: whatever
grows much beside its prompt. The control listens neither to the engine's preemptions nor to how long answers turn out.
A gate that listens to preemptions alone is told beside both.
"""

from __future__ import annotations

from statistics import mean

from experiments import seeds
from experiments.findings import Findings
from experiments.scene import NO_RETRIES, WARMUP_S, Document, Ran, chat, ran, scene
from sluice_sidecar.estimates.outputs import LengthBias
from sluice_simulator.run import World

EXPECTED_TOKENS = 10
# The manifest's default.
DECLARED_PER_MINUTE = 6.0


def _load(prompts: Document, outputs: Document, most: int) -> Document:
    # `critical` may fill all of the ceiling.
    return {
        "promptTokens": prompts,
        "outputTokens": outputs,
        "maxTokens": most,
        "class": "critical",
        "retries": NO_RETRIES,
        "timeout": "300s",
    }


def _even(least: int, most: int) -> Document:
    return {"distribution": "Uniform", "least": least, "most": most}


def _wide(mean_tokens: int, sigma: float, most: int) -> Document:
    return {"distribution": "LogNormal", "mean": mean_tokens, "sigma": sigma, "most": most}


# Requests a second, at about twice what fits; the load; the rest of the scene.
SCENES: dict[str, tuple[float, Document, Document]] = {
    # So short that a single long gap breaks the promise.
    "short answers": (
        70.0,
        _load(_even(30, 80), _even(70, 95), 96),
        {"machine__kvCapacityTokens": 8192, "slo__interTokenLatency": "75ms"},
    ),
    "code": (12.0, _load(_even(200, 600), _even(300, 500), 512), {"machine__kvCapacityTokens": 32_768}),
    "long answers": (12.0, _load(_even(300, 900), _even(500, 900), 1024), {}),
    "long conversations": (8.0, _load(_even(1000, 2000), _even(900, 1500), 2048), {}),
    # Few at once and of all lengths: chance alone fills the pool.
    "chat in a small pool": (
        14.0,
        _load(_wide(300, 1.0, 4000), _wide(400, 0.8, 1024), 1024),
        {"machine__kvCapacityTokens": 32_768},
    ),
}


# Chance fills this pool about once in a minute: of three minutes the figures are chance too.
LASTS_S = {"chat in a small pool": 600}


class Unlearned(LengthBias):
    """Nobody learns how long answers turn out."""

    factor = property(lambda _: 1.0)


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


def by_preemptions_alone(world: World) -> None:
    """And nobody learns from how long they were."""
    optimistic(world)
    for replica in world.replicas:
        assert replica.gate is not None, "an experiment with a gate"
        replica.gate.room.pricing.outputs.bias = Unlearned()


def deaf(world: World) -> None:
    """And nobody listens to preemptions."""
    by_preemptions_alone(world)
    for replica in world.replicas:
        assert replica.gate is not None, "an experiment with a gate"
        ceiling = replica.gate.room.ceiling
        ceiling.observe = lambda *_, **__: None  # type: ignore[method-assign]  # an experiment's


GATES = {"gate": optimistic, "by preemptions alone": by_preemptions_alone, "deaf gate": deaf}


def happens(name: str, gate: str, seconds: float) -> Ran:
    """A run of one scene."""
    rate, load, settings = SCENES[name]
    document = scene([chat([(rate, 1)], **load)], WARMUP_S + seconds, warmup_s=WARMUP_S, **settings)
    return ran(document, GATES[gate])


def preempted_per_minute(one: Ran, from_s: float, to_s: float) -> float:
    """Preemptions of a part of the run."""
    line = one.finished.tally.timeline
    slices = line.slices[int(from_s * 1e6) // line.width_us : int(to_s * 1e6) // line.width_us]
    return sum(moment.preempted for moment in slices) * 60e6 / max(1, len(slices) * line.width_us)


def run(*, quick: bool) -> Findings:
    """The bars of the preemption storm."""
    findings = Findings()
    seconds = 30 if quick else 180
    shares: list[float] = []
    rates: list[float] = []
    for name in ("short answers", "code") if quick else SCENES:
        found: dict[str, tuple[float, float]] = {}
        for gate in GATES:
            if gate == "by preemptions alone" and (quick or not seeds.is_first()):
                continue
            lasts_s = seconds if quick else LASTS_S.get(name, seconds)
            one = happens(name, gate, lasts_s)
            per_minute = preempted_per_minute(one, WARMUP_S, WARMUP_S + lasts_s)
            found[gate] = (one.goodput, per_minute)
            findings.data[f"{name}: {gate}"] = {
                **one.row(),
                "preemptions_per_minute": round(per_minute, 1),
                "recomputed_tokens": sum(r.loop.scheduler.recomputed_tokens_total for r in one.finished.replicas),
            }
        (goodput, per_minute), (deaf_goodput, deaf_per_minute) = found["gate"], found["deaf gate"]
        shares.append(goodput / max(0.01, deaf_goodput))
        rates.append(per_minute)
        findings.most(f"storm, {name}: preemptions a minute", per_minute, "", DECLARED_PER_MINUTE)
        control = f"storm, {name}, control deaf to them: preemptions a minute"
        findings.bar(control, deaf_per_minute, "", 2 * DECLARED_PER_MINUTE)
        findings.bar(f"storm, {name}: goodput over the control's", shares[-1], "×", 0.97)
    findings.most("storms: preemptions a minute, mean of the scenes", mean(rates), "", DECLARED_PER_MINUTE)
    findings.bar("storms: goodput over the controls', mean of the scenes", mean(shares), "×", 1.0)
    return findings
