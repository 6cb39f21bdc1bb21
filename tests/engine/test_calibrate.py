"""Filling and keeping the step-time table, on a machine whose step times are a formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice_engine.calibrate import calibrate
from sluice_engine.codec import from_json
from sluice_engine.config import CacheConfig, EngineConfig, ModelConfig, ModelSource, SchedulerConfig
from sluice_engine.core.step_limits import derive
from sluice_engine.core.steptime import StepTable
from sluice_engine.live_config import LiveConfig, LiveSchedulingConfig, SLOConfig


class Machine:
    """Steps cost 20 ms, 0.5 ms a prefill token, 2 ms a decode, 1 µs a token of context, 0.4 µs a prior pair.

    The clock sums them up.
    """

    num_blocks = 400
    block_tokens = 16
    max_length_tokens = 8192
    largest_prefill_tokens: int | None = None

    def __init__(self, description: str = "a machine", factor: float = 1.0) -> None:
        self.description = description
        self.factor = factor
        self.now_us = 0
        self.measured: list[tuple[int, int, int, int]] = []

    def measure(self, decode_requests: int, prefill_tokens: int, context_tokens: int, start_tokens: int = 0) -> int:
        longest = min(self.num_blocks * self.block_tokens, self.max_length_tokens)
        assert start_tokens + prefill_tokens <= longest, "no request is so long"
        assert context_tokens <= decode_requests * longest, "nobody attends to so much"
        self.measured.append((decode_requests, prefill_tokens, context_tokens, start_tokens))
        attention = context_tokens + 0.4 * prefill_tokens * start_tokens
        cost = round((20_000 + 500 * prefill_tokens + 2_000 * decode_requests + attention) * self.factor)
        self.now_us += cost
        return cost


def config(table_dir: Path, max_sequences: int | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(source=ModelSource(demo="smollm2-135m"), served_name="m"),
        cache=CacheConfig(),
        scheduling=SchedulerConfig(max_sequences=max_sequences),
        table_dir=str(table_dir),
    )


def live(itl_ms: int = 500, chunk: int | None = None) -> LiveConfig:
    slo = SLOConfig(time_to_first_token_us=10_000_000, inter_token_latency_us=itl_ms * 1000)
    return LiveConfig(slo=slo, scheduling=LiveSchedulingConfig(prefill_chunk_tokens=chunk))


def test_the_table_gives_back_what_the_machine_does(tmp_path: Path) -> None:
    machine = Machine()

    table, capacity = calibrate(machine, config(tmp_path), live(), lambda: machine.now_us)

    for cell in [
        (1, 0, 0, 0),
        (4, 64, 0, 0),
        (10, 100, 3000, 0),
        (64, 256, 6400, 0),
        (0, 256, 0, 0),
        (0, 16, 0, 6000),
        (12, 200, 3000, 2600),
    ]:
        decodes, prefill, context, start = cell
        expected = Machine().measure(*cell)
        assert abs(table.predict_us(decodes, prefill, context, prefill * start) - expected) <= 0.02 * expected, cell
    assert capacity.pool_tokens == 6400
    assert capacity.max_decode_requests == 64


def test_measuring_tells_how_far_it_is_and_never_goes_back(tmp_path: Path) -> None:
    machine, told = Machine(), list[tuple[int, int]]()

    calibrate(machine, config(tmp_path), live(), lambda: machine.now_us, lambda done, of: told.append((done, of)))

    assert told[0][0] == 1
    assert told == sorted(told)
    assert len({of for _, of in told}) == 1
    assert told[-1][0] == told[-1][1], "more rounds than are needed take the time that is left"
    again = list[tuple[int, int]]()
    calibrate(machine, config(tmp_path), live(), lambda: machine.now_us, lambda done, of: again.append((done, of)))
    assert again == [], "a kept table is checked, not measured"


def test_steps_far_over_the_promise_are_not_measured_twice_over(tmp_path: Path) -> None:
    machine = Machine()

    table, _ = calibrate(machine, config(tmp_path), live(itl_ms=100), lambda: machine.now_us)

    assert table.prefill_axis[-1] == 512, "the first step over 250 ms ends the axis"
    assert max(prefill * start for _, prefill, _, start in machine.measured) * 0.4 <= 250_000, "nor is depth"


@pytest.mark.parametrize("itl_ms", [20, 500, 5_000, 60_000])
@pytest.mark.parametrize("factor", [0.01, 1, 8])
def test_measuring_ends_within_a_minute_whatever_is_promised(tmp_path: Path, itl_ms: int, factor: float) -> None:
    machine = Machine(factor=factor)

    calibrate(machine, config(tmp_path), live(itl_ms=itl_ms), lambda: machine.now_us)

    assert machine.now_us < 60_000_000


class Disturbed(Machine):
    """Something else runs in two thirds of the steps, which then take up to six times as long."""

    def measure(self, decode_requests: int, prefill_tokens: int, context_tokens: int, start_tokens: int = 0) -> int:
        before = self.now_us
        cost = super().measure(decode_requests, prefill_tokens, context_tokens, start_tokens)
        extra = cost * (0, 2, 5)[len(self.measured) * 7 % 11 % 3]
        self.now_us = before + cost + extra
        return cost + extra


def test_what_else_ran_meanwhile_is_mostly_taken_out(tmp_path: Path) -> None:
    machine = Disturbed()

    table, _ = calibrate(machine, config(tmp_path), live(), lambda: machine.now_us)

    cells = [(1, 0), (4, 64), (16, 64), (16, 256), (4, 512)]
    ratios = [table.predict_us(*cell, 0) / Machine().measure(*cell, 0) for cell in cells]
    assert max(ratios) < 3.1, ratios
    assert sorted(ratios)[2] < 1.5, ratios
    rows = [[table.predict_us(d, p, 0) for p in table.prefill_axis] for d in table.decode_axis[1:]]
    assert all(row == sorted(row) for row in rows), "more prefill never costs less"
    assert all(list(column) == sorted(column) for column in zip(*rows, strict=True)), "nor do more decodes"


def test_a_chunk_and_a_batch_that_are_set_are_measured_themselves(tmp_path: Path) -> None:
    machine = Machine()

    table, _ = calibrate(machine, config(tmp_path, max_sequences=10), live(chunk=300), lambda: machine.now_us)

    assert 300 in table.prefill_axis
    assert table.decode_axis == (0, 1, 4, 10)


def test_a_kept_table_is_taken_after_a_few_checks(tmp_path: Path) -> None:
    first = Machine()
    table, _ = calibrate(first, config(tmp_path), live(), lambda: first.now_us)
    again = Machine()

    kept, _ = calibrate(again, config(tmp_path), live(), lambda: again.now_us)

    assert kept == table
    assert len(again.measured) == 5, "a look that agrees is enough"
    assert again.now_us < first.now_us / 8


class Interrupted(Machine):
    """The first look at each cell takes three times as long."""

    def measure(self, decode_requests: int, prefill_tokens: int, context_tokens: int, start_tokens: int = 0) -> int:
        cell = (decode_requests, prefill_tokens, context_tokens, start_tokens)
        slow = 1 if cell in self.measured else 3
        return slow * super().measure(*cell)


def test_a_kept_table_is_not_given_up_for_one_slow_look(tmp_path: Path) -> None:
    first = Machine()
    table, _ = calibrate(first, config(tmp_path), live(), lambda: first.now_us)
    again = Interrupted()

    kept, _ = calibrate(again, config(tmp_path), live(), lambda: again.now_us)

    assert kept == table


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine(factor=3), id="slower-than-it-was"),
        pytest.param(Machine("another machine"), id="another-machine"),
    ],
)
def test_a_kept_table_that_does_not_agree_is_measured_anew(tmp_path: Path, machine: Machine) -> None:
    first = Machine()
    calibrate(first, config(tmp_path), live(), lambda: first.now_us)

    table, _ = calibrate(machine, config(tmp_path), live(), lambda: machine.now_us)

    assert table.predict_us(1, 64, 0) == pytest.approx(Machine(factor=machine.factor).measure(1, 64, 0), rel=0.02)


def test_a_kept_table_that_is_damaged_is_measured_anew(tmp_path: Path) -> None:
    first = Machine()
    calibrate(first, config(tmp_path), live(), lambda: first.now_us)
    (path,) = tmp_path.glob("step-table-*.json")
    path.write_text(path.read_text()[:-40])
    machine = Machine()

    table, _ = calibrate(machine, config(tmp_path), live(), lambda: machine.now_us)

    assert from_json(StepTable, path.read_text(), "kept") == table


def test_a_folder_that_cannot_be_written_costs_only_the_next_warm_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine()

    table, _ = calibrate(machine, config(tmp_path / "file" / "under"), live(), lambda: machine.now_us)

    assert table.predict_us(1, 0, 0) > 0


def test_limits_derived_from_a_measured_table_rest_on_measured_cells(tmp_path: Path) -> None:
    machine = Machine()
    settings = live()
    table, capacity = calibrate(machine, config(tmp_path), settings, lambda: machine.now_us)

    derived, _ = derive(settings.slo, SchedulerConfig(), LiveSchedulingConfig(), table, capacity)

    assert derived.feasible, derived.reason
    assert not table.extrapolates(derived.max_sequences, derived.chunk_ceiling_tokens)


def test_the_hosts_own_share_of_a_step_is_measured_and_counts_against_the_promise(tmp_path: Path) -> None:
    machine = Machine()

    def clock() -> int:
        machine.now_us += 150  # planning and settling: two readings a step
        return machine.now_us

    table, _ = calibrate(machine, config(tmp_path), live(), clock)

    assert table.host_overhead_us == 150
    assert table.bound_us(1, 0, 0) == round(table.predict_us(1, 0, 0) * table.tail_ratio) + 150
