from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import PrefillCost, RequestState
from sluice_engine.core.step_limits import StepLimits
from sluice_engine.core.steptime import ChunkCeiling, PlanningProfile
from sluice_engine.live_config import LiveSchedulingConfig
from sluice_sidecar.capacity.limits import Limits, prefill_share


def limits() -> Limits:
    found = Limits.from_state(ready_state(), live_config())
    assert found is not None
    return found


def test_limits_are_unknown_until_the_engine_has_derived_them() -> None:
    assert Limits.from_state(ready_state(derived=None), live_config()) is None


@pytest.mark.parametrize(
    ("decodes", "step_us"),
    [
        pytest.param(0, 5_000, id="nothing-decodes"),
        pytest.param(1, 8_000, id="a-measured-point"),
        pytest.param(3, 9_333, id="between-two-points"),
        pytest.param(99, 10_000, id="beyond-the-last-point"),
    ],
)
def test_the_time_of_a_step_that_only_decodes(decodes: int, step_us: int) -> None:
    assert limits().decode_step_us(decodes) == step_us


def inside(prompt_tokens: int, output_tokens: int) -> RequestState:
    return RequestState(
        id="r", choice=0, status="running", prompt_tokens=prompt_tokens, computed_tokens=0, output_tokens=output_tokens,
        max_tokens=64, blocks=1, incarnation=0, preemptions=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "context_ps", "step_us"),
    [
        # Told for 800 tokens of context, half of the pool.
        pytest.param([inside(190, 10)], 1_000_000, 10_000, id="as-much-context-as-it-was-told-for"),
        pytest.param([inside(600, 0), inside(780, 20)], 1_000_000, 10_000 + 2_000, id="a-beginning-that-many-share"),
        pytest.param([inside(50, 0)], 1_000_000, 10_000 - 600, id="an-emptier-cache"),
        pytest.param([], 1_000_000, 10_000, id="nobody-inside"),
        pytest.param([inside(700, 0)], 0, 10_000, id="an-engine-that-does-not-tell"),
    ],
)
def test_a_decode_step_takes_as_long_as_the_context_of_those_inside_makes_it(
    requests: list[RequestState], context_ps: int, step_us: int
) -> None:
    state = ready_state(requests=tuple(requests), decode_context_ps=context_ps)
    found = Limits.from_state(state, live_config())

    assert found is not None
    assert found.decode_step_us(4) == step_us


@pytest.mark.parametrize(
    ("decodes", "itl_us", "tokens"),
    [
        pytest.param(0, 100_000, 512, id="an-idle-engine-uses-its-whole-budget"),
        pytest.param(4, 100_000, 508, id="the-token-budget-binds"),
        pytest.param(4, 15_000, 100, id="the-promise-leaves-5-ms-for-prefill"),
        pytest.param(4, 9_000, 16, id="no-room-still-moves-a-block-a-step"),
    ],
)
def test_the_chunk_beside_decodes(decodes: int, itl_us: int, tokens: int) -> None:
    found = Limits.from_state(ready_state(), live_config(itl_us=itl_us))

    assert found is not None
    assert found.chunk_tokens(decodes) == tokens


def with_chunk(chunk: int | None, per_request: int | None, itl_us: int = 100_000, **changes: Any) -> Limits:
    live = replace(
        live_config(itl_us=itl_us),
        scheduling=LiveSchedulingConfig(prefill_chunk_tokens=chunk, max_prefill_tokens_per_request=per_request),
    )
    found = Limits.from_state(ready_state(**changes), live)
    assert found is not None
    return found


def test_another_engine_fills_its_own_chunk_under_any_promise() -> None:
    theirs = Limits.from_state(ready_state(engine="vllm"), live_config())
    assert theirs is not None

    tighter = theirs.under(live_config(itl_us=11_000))

    assert [found.chunk_tokens(4) for found in (theirs, tighter)] == [256, 256]
    assert limits().under(live_config(itl_us=11_000)).chunk_tokens(4) == 20


class Linear(PlanningProfile):
    """The step times of `ready_state`, and half a microsecond a prior pair."""

    def predict_us(self, decode_requests: int, prefill_tokens: int, context_tokens: int, prior_pairs: int = 0) -> int:
        return limits().decode_step_us(decode_requests) + 50 * prefill_tokens + prior_pairs // 2


@pytest.mark.parametrize("decodes", [0, 1, 4])
@pytest.mark.parametrize("chunk", [None, 32, 128, 4_096])
@pytest.mark.parametrize("depth", [0, 512, 4_096])
@pytest.mark.parametrize("itl_us", [9_000, 20_000, 100_000])
def test_a_step_carries_what_the_engines_own_rule_lets_it_carry(
    decodes: int, chunk: int | None, depth: int, itl_us: int
) -> None:
    engine = StepLimits(
        max_sequences=4, token_budget=512, prefill_chunk_tokens=chunk, max_prefill_tokens_per_request=None,
        ceiling=ChunkCeiling(Linear(), itl_us), block_tokens=16,
    )  # fmt: skip
    found = with_chunk(
        chunk, None, itl_us=itl_us, prefill_cost=PrefillCost(per_token_ns=50_000, per_prior_pair_ps=500_000)
    )

    carried = min(engine.prefill_budget(decodes, 0), engine.chunk_share(decodes, 0, depth, 0, 0))
    assert found.chunk_tokens(decodes, depth) == pytest.approx(carried, abs=1)


def test_a_long_prompt_takes_longer_for_its_depth() -> None:
    found = with_chunk(100, None, prefill_cost=PrefillCost(per_token_ns=50_000, per_prior_pair_ps=500_000))

    pairs = found.prior_pairs(0, 400, decodes=0)
    assert pairs == 100 * (0 + 100 + 200 + 300)
    assert found.prior_pairs(300, 100, decodes=0) == 100 * 300
    assert found.prefill_us(0, 400, 0, prior_pairs=pairs) == 4 * 5_000 + 400 * 50 + pairs // 2


@pytest.mark.parametrize(
    ("per_request", "queue", "own", "requests", "steps"),
    [
        pytest.param(None, 0, 400, 1, 4, id="a-chunk-that-is-set-binds-though-nothing-decodes"),
        pytest.param(50, 0, 400, 1, 8, id="alone-it-gets-its-share-a-step"),
        pytest.param(50, 0, 400, 2, 4, id="two-of-one-call-get-theirs-side-by-side"),
        pytest.param(50, 400, 100, 1, 6, id="behind-a-queue-it-waits-for-that-too"),
        pytest.param(500, 100, 100, 1, 2, id="a-share-beyond-the-chunk-binds-nothing"),
    ],
)
def test_one_requests_share_of_a_step_bounds_its_first_token(
    per_request: int | None, queue: int, own: int, requests: int, steps: int
) -> None:
    found = with_chunk(100, per_request)

    first_us = found.prefill_us(queue, own, 0, own_requests=requests)

    assert first_us == steps * 5_000 + (queue + own) * 50


@given(st.lists(st.integers(1, 300), max_size=4), st.integers(1, 300), st.integers(1, 64), st.integers(1, 64))
def test_no_first_token_takes_more_steps_than_predicted(
    ahead: list[int], own: int, chunk: int, per_request: int
) -> None:
    found = with_chunk(chunk, per_request)
    left, steps = [*ahead, own], 0
    while left[-1]:
        steps, budget = steps + 1, chunk
        for index, remaining in enumerate(left):
            taken = min(remaining, budget, per_request)
            left[index] -= taken
            budget -= taken

    predicted = found.prefill_us(sum(ahead), own, 0) - (sum(ahead) + own) * 50

    # One more at most: a share that does not fill its last step.
    assert steps * 5_000 <= predicted + 5_000


@pytest.mark.parametrize(
    ("per_request", "share"), [pytest.param(None, 50, id="evenly"), pytest.param(20, 20, id="no-more-than-is-set")]
)
def test_the_share_that_growth_reckons_with(per_request: int | None, share: int) -> None:
    assert prefill_share(with_chunk(100, per_request), decodes=2, prefilling=2) == share
