"""Fairness: long requests beside short ones, tenants that want more than their share, and shares that nobody uses.

Controls: a gate without its size guard; a gate to which all tenants are one.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import seeds
from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, WARMUP_S, Document, Ran, chat, ran, scene
from sluice_engine.core.terms import Terms
from sluice_sidecar.capacity.cost import Cost
from sluice_simulator.histogram import Histogram
from sluice_simulator.run import World

# Clients of four tenants, each of which could use all of the pod.
CLIENTS = (60, 120, 240, 480)
PERSISTENT: Document = {"most": 1000}
# Tenants that keep within their share, and one that asks for ten times as much.
QUIET = 4


def sizes(seconds: float, *, guard: bool) -> Ran:
    """Chat of very different sizes at twice the capacity, of clients that do not come back."""

    def without(world: World) -> None:
        for replica in world.replicas:
            assert replica.gate is not None, "an experiment with a gate"
            replica.gate.sizes.kept_for = nobody  # type: ignore[method-assign]  # an experiment's
            replica.gate.sizes.is_ahead = never  # type: ignore[method-assign]

    load = chat([(2.0 * CHAT_CAPACITY, 1)], retries=NO_RETRIES)
    return ran(scene([load], WARMUP_S + seconds, warmup_s=WARMUP_S), None if guard else without)


def nobody(terms: Terms, cost: Cost, now_us: int) -> Cost | None:
    """Room is kept for nobody."""
    del terms, cost, now_us
    return None


def never(terms: Terms, cost: Cost, now_us: int) -> bool:
    """No size goes before another."""
    del terms, cost, now_us
    return False


def decile_ratio(one: Ran) -> tuple[float, list[float]]:
    """How often the largest tenth of the requests is answered, over how often the smallest is; and all ten."""
    ordered = sorted(one.watched.sizes)
    tenths = [ordered[len(ordered) * tenth // 10 : len(ordered) * (tenth + 1) // 10] for tenth in range(10)]
    shares = [sum(answered for _, answered in tenth) / len(tenth) for tenth in tenths]
    return shares[-1] / max(0.001, shares[0]), [round(share, 3) for share in shares]


def backlogged(seconds: float, *, apart: bool) -> Ran:
    """Closed loops of different sizes, whose clients come back until they are served."""
    named: list[Document] = [
        chat(
            [(1, 1)],
            name=f"t{number}",
            arrivals={"closedLoop": {"clients": clients, "thinkTime": "500ms"}},
            retries=PERSISTENT,
            **({"tenant": f"t{number}"} if apart else {}),
        )
        for number, clients in enumerate(CLIENTS)
    ]
    return ran(scene(named, WARMUP_S + seconds, warmup_s=WARMUP_S))


def tenants(rates: Sequence[float], seconds: float, *, apart: bool = True) -> Ran:
    """One load for each tenant, each at its rate; `apart`: whether the gate can tell them from each other."""
    named: list[Document] = [
        chat([(rate, 1)], name=f"t{number}", retries=NO_RETRIES, **({"tenant": f"t{number}"} if apart else {}))
        for number, rate in enumerate(rates)
    ]
    return ran(scene(named, WARMUP_S + seconds, warmup_s=WARMUP_S))


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all get the same."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def service(one: Ran) -> list[float]:
    """Tokens of each load that were answered."""
    return [load.prompt_tokens + load.output_tokens for load in one.finished.tally.loads.values()]


def run(*, quick: bool) -> Findings:
    """The bars of fairness."""
    findings = Findings()
    seconds = 60 if quick else 300
    _sizes(findings, seconds)
    _shares(findings, seconds)
    if not quick:
        # A tail of a tail: it takes long to tell it from chance.
        _loud(findings, 3 * seconds)
        _borrowed(findings)
    return findings


def _sizes(findings: Findings, seconds: int) -> None:
    for guard in (True, False):
        one = sizes(seconds, guard=guard)
        ratio, shares = decile_ratio(one)
        findings.data["sizes" if guard else "sizes, no guard"] = {**one.row(), "answered_by_decile": shares}
        name = "fairness: answered, largest tenth over smallest"
        if guard:
            findings.bar(name, ratio, "", 0.6)
        else:
            findings.most(f"{name}, control without the guard", ratio, "", 0.6)


def _shares(findings: Findings, seconds: float) -> None:
    for apart in (True, False):
        one = backlogged(seconds, apart=apart)
        index = jain(service(one))
        findings.data["tenants" if apart else "tenants, all one"] = {**one.row(), "tokens": service(one)}
        if apart:
            findings.bar("fairness: Jain's index of four backlogged tenants' tokens", index, "", 0.95)
        else:
            findings.most("fairness: Jain's index, control to which they are one", index, "", 0.9)


def _loud(findings: Findings, seconds: int) -> None:
    """One tenant at ten times its share."""
    share = CHAT_CAPACITY / (QUIET + 1)
    quiet = [0.7 * share] * QUIET

    def p99_ms(one: Ran) -> float:
        # A histogram of its own: a load's must not grow by being read.
        merged = Histogram()
        for name, load in one.finished.tally.loads.items():
            if name != f"t{QUIET}":
                merged.merge(load.ttft)
        return (merged.quantile_us(99) or 0) / 1000

    def answered(one: Ran) -> float:
        loads = [load for name, load in one.finished.tally.loads.items() if name != f"t{QUIET}"]
        return sum(load.outcomes["finished"] for load in loads) / max(1, sum(load.requests for load in loads))

    runs = {
        "all in their share": (calm := tenants([*quiet, share], seconds)),
        "one at ten times": (loud := tenants([*quiet, 10 * share], seconds)),
    }
    if seeds.is_first():
        runs["the same, all one"] = control = tenants([*quiet, 10 * share], seconds // 3, apart=False)
        name = "fairness: of the others' requests answered, control to which all are one"
        findings.most(name, 100 * answered(control), "%", 90)
    findings.data["loud tenant"] = {
        name: {"others_ttft_p99_ms": round(p99_ms(one)), "others_answered": round(answered(one), 3), **one.row()}
        for name, one in runs.items()
    }
    moved = 100 * (p99_ms(loud) / p99_ms(calm) - 1)
    findings.most("fairness: one tenant at ten times its share moves the others' p99 TTFT", moved, "%", 15)
    findings.bar("fairness: of the others' requests answered meanwhile", 100 * answered(loud), "%", 95)


def _borrowed(findings: Findings) -> None:
    """Two tenants with more than enough to do; one stops, and the other takes its share."""
    stops_s, run_s = 60, 120
    rate = 1.2 * CHAT_CAPACITY
    loads = [
        chat([(rate, stops_s), (0, 1)], name="stops", tenant="stops", retries=NO_RETRIES),
        chat([(rate, 1)], name="stays", tenant="stays", retries=NO_RETRIES),
    ]
    alone = ran(scene([loads[1]], run_s))
    both = ran(scene(loads, run_s))

    def admitted(one: Ran, from_s: int, to_s: int) -> int:
        # Requests of the one that stays, by when they came.
        return sum(second.good for at_s, second in one.watched.seconds.items() if from_s <= at_s < to_s)

    lone, left = (admitted(one, stops_s + 1, stops_s + 21) for one in (alone, both))
    share = left / max(1, lone)
    findings.data["borrowed"] = {"good alone": lone, "good after the other stopped": left}
    findings.bar("fairness: of a lone tenant's goodput, from 1 s after the other stopped", share, "", 0.9)
