"""Step costs, the chunk ceiling and what is derived from a promise."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.test_calibrate import config
from sluice_engine.config import SchedulerConfig
from sluice_engine.core.derivation import derivation_of
from sluice_engine.core.step_limits import Capacity, derive, idle_ttft_us, prefill_cost, step_cost
from sluice_engine.core.steptime import (
    PLANNING_RECOMPUTE_US_PER_TOKEN,
    ChunkCeiling,
    PlanningProfile,
    StepTable,
    step_quantile,
)
from sluice_engine.live_config import LiveConfig, LiveSchedulingConfig, SLOConfig

PROFILE = PlanningProfile()


def slo(itl_ms: int = 150, ttft_ms: int = 2000, reference: int = 4096) -> SLOConfig:
    return SLOConfig(
        time_to_first_token_us=ttft_ms * 1000, inter_token_latency_us=itl_ms * 1000, reference_prompt_tokens=reference
    )


def capacity(num_blocks: int = 4096, max_decode: int = 64) -> Capacity:
    return Capacity(
        num_blocks=num_blocks,
        block_tokens=16,
        max_length_tokens=32_768,
        max_decode_requests=max_decode,
        max_prefill_tokens=1 << 20,
    )


@pytest.mark.parametrize(
    ("promise_ms", "ceiling"),
    [
        pytest.param(150, 3428, id="150-ms-allows-3428-tokens"),
        pytest.param(100, 2000, id="100-ms-allows-2000-tokens"),
        pytest.param(30, 0, id="decodes-alone-take-30-ms"),
        pytest.param(29, 0, id="below-what-decodes-take"),
    ],
)
def test_the_chunk_ceiling_follows_from_the_promise(promise_ms: int, ceiling: int) -> None:
    assert ChunkCeiling(PROFILE, promise_ms * 1000)(1) == ceiling


def test_raising_the_chunk_to_8192_rewrites_the_promise() -> None:
    assert PROFILE.predict_us(1, 8192, 0) == 316_720


def test_the_price_of_recompute_is_another_constant_than_the_price_of_prefill() -> None:
    recompute_ns = PLANNING_RECOMPUTE_US_PER_TOKEN * 1000
    assert recompute_ns * 4000 == 240_000_000
    assert recompute_ns != PROFILE.per_prefill_token_ns


@given(promise_us=st.integers(1_000, 2_000_000), decodes=st.integers(0, 300))
def test_one_token_more_than_the_ceiling_breaks_the_promise(promise_us: int, decodes: int) -> None:
    ceiling = ChunkCeiling(PROFILE, promise_us)(decodes)

    assert ceiling == 0 or PROFILE.bound_us(decodes, ceiling, 0) <= promise_us
    assert PROFILE.bound_us(decodes, ceiling + 1, 0) > promise_us


def test_neither_set_derives_both() -> None:
    derived, limits = derive(slo(), SchedulerConfig(), LiveSchedulingConfig(), PROFILE, capacity())

    assert derived.feasible
    assert (derived.chunk_ceiling_tokens, derived.max_sequences) == (3428, 64)
    assert derived.token_budget == 64 + 3428
    assert limits.prefill_budget(10, 0) == 3428
    assert limits.prefill_budget(0, 0) == derived.token_budget, "nothing decodes: up to the token budget"


def test_max_sequences_is_capped_by_what_the_pool_holds() -> None:
    derived, _ = derive(slo(reference=64), SchedulerConfig(), LiveSchedulingConfig(), PROFILE, capacity(num_blocks=12))

    assert derived.max_sequences == 12


def test_a_chunk_that_is_set_binds_everywhere() -> None:
    derived, limits = derive(
        slo(), SchedulerConfig(), LiveSchedulingConfig(prefill_chunk_tokens=512), PROFILE, capacity()
    )

    assert derived.feasible
    assert (limits.prefill_budget(0, 0), limits.prefill_budget(5, 0)) == (512, 512)
    assert derived.token_budget == 64 + 512


@pytest.mark.parametrize(
    ("chunk", "sequences", "itl_ms", "least_ms"),
    [
        pytest.param(3429, None, 150, 150.015, id="chunk-one-token-over-the-ceiling"),
        pytest.param(8192, None, 150, 316.72, id="chunk-8192"),
        pytest.param(3428, 8, 100, 149.98, id="tighter-promise"),
        pytest.param(None, 8, 30, 30.56, id="not-even-one-block-beside-the-decodes"),
        pytest.param(None, None, 30, 30.56, id="nothing-set-and-no-block-fits"),
    ],
)
def test_an_infeasible_promise_names_the_least_that_would_work(
    chunk: int | None, sequences: int | None, itl_ms: int, least_ms: float
) -> None:
    derived, limits = derive(
        slo(itl_ms),
        SchedulerConfig(max_sequences=sequences),
        LiveSchedulingConfig(prefill_chunk_tokens=chunk),
        PROFILE,
        capacity(),
    )

    assert not derived.feasible
    assert derived.least_inter_token_latency_us == round(least_ms * 1000)
    assert "least that would work" in derived.reason
    assert limits.prefill_budget(1, 0) >= min(chunk or 16, 16), "it still serves"


def test_the_least_promise_that_is_named_does_work() -> None:
    setting = LiveSchedulingConfig(prefill_chunk_tokens=8192)
    derived, _ = derive(slo(), SchedulerConfig(), setting, PROFILE, capacity())
    relaxed = SLOConfig(time_to_first_token_us=2_000_000, inter_token_latency_us=derived.least_inter_token_latency_us)

    again, _ = derive(relaxed, SchedulerConfig(), setting, PROFILE, capacity())

    assert again.feasible


def test_a_ttft_that_an_idle_pod_cannot_make_is_infeasible() -> None:
    derived, _ = derive(slo(ttft_ms=100), SchedulerConfig(), LiveSchedulingConfig(), PROFILE, capacity())

    assert not derived.feasible
    assert derived.least_time_to_first_token_us > 100_000
    assert "4096-token prompt" in derived.reason


def test_an_idle_pod_prefills_a_long_prompt_in_steps() -> None:
    _, limits = derive(slo(), SchedulerConfig(), LiveSchedulingConfig(prefill_chunk_tokens=3400), PROFILE, capacity())

    assert idle_ttft_us(12_000, limits, PROFILE) == 4 * 20_000 + 12_000 * 35, "500 ms in four steps"
    _, whole = derive(slo(1000), SchedulerConfig(), LiveSchedulingConfig(), PROFILE, capacity())
    assert idle_ttft_us(12_000, whole, PROFILE) == 440_000, "440 ms alone in one step"


TABLE = StepTable(
    decode_axis=(0, 1, 16),
    prefill_axis=(0, 64, 512),
    context_axis=(0, 4096),
    median_us=tuple(
        20_000 * (d > 0) + 1_000 * d + 100 * p + c // 4 for d in (0, 1, 16) for p in (0, 64, 512) for c in (0, 4096)
    ),
    tail_ratio=1.15,
    host_overhead_us=500,
)


@pytest.mark.parametrize(
    ("step", "us"),
    [
        pytest.param((1, 0, 0), 21_000, id="a-measured-cell"),
        pytest.param((1, 288, 0), 21_000 + 28_800, id="between-two-prefill-sizes"),
        pytest.param((1, 0, 2048), 21_000 + 512, id="between-two-contexts"),
        pytest.param((8, 0, 0), 28_000, id="between-two-decode-batches"),
        pytest.param((16, 1024, 0), 36_000 + 102_400, id="beyond-the-last-prefill-size"),
    ],
)
def test_a_table_interpolates_between_its_cells(step: tuple[int, int, int], us: int) -> None:
    assert TABLE.predict_us(*step) == us


@pytest.mark.parametrize("target_percent", [50.0, 75.0, 90.0, 95.0, 99.0, 99.5])
def test_answers_of_every_length_keep_a_promise_that_every_step_is_filled_to(target_percent: float) -> None:
    allowed = 1 - target_percent / 100
    miss = 1 - step_quantile(target_percent)

    def kept(gaps: int) -> float:
        """The chance of an answer whose gaps are longer than promised by `miss` each."""
        over = range(int(gaps * allowed + 1e-9) + 1)
        return sum(math.comb(gaps, k) * miss**k * (1 - miss) ** (gaps - k) for k in over)

    worst = min(kept(gaps) for gaps in range(1, 900))
    assert 1 - allowed - 1e-9 <= worst <= 1 - allowed / 2, "and not much stricter than need be"


def test_a_bound_is_the_median_at_the_tail_plus_host_overhead() -> None:
    assert TABLE.bound_us(1, 0, 0) == round(21_000 * 1.15) + 500


DEEP = dataclasses.replace(TABLE, prior_pair_ps=(600_000, 600_000, 200_000))


@pytest.mark.parametrize(
    ("prefill", "start", "extra_us"),
    [
        pytest.param(64, 0, 0, id="the-start-of-a-prompt-costs-nothing-more"),
        pytest.param(64, 2_000, 76_800, id="a-measured-size"),
        pytest.param(288, 1_000, 115_200, id="between-two-sizes-the-price-is-between"),
        pytest.param(8, 2_000, 9_600, id="below-the-least-size-its-price"),
        pytest.param(1_024, 1_000, 204_800, id="beyond-the-largest-size-its-price"),
    ],
)
def test_a_chunk_costs_more_the_deeper_it_lies(prefill: int, start: int, extra_us: int) -> None:
    at_start = DEEP.predict_us(4, prefill, 1_000)

    assert DEEP.predict_us(4, prefill, 1_000, prefill * start) == at_start + extra_us


@given(
    decodes=st.integers(1, 16),
    start=st.integers(0, 3_000),
    prefill=st.integers(0, 200),
    before=st.integers(0, 3_000),
    promise_ms=st.integers(30, 300),
)
def test_one_more_chunk_fills_the_promise_and_never_breaks_it(
    decodes: int, start: int, prefill: int, before: int, promise_ms: int
) -> None:
    ceiling = ChunkCeiling(DEEP, promise_ms * 1000, search_up_to_tokens=512)

    more = ceiling.beside(decodes, 512, start, prefill, prefill * before)

    def bound_us(tokens: int) -> int:
        return DEEP.bound_us(decodes, prefill + tokens, 512, prefill * before + tokens * start)

    assert more == 0 or bound_us(more) <= promise_ms * 1000
    if prefill + more < 512 and (prefill or start % ChunkCeiling.GRAIN_TOKENS == 0):
        assert bound_us(more + 1) > promise_ms * 1000


def test_a_derived_chunk_keeps_the_promise_at_the_end_of_a_reference_prompt() -> None:
    derived, limits = derive(
        slo(200, ttft_ms=60_000), SchedulerConfig(), LiveSchedulingConfig(), DEEP, capacity(max_decode=16)
    )

    chunk, depth = derived.chunk_ceiling_tokens, 4_096
    assert derived.feasible, derived.reason
    assert DEEP.bound_us(1, chunk, depth, chunk * depth) <= 200_000
    assert limits.prefill_budget(1, 0) > 3 * chunk, "at the start of a prompt more fits"
    assert limits.chunk_share(1, depth, depth, 0, 0) == chunk


def test_what_depth_costs_is_told_apart_from_what_a_token_costs() -> None:
    cost = prefill_cost(DEEP, chunk_tokens=64, start_tokens=2_048)

    tail = DEEP.tail_ratio
    assert cost.per_token_ns == pytest.approx(100_000 * tail, rel=1e-3)
    assert cost.per_prior_pair_ps == pytest.approx(600_000 * tail, rel=1e-3)


def test_leaving_the_grid_is_said() -> None:
    assert not TABLE.extrapolates(16, 512)
    assert TABLE.extrapolates(17, 0)
    assert TABLE.extrapolates(0, 513)


@given(
    chunk=st.integers(1, 512),
    beside=st.integers(1, 16),
    promise_ms=st.integers(20, 200),
    table=st.sampled_from([TABLE, PROFILE]),
)
def test_the_three_integers_reproduce_the_ceiling(
    chunk: int, beside: int, promise_ms: int, table: StepTable | PlanningProfile
) -> None:
    cost = step_cost(table, beside=beside, chunk_tokens=chunk, context_tokens=0)

    line = cost.fixed_us + cost.decode_us + -(-chunk * cost.per_prefill_token_ns // 1000)
    bound = table.bound_us(beside, chunk, 0)
    assert bound <= line <= bound + 1 + chunk // 1000
    assert (cost.fixed_us, cost.decode_us, cost.per_prefill_token_ns) >= (0, 0, 0)


def test_the_planning_profile_gives_back_its_own_constants() -> None:
    cost = step_cost(PROFILE, beside=1, chunk_tokens=2000, context_tokens=0)

    assert (cost.fixed_us, cost.decode_us, cost.per_prefill_token_ns) == (20_000, 10_000, 35_000)


@pytest.mark.parametrize(
    ("decode_axis", "prefill_axis", "context_axis"),
    [
        pytest.param((1, 16), (0, 64), (0, 8), id="does-not-start-at-zero"),
        pytest.param((0, 1), (0, 64, 64), (0, 8), id="does-not-rise"),
        pytest.param((0, 1), (0, 64), (0,), id="one-point"),
    ],
)
def test_a_malformed_table_is_refused(
    decode_axis: tuple[int, ...], prefill_axis: tuple[int, ...], context_axis: tuple[int, ...]
) -> None:
    cells = len(decode_axis) * len(prefill_axis) * len(context_axis)

    with pytest.raises(ValueError, match="step table axis"):
        StepTable(decode_axis=decode_axis, prefill_axis=prefill_axis, context_axis=context_axis, median_us=(1,) * cells)


def test_a_budget_alone_leaves_room_for_prefill_beside_the_decodes() -> None:
    derived, _ = derive(
        slo(ttft_ms=5000), SchedulerConfig(token_budget=40), LiveSchedulingConfig(), PROFILE, capacity()
    )

    assert derived.feasible, derived.reason
    assert (derived.max_sequences, derived.chunk_ceiling_tokens) == (39, 39)


def test_a_budget_that_the_set_batch_uses_up_is_infeasible() -> None:
    setting = SchedulerConfig(token_budget=40, max_sequences=40)

    derived, _ = derive(slo(), setting, LiveSchedulingConfig(), PROFILE, capacity())

    assert not derived.feasible
    assert "tokenBudget 40" in derived.reason


def test_what_context_costs_the_decodes_is_told_beside_their_curve() -> None:
    live = LiveConfig(slo=slo(200, ttft_ms=60_000))
    found = derivation_of(config(Path("unused")), live, TABLE, capacity(max_decode=16))

    pool = capacity(max_decode=16).pool_tokens
    assert found.decode_context_ps == pytest.approx(250_000, rel=1e-3), "a quarter of a microsecond a token"
    assert found.decode_curve_us[-1] == (16, TABLE.predict_us(16, 0, pool // 2))
