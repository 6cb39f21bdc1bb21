"""When numbers are worth a write, and how the published cost stands still."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import operator_scene as scene
from sluice_engine.core.state import StepCost
from sluice_operator.observed import pods
from sluice_operator.status import figures
from sluice_operator.status.figures import PodState, worth_writing

PROMISE_US = 150_000


def states(*costs: StepCost) -> list[PodState]:
    (view,) = pods.views(scene.observed(scene.pod()))
    return [PodState(pod=view, gate=scene.gate_state(cost=cost)) for cost in costs]


def cost(per_token_ns: int = 35_000, fixed_us: int = 20_000) -> StepCost:
    return StepCost(fixed_us=fixed_us, decode_us=10_000, per_prefill_token_ns=per_token_ns)


def test_the_planning_profile_gives_the_known_ceilings() -> None:
    assert figures.ceiling_tokens(cost(), 150_000) == 3428
    assert figures.ceiling_tokens(cost(), 100_000) == 2000


@pytest.mark.parametrize(
    ("per_token_ns", "moves"),
    [
        pytest.param(36_000, False, id="a little slower: the published one stays"),
        pytest.param(34_000, False, id="a little faster: the published one stays"),
        pytest.param(45_000, True, id="much slower"),
        pytest.param(25_000, True, id="much faster"),
    ],
)
def test_the_published_cost_has_hysteresis(per_token_ns: int, *, moves: bool) -> None:
    published = figures.step_cost(states(cost()), PROMISE_US, None)

    after = figures.step_cost(states(cost(per_token_ns)), PROMISE_US, published)

    assert (after != published) is moves


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(1, 10**8))
def test_a_published_cost_is_never_below_the_measured_one(fixed: int, decode: int, per_token: int) -> None:
    measured = StepCost(fixed_us=fixed, decode_us=decode, per_prefill_token_ns=per_token)

    published = figures.step_cost(states(measured), PROMISE_US, None)

    assert published is not None
    assert published["fixedMicroseconds"] >= fixed
    assert published["decodeMicroseconds"] >= decode
    assert per_token <= published["perPrefillTokenNanoseconds"] <= per_token * 1.01 + 1


def status(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "observedGeneration": 1,
        "readyReplicas": 1,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "All serve."}],
        "measured": {"kvUsagePercent": 40, "timeToFirstToken": "800ms", "goodRequestsPerMinute": 40.0},
    }
    return {**base, **changes}


def measured(**changes: Any) -> dict[str, Any]:
    return status(measured={**status()["measured"], **changes})


def ready(**changes: Any) -> dict[str, Any]:
    return status(conditions=[{**status()["conditions"][0], **changes}])


@pytest.mark.parametrize(
    ("new", "age_s", "is_written"),
    [
        pytest.param(status(), 1e9, False, id="the same is never written again"),
        pytest.param(ready(status="False"), 0, True, id="a condition at once"),
        pytest.param(ready(reason="Other"), 0, True, id="a reason at once"),
        pytest.param(status(readyReplicas=0), 0, True, id="a count of pods at once"),
        pytest.param(status(failure={"reason": "X", "message": "y"}), 0, True, id="a failure at once"),
        pytest.param(ready(message="Two serve."), 5, False, id="a new wording not at once"),
        pytest.param(ready(message="Two serve."), 11, True, id="a new wording after ten seconds"),
        pytest.param(measured(timeToFirstToken="810ms"), 59, False, id="a small change of a number within the minute"),
        pytest.param(measured(timeToFirstToken="810ms"), 61, True, id="a small change of a number after a minute"),
        pytest.param(measured(timeToFirstToken="1.2s"), 11, True, id="a large change of a number soon"),
        pytest.param(measured(timeToFirstToken="1.2s"), 2, False, id="but not with every poll"),
        pytest.param(measured(kvUsagePercent=45), 11, False, id="a few percent of the cache are noise"),
        pytest.param(measured(kvUsagePercent=60), 11, True, id="twenty percent of the cache are not"),
        pytest.param(status(measured={"kvUsagePercent": 40}), 11, True, id="traffic that ended"),
    ],
)
def test_a_status_is_written_when_it_is_worth_it(new: dict[str, Any], age_s: float, *, is_written: bool) -> None:
    assert worth_writing(status(), new, age_s) is is_written
