"""What a decision costs the gate: microseconds to look, to admit and to refuse, with 10 to 1,000 requests inside.

The gate's own `Admission` before an engine that has just told its state; chats of a thousand tokens that have come some
way, and from 0 to all of them still in their prefill. Beside it, in the same run, the same formula worked out anew for
each decision by sorting, as the gate did before. Also what a state with all of them costs, which comes five times a
second and decides nothing. Processor time of the thread, so that other programs count little; the median counts, and
the 99th percentile is told.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from report import Bar, Report, arguments
from sluice_engine.core.state import (
    SCHEMA_VERSION,
    DerivedLimits,
    EngineState,
    PoolState,
    PrefillCost,
    RequestState,
    StepCost,
)
from sluice_engine.live_config import AdmissionConfig, LiveConfig, SLOConfig
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.capacity.peak import Growth
from sluice_sidecar.telemetry.measure import percentile

TARGET_US = 100
BLOCK_TOKENS = 16
INSIDE = (10, 100, 1000)
PREFILLING_PERCENT = (0, 5, 100)


@dataclass(frozen=True, slots=True)
class Case:
    """How many are inside, and how many of them prefill."""

    inside: int
    prefilling_percent: int

    @property
    def name(self) -> str:
        return f"{self.inside:,} inside, {self.prefilling_percent} % prefill"


def lengths(rng: random.Random) -> tuple[int, int]:
    """(prompt, output) of a chat."""
    return min(8_000, max(16, round(rng.lognormvariate(7.0, 0.8)))), min(
        2_000, max(8, round(rng.lognormvariate(5.4, 0.8)))
    )


class Gate:
    """An admission with so many inside, and calls that ask."""

    def __init__(self, case: Case) -> None:
        self.now_us = 1_000_000
        self.rng = random.Random(case.inside * 1000 + case.prefilling_percent)
        live = LiveConfig(
            # Promises that refuse nobody: each decision goes through every test.
            slo=SLOConfig(time_to_first_token_us=3_600_000_000, inter_token_latency_us=150_000),
            admission=AdmissionConfig(max_wait_us=0),
        )
        self.admission = Admission(live, stale_after_us=500_000, blind_after_us=5_000_000, draw=self.rng.randint)
        self.requests: tuple[RequestState, ...] = ()
        self.seq = 0
        self.told()
        self.admission.set_unavailable(None, self.now_us)
        listed = []
        for number in range(case.inside):
            prompt, output = lengths(self.rng)
            self.enter(f"in-{number}", Cost((ChoiceCost(prompt, output),)))
            prefills = number * 100 < case.prefilling_percent * case.inside
            done = 0 if prefills else self.rng.randrange(1, output)
            computed = self.rng.randrange(prompt - 1) if prefills else prompt + done - 1
            listed.append(
                RequestState(
                    id=f"in-{number}",
                    choice=0,
                    status="running",
                    prompt_tokens=prompt,
                    computed_tokens=computed,
                    output_tokens=done,
                    max_tokens=output,
                    blocks=0,
                    incarnation=0,
                    preemptions=0,
                )
            )
        self.requests = tuple(listed)
        self.told()
        self.asking = [Cost((ChoiceCost(*lengths(self.rng)),)) for _ in range(64)]

    def state(self) -> EngineState:
        """What the engine tells: room for everybody."""
        self.seq += 1
        return EngineState(
            schema_version=SCHEMA_VERSION,
            boot_id="engine",
            seq=self.seq,
            phase="ready",
            max_length_tokens=16_384,
            pool=PoolState(block_tokens=BLOCK_TOKENS, total_blocks=1_000_000, free_blocks=1_000_000),
            derived=DerivedLimits(feasible=True, token_budget=8_192, max_sequences=4_096),
            step_cost=StepCost(fixed_us=20_000, decode_us=10_000, per_prefill_token_ns=35_000),
            prefill_cost=PrefillCost(per_token_ns=35_000, per_prior_pair_ps=3_000),
            decode_curve_us=((1, 21_000), (64, 25_000), (256, 30_000), (1_024, 40_000)),
            requests=self.requests,
        )

    def told(self) -> None:
        self.admission.observe(self.state(), self.now_us, self.now_us)

    def enter(self, name: str, cost: Cost) -> Permit:
        permit = self.admission.enter(name, cost, self.now_us, lambda _: None)
        assert isinstance(permit, Permit), permit
        return permit


def recounted_peak(growths: Sequence[Growth]) -> int:
    """The same peak by sorting starts and ends anew: n log n, and B additions a step (the baseline)."""
    starts = sorted(
        (g.prefill_steps, g.held - g.prefill_steps + BLOCK_TOKENS - 1, -(-g.held // BLOCK_TOKENS)) for g in growths
    )
    ends = sorted((g.end, g.held - g.prefill_steps + BLOCK_TOKENS - 1) for g in growths)
    pending = sum(blocks for _, _, blocks in starts)
    growing = quotients = started = peak = 0
    residues = [0] * BLOCK_TOKENS
    for step, constant in ends:
        while started < len(starts) and starts[started][0] < step:
            _, begun, blocks = starts[started]
            pending -= blocks
            growing, quotients, started = growing + 1, quotients + begun // BLOCK_TOKENS, started + 1
            residues[begun % BLOCK_TOKENS] += 1
        whole, rest = divmod(step, BLOCK_TOKENS)
        held = pending + growing * whole + quotients + (sum(residues[BLOCK_TOKENS - rest :]) if rest else 0)
        peak = max(peak, held)
        growing, quotients = growing - 1, quotients - constant // BLOCK_TOKENS
        residues[constant % BLOCK_TOKENS] -= 1
    return peak


def timed(what: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """(median, 99th percentile) in µs of the thread's processor time."""
    spent = []
    for number in range(rounds):
        begun = time.thread_time_ns()
        what(number)
        spent.append((time.thread_time_ns() - begun) / 1000)
    return percentile(spent, 50), percentile(spent, 99)


def measure(case: Case, rounds: int) -> dict[str, tuple[float, float]]:
    """Each kind of decision, in µs."""
    gate = Gate(case)
    admission, room = gate.admission, gate.admission.room
    asking, now_us = gate.asking, gate.now_us
    permits: list[Permit] = []

    def look(number: int) -> None:
        room.look(asking[number % len(asking)], now_us, 0)

    def admit(number: int) -> None:
        permits.append(gate.enter(f"new-{number}", asking[number % len(asking)]))

    def recount(number: int) -> None:
        """What stood in the place of the kept peak: everybody inside, and the call that asks, anew."""
        choices = [choice for entry in room.ledger.entries.values() for choice in entry.choices if not choice.gone]
        growths = [choice.part.growth for choice in choices if choice.part is not None]
        cost = asking[number % len(asking)].choices[0]
        recounted_peak([*growths, Growth(cost.prompt_tokens, cost.output_tokens, 1)])

    figures = {"look": timed(look, rounds), "recount (baseline)": timed(recount, max(20, rounds // 20))}
    admitted = []
    for number in range(rounds):
        # One in, one out, so that the number inside stays.
        admitted.append(timed(lambda _, number=number: admit(number), 1)[0])  # type: ignore[misc]
        permits.pop().close(now_us)
    figures["enter and admit"] = percentile(admitted, 50), percentile(admitted, 99)
    room.ceiling.share = 0.0
    figures["enter and refuse"] = timed(
        lambda number: admission.enter(f"no-{number}", asking[number % len(asking)], now_us, lambda _: None), rounds
    )
    state = gate.state()
    figures["a state"] = timed(lambda _: admission.observe(state, now_us, now_us), max(20, rounds // 20))
    return figures


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("admission_decision")
    rounds = 400 if args.quick else 4_000
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for case in [Case(inside, percent) for inside in INSIDE for percent in PREFILLING_PERCENT]:
        gc.collect()
        table[case.name] = figures = measure(case, rounds)
        told = ", ".join(f"{name} {median:.0f} ({worst:.0f})" for name, (median, worst) in figures.items())
        print(f"  {case.name:30} µs, median (p99): {told}", flush=True)
        for name in ("look", "enter and admit", "enter and refuse"):
            report.bars.append(Bar(f"{case.name}: {name}", round(figures[name][0], 1), "µs", TARGET_US, "lower"))
    most = Case(INSIDE[-1], 5).name
    gain = table[most]["recount (baseline)"][0] / table[most]["look"][0]
    report.bars.append(Bar(f"{most}: a look against recounting", round(gain, 1), "times", 5, "higher"))
    report.data = {"us_median_and_p99": table}
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
