"""A step table that learns, and limits that follow it."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from statistics import NormalDist, mean

import numpy as np
import pytest

from engine.scripted import make_request
from engine.test_calibrate import config, live
from sluice_engine.core.assemble import Assembled, assemble
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.refine import BATCH_STEPS, LEAST_TAIL_STEPS, TAIL_STEPS, RefinedTable, tail_of
from sluice_engine.core.step_limits import Capacity
from sluice_engine.core.steptime import ChunkCeiling, StepTable, step_quantile

PROMISE_US = 500_000


def true_us(decodes: int, prefill: int, context: int, pairs: int) -> int:
    return 8_000 + 500 * decodes + 400 * prefill + context // 4 + pairs // 2


def table(factor: float = 1.0) -> StepTable:
    axes = ((0, 1, 4, 16, 64), (0, 16, 64, 256, 1024), (0, 8_192))
    cells = [true_us(d, p, c if d else 0, 0) for d in axes[0] for p in axes[1] for c in axes[2]]
    return StepTable(
        decode_axis=axes[0], prefill_axis=axes[1], context_axis=axes[2],
        median_us=tuple(round(cell * factor) for cell in cells),
        prior_pair_ps=(round(500_000 * factor),) * 5,
    )  # fmt: skip


class Machine:
    """Runs the steps that a scheduler's own ceiling lets through, beside a few decodes."""

    def __init__(self, times: RefinedTable, speed: float = 1.0, noise: float = 0.0) -> None:
        self.times = times
        self.ceiling = ChunkCeiling(times, 500_000, search_up_to_tokens=1024)
        self.random = random.Random(3)
        self.speed, self.noise = speed, noise

    def run(self, steps: int) -> None:
        for _ in range(steps):
            decodes, start = self.random.randint(1, 20), self.random.choice([0, 500, 3_000])
            prefill = self.random.choice([0, 1, 1]) * min(1024, self.ceiling(decodes, 2_000, start))
            step = (decodes, prefill, 2_000, prefill * start)
            self.times.observe(*step, round(true_us(*step) * self.speed * self.random.gauss(1, self.noise)))


@pytest.mark.parametrize(
    "factor", [pytest.param(6.0, id="measured-beside-a-load"), pytest.param(0.6, id="measured-on-a-faster-day")]
)
def test_a_table_that_was_off_comes_to_the_truth(factor: float) -> None:
    times = RefinedTable(table(factor), 99, PROMISE_US)
    Machine(times).run(60 * BATCH_STEPS)

    for step in [(4, 0, 2_000, 0), (10, 100, 2_000, 0), (4, 300, 2_000, 300 * 500), (16, 500, 2_000, 0)]:
        assert times.predict_us(*step) == pytest.approx(true_us(*step), rel=0.1), step
    assert ChunkCeiling(times, 500_000)(4, 2_000) == pytest.approx(ChunkCeiling(table(), 500_000)(4, 2_000), rel=0.15)


def test_a_true_table_stays_true_under_noise() -> None:
    times = RefinedTable(table(), 99, PROMISE_US)
    Machine(times, noise=0.05).run(40 * BATCH_STEPS)

    for step in [(1, 0, 0, 0), (10, 100, 2_000, 0), (64, 1024, 8_192, 0)]:
        assert times.predict_us(*step) == pytest.approx(true_us(*step), rel=0.05), step


def test_one_wild_step_changes_next_to_nothing() -> None:
    times = RefinedTable(table(), 99, PROMISE_US)
    machine = Machine(times)
    machine.run(BATCH_STEPS - 1)
    times.observe(4, 0, 2_000, 0, 60_000_000)

    assert times.revision == 1
    assert times.predict_us(4, 0, 2_000) == pytest.approx(true_us(4, 0, 2_000, 0), rel=0.05)


@pytest.mark.parametrize(("noise", "tail"), [(0.02, 1.076), (0.1, 1.396)])
def test_the_tail_is_that_of_the_steps_that_ran(noise: float, tail: float) -> None:
    times = RefinedTable(table(), 99, PROMISE_US)
    machine = Machine(times, noise=noise)
    machine.run(LEAST_TAIL_STEPS - 1)
    assert times.table.tail_ratio == 1.15, "until learned"
    machine.run(2 * TAIL_STEPS)

    assert times.table.tail_ratio == pytest.approx(tail, abs=0.04)


def log_normal(spread: float, steps: int = TAIL_STEPS, seed: int = 7) -> list[float]:
    source = random.Random(seed)
    return [math.exp(source.gauss(0, math.log1p(spread))) for _ in range(steps)]


@pytest.mark.parametrize("target_percent", [75.0, 90.0, 99.0, 99.9])
@pytest.mark.parametrize("spread", [0.02, 0.05, 0.2])
def test_a_quantile_that_no_step_has_reached_yet_is_drawn_out_from_those_that_were_seen(
    spread: float, target_percent: float
) -> None:
    z = NormalDist().inv_cdf(step_quantile(target_percent))
    found = [math.log(tail_of(log_normal(spread, seed=seed), target_percent)) for seed in range(20)]

    assert mean(found) == pytest.approx(z * math.log1p(spread), rel=0.08)


@pytest.mark.parametrize(
    ("every", "times_longer", "least", "most"),
    [
        pytest.param(1000, 3.0, 1.18, 1.25, id="a-pause-in-a-thousand-steps-is-no-step's-cost"),
        pytest.param(200, 2.0, 1.18, 1.35, id="nor-is-one-that-the-promise-allows-for"),
        pytest.param(33, 1.5, 1.5, 1.8, id="what-more-steps-have-than-may-miss-counts"),
        pytest.param(6, 1.5, 1.5, 2.1, id="a-machine-of-two-speeds-is-taken-at-the-slower"),
    ],
)
def test_pauses_of_the_machine(every: int, times_longer: float, least: float, most: float) -> None:
    ratios = [ratio * (times_longer if n % every == 0 else 1) for n, ratio in enumerate(log_normal(0.05))]

    assert least < tail_of(ratios, 99) < most


def test_steps_near_the_promise_are_gathered_until_their_median_means_something() -> None:
    times, noise = RefinedTable(table(), 99, PROMISE_US), random.Random(5)
    large, small = (4, 800, 2_000, 0), (4, 0, 2_000, 0)
    for number in range(BATCH_STEPS * TAIL_STEPS // 2):
        step = small if number % 32 else large
        times.observe(*step, round(true_us(*step) * math.exp(noise.gauss(0, 0.05))))

    assert times.table.tail_ratio == pytest.approx(math.exp(0.05 * 3.72), abs=0.03), "two of them in a batch"


def test_the_noise_of_small_steps_is_not_the_tail_of_large_ones() -> None:
    times = RefinedTable(table(), 99, PROMISE_US)
    noise = random.Random(5)
    for _ in range(2 * TAIL_STEPS):
        times.observe(4, 0, 2_000, 0, true_us(4, 0, 2_000, 0) + noise.choice([0, 0, 0, 20_000]))

    assert times.table.tail_ratio == 1.15


def test_a_step_outside_the_grid_teaches_nothing() -> None:
    times = RefinedTable(table(), 99, PROMISE_US)
    for _ in range(2 * BATCH_STEPS):
        times.observe(65, 0, 0, 0, 1)

    assert (times.revision, times.learned_steps_total) == (0, 0)


def test_a_ceiling_forgets_what_it_computed_from_an_older_table() -> None:
    times = RefinedTable(table(), 99, PROMISE_US)
    ceiling = ChunkCeiling(times, 500_000)
    before = ceiling(4, 2_000)
    Machine(times, speed=1.5).run(20 * BATCH_STEPS)

    assert ceiling(4, 2_000) < before * 0.8


class TrueRunner:
    """Says that every step took what the truth says, times its speed."""

    def __init__(self) -> None:
        self.now_us = 0
        self.speed = 1.0

    def execute(self, plan: StepPlan) -> StepResult:
        step = (len(plan.decodes), plan.prefill_tokens, plan.context_tokens, plan.prior_pairs)
        self.now_us += round(true_us(*step) * self.speed)
        return StepResult(plan.step, np.full(len(plan.sampling()), 7))


def run(core: Assembled, runner: TrueRunner, requests: int) -> None:
    loop = EngineLoop(core.scheduler, runner, lambda: runner.now_us, tuning=core.tuning)
    for number in range(requests):
        name = f"{id(loop)}-{number}"
        assert loop.add(make_request(name, 300, 60, arrival_us=number)) is None
    while loop.has_work:
        loop.step()


def assembled(factor: float, itl_us: int = 500_000) -> Assembled:
    capacity = Capacity(
        num_blocks=2048, block_tokens=16, max_length_tokens=8_192, max_decode_requests=64, max_prefill_tokens=1024
    )
    settings = live()
    settings = dataclasses.replace(settings, slo=dataclasses.replace(settings.slo, inter_token_latency_us=itl_us))
    return assemble(config(Path("unused")), settings, table(factor), capacity)


def test_limits_follow_what_is_learned_also_upwards() -> None:
    core, truth = assembled(6.0), assembled(1.0).tuning.current.derived
    first = core.tuning.current.derived
    assert first.max_sequences < truth.max_sequences

    run(core, TrueRunner(), 800)

    now = core.tuning.current.derived
    assert now.feasible
    assert now.max_sequences >= 0.8 * truth.max_sequences
    assert now.chunk_ceiling_tokens == pytest.approx(truth.chunk_ceiling_tokens, rel=0.25)
    assert core.scheduler.limits.max_sequences == now.max_sequences


def test_a_machine_that_slows_down_prefills_less_beside_decodes_and_nobody_is_thrown_out() -> None:
    core, runner = assembled(1.0), TrueRunner()
    before = core.tuning.current.derived
    runner.speed = 4.0

    run(core, runner, 500)

    assert core.tuning.current.derived.chunk_ceiling_tokens < before.chunk_ceiling_tokens / 2.5
    assert core.scheduler.limits.token_budget < before.token_budget / 2
    assert core.scheduler.preemptions_total == 0


def test_a_promise_at_the_edge_does_not_come_and_go() -> None:
    least_us = assembled(1.0, itl_us=9_000).tuning.current.derived.least_inter_token_latency_us
    core = assembled(1.0, itl_us=least_us)
    assert core.tuning.current.derived.feasible
    runner = TrueRunner()
    runner.speed = 1.05
    run(core, runner, 200)
    assert core.tuning.current.derived.feasible, "five percent slower is noise"
    runner.speed = 1.3
    run(core, runner, 200)
    assert not core.tuning.current.derived.feasible


def test_a_step_with_copies_teaches_nothing_about_the_batch() -> None:
    core = assembled(1.0)
    times = core.scheduler.times
    assert isinstance(times, RefinedTable)
    assert core.scheduler.add(make_request("A", 100, 4)) is None
    plan = core.scheduler.schedule(0)

    core.tuning.settled(dataclasses.replace(plan, swap_out=((0, 0),)), 10_000_000)
    assert times.learned_steps_total == 0
    core.tuning.settled(plan, 50_000)
    assert times.learned_steps_total == 1
