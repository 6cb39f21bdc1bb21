"""Wrong estimates: step times that are told wrong, and a state that comes late.

The load is all prefill, so that the time to a first token is what decides. Controls: a gate whose pessimism never
learns and that counts no late first tokens, told half the truth; and one that trusts thresholds over the engine's last
state, as gates over metrics do, whose state is ten seconds old.
"""

from __future__ import annotations

from experiments import seeds
from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, WARMUP_S, Document, Ran, chat, ran, scene
from sluice_engine.core.state import EngineState
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.look import Held, Look
from sluice_sidecar.capacity.room import Room
from sluice_sidecar.errors import Reason
from sluice_simulator.run import World

# Prompts of 3,000 tokens and answers of 16: 0.13 s of the engine each.
PREFILL: Document = {
    "promptTokens": {"distribution": "LogNormal", "mean": 3000, "sigma": 0.5, "most": 12_000},
    "outputTokens": {"distribution": "Uniform", "least": 4, "most": 28},
    "maxTokens": 32,
    "retries": NO_RETRIES,
}
PREFILL_CAPACITY = 7.5
# So many blocks that they decide nothing.
POOL = 524_288
OVER = 1.5
FACTORS = (0.25, 0.5, 0.8, 1.0, 1.5, 2.0)
AGES_S = (0.0, 0.2, 1.0, 2.0, 5.0, 10.0)
LEARNT_WITHIN_S = 30
# Of the threshold gate: waiting requests, and the share of the pool in use.
MOST_WAITING, MOST_USED = 5, 0.8


def biased(factor: float, seconds: float, *, learns: bool, counts_late: bool = True) -> Ran:
    """Prefill beyond the capacity, from the first second, at a gate that is told so many times the step times.

    `counts_late`: it gives less of the promise away where first tokens come late.
    """

    def freeze(world: World) -> None:
        for replica in world.replicas:
            assert replica.gate is not None, "an experiment with a gate"
            if not counts_late:
                replica.gate.room.learned.punctuality.told = lambda *_, **__: None  # type: ignore[method-assign]
            for one in (replica.gate.room.learned.bias, replica.gate.room.learned.pace):
                one.factor = lambda now_us: 1.0  # type: ignore[method-assign]  # noqa: ARG005  # an experiment's

    document = scene(
        [chat([(OVER * PREFILL_CAPACITY, 1)], **PREFILL)],
        seconds,
        machine__toldFactor=factor,
        machine__kvCapacityTokens=POOL,
    )
    return ran(document, None if learns else freeze)


def late(age_s: float, seconds: float, *, thresholds: bool = False) -> Ran:
    """Chat beyond the capacity at a gate whose state is so old when it comes."""
    changes: Document = {}
    if age_s:
        fault = {
            "kind": "StateDelayed",
            "at": "10s",
            "lasting": f"{WARMUP_S + seconds}s",
            "by": f"{round(1000 * age_s)}ms",
        }
        changes["faults"] = [fault]
    document = scene(
        [chat([(1.2 * CHAT_CAPACITY, 1)], retries=NO_RETRIES)], WARMUP_S + seconds, warmup_s=WARMUP_S, **changes
    )
    return ran(document, by_thresholds if thresholds else None)


def by_thresholds(world: World) -> None:
    """A gate that lets in while the engine's last state shows a short queue and free blocks, and knows no more."""
    for replica in world.replicas:
        assert replica.gate is not None, "an experiment with a gate"
        _watch_thresholds(replica.gate.room)


def _watch_thresholds(room: Room) -> None:
    observe, is_full = room.observe, False

    def observed(state: EngineState, as_of_us: int, now_us: int) -> None:
        nonlocal is_full
        used = 1 - state.pool.free_blocks / state.pool.total_blocks if state.pool is not None else 0.0
        is_full = state.waiting_requests >= MOST_WAITING or used >= MOST_USED
        observe(state, as_of_us, now_us)

    def look(cost: Cost, now_us: int, waited_us: int, *, ceiling_percent: int = 100) -> Look:
        del cost, now_us, waited_us, ceiling_percent
        found = Look(1)
        if is_full:
            found.held = Held(Reason.KV_PEAK, "the engine's metrics are above a threshold", 1_000_000)
        return found

    room.observe = observed  # type: ignore[method-assign]  # an experiment's
    room.look = look  # type: ignore[method-assign]  # an experiment's


def run(*, quick: bool) -> Findings:
    """The bars of wrong estimates."""
    findings = Findings()
    seconds = 60 if quick else 180
    _bias(findings, seconds, quick=quick)
    _staleness(findings, seconds, quick=quick)
    return findings


def _bias(findings: Findings, seconds: float, *, quick: bool) -> None:
    true = biased(1.0, seconds, learns=True)
    most = true.watched.good_per_second(LEARNT_WITHIN_S, seconds - 5)
    rows: Document = {}

    def share(factor: float, *, learns: bool, counts_late: bool = True) -> float:
        one = true if factor == 1.0 and learns else biased(factor, seconds, learns=learns, counts_late=counts_late)
        found = one.watched.good_per_second(LEARNT_WITHIN_S, seconds - 5) / most
        name = f"×{factor:g}{'' if learns else ', frozen'}{'' if counts_late else ', late ones not counted'}"
        rows[name] = {**one.row(), "share_after_30_s": round(found, 3)}
        return found

    for factor in (0.25, 0.5) if quick else FACTORS:
        name = f"told ×{factor:g}, learns: goodput after 30 s of the unbiased"
        findings.bar(name, share(factor, learns=True), "", 0.9)
    for factor in (0.5,) if quick or not seeds.is_first() else (0.5, 0.8, 1.5):
        name = f"told ×{factor:g}, never learns: goodput of the unbiased"
        findings.bar(name, share(factor, learns=False), "", 0.9)
    if seeds.is_first():
        control = share(0.5, learns=False, counts_late=False)
        name = "told ×0.5, control that never learns nor counts late ones: goodput of the unbiased"
        findings.most(name, control, "", 0.5)
    findings.data["bias"] = rows


def _staleness(findings: Findings, seconds: float, *, quick: bool) -> None:
    fresh = late(0.0, seconds)
    rows: Document = {"0 s": fresh.row()}
    for age_s in (2.0,) if quick else AGES_S[1:]:
        one = late(age_s, seconds)
        share = one.goodput / fresh.goodput
        rows[f"{age_s:g} s"] = {**one.row(), "share": round(share, 3)}
        if age_s <= 2.0:
            findings.bar(f"state {age_s:g} s old: goodput of that with a fresh one", share, "", 0.95)
        findings.most(f"state {age_s:g} s old: answers that missed the promise", one.missed_percent, "%", 1.0)
    control = late(10.0, seconds, thresholds=True)
    rows["10 s, thresholds"] = control.row()
    share = control.goodput / fresh.goodput
    findings.most("state 10 s old, control by thresholds: goodput of a gate with a fresh one", share, "", 0.85)
    findings.data["staleness"] = rows
