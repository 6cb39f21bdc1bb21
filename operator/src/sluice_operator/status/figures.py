"""The status's numbers: what a step costs, what was derived, what clients saw; and when they are worth a write.

Owns aggregation over pods, rounding and hysteresis. Pure. Next: `status.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_engine.core.state import EngineState, StepCost
from sluice_operator.observed.pods import PodView
from sluice_operator.resource.units import format_duration
from sluice_sidecar.telemetry.state import GateState

Json = dict[str, Any]

# A published number is replaced when it moved by more than this, or once a minute.
_CHANGE = 0.10
NUMBERS_EVERY_S = 60.0
# A moving text (loading at 40 %) is worth a write this often.
MESSAGES_EVERY_S = 10.0
# Below these, a change is noise, however large a share of the old value it is.
_NOISE = {"kvUsagePercent": 10.0, "preemptionsPerMinute": 1.0, "goodRequestsPerMinute": 5.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """A pod and what its gate last said."""

    pod: PodView
    gate: GateState

    @property
    def engine(self) -> EngineState | None:
        """The engine's own part."""
        return self.gate.engine


def ceiling_tokens(cost: StepCost, promise_us: int) -> int:
    """The largest prefill sum whose step keeps the promise."""
    left_ns = (promise_us - cost.fixed_us - cost.decode_us) * 1000
    return max(0, left_ns // max(1, cost.per_prefill_token_ns))


def step_cost(states: Sequence[PodState], promise_us: int, published: Mapping[str, int] | None) -> Json | None:
    """The cost that the CRD's rule compares with: of the ready pod with the smallest ceiling.

    The published one stays while its ceiling is within 10 % of the new one, so that a chunk which was accepted is not
    refused a minute later because a step took a little longer.
    """
    costs = [
        state.engine.step_cost for state in states if state.pod.is_ready and state.engine and state.engine.step_cost
    ]
    if not costs:
        return dict(published) if published else None
    worst = min(costs, key=lambda cost: ceiling_tokens(cost, promise_us))
    measured = {
        "fixedMicroseconds": _round_up(worst.fixed_us),
        "decodeMicroseconds": _round_up(worst.decode_us),
        "perPrefillTokenNanoseconds": _round_up(worst.per_prefill_token_ns),
    }
    if published:
        old, new = (ceiling_tokens(_cost(cost), promise_us) for cost in (published, measured))
        if abs(old - new) <= _CHANGE * max(old, new):
            return dict(published)
    return measured


def derived(states: Sequence[PodState]) -> Json | None:
    """What the loaded pod with the smallest ceiling derived."""
    limits = [state.engine.derived for state in states if state.engine and state.engine.derived]
    if not limits:
        return None
    least = min(limits, key=lambda one: one.chunk_ceiling_tokens)
    return {
        "chunkCeilingTokens": least.chunk_ceiling_tokens,
        "tokenBudget": least.token_budget,
        "maxSequences": least.max_sequences,
        "kvCapacityTokens": least.kv_capacity_tokens,
    }


def measured(states: Sequence[PodState]) -> Json | None:
    """What clients of all ready pods saw, the worst first."""
    seen = [state.gate.measured for state in states if state.pod.is_ready]
    if not seen:
        return None
    result: Json = {
        "kvUsagePercent": round(max(one.kv_usage_percent for one in seen)),
        "preemptionsPerMinute": round(sum(one.preemptions_per_minute for one in seen), 1),
        "goodRequestsPerMinute": round(sum(one.good_requests_per_minute for one in seen), 1),
    }
    for name, values in (
        ("timeToFirstToken", [one.time_to_first_token_us for one in seen if one.time_to_first_token_us is not None]),
        ("interTokenLatency", [one.inter_token_latency_us for one in seen if one.inter_token_latency_us is not None]),
    ):
        if values:
            result[name] = format_duration(max(values))
    return result


def worth_writing(old: Mapping[str, Any], new: Mapping[str, Any], age_s: float) -> bool:
    """Whether a status is to be sent, `age_s` after the last one was: claims at once, numbers and texts seldom."""
    if _without(old, _NUMBERS) != _without(new, _NUMBERS):
        if _claims(old) != _claims(new):
            return True
        if age_s >= MESSAGES_EVERY_S:
            return True
    old_numbers, new_numbers = ({key: one.get(key) for key in _NUMBERS} for one in (old, new))
    if old_numbers == new_numbers:
        return False
    return age_s >= NUMBERS_EVERY_S or (age_s >= MESSAGES_EVERY_S and _moved(old_numbers, new_numbers))


_NUMBERS = ("stepCost", "derived", "measured")


def _without(status: Mapping[str, Any], keys: Sequence[str]) -> Json:
    return {key: value for key, value in status.items() if key not in keys}


def _claims(status: Mapping[str, Any]) -> Json:
    """All that must be told at once: everything but numbers and the wording of messages."""
    result = _without(status, (*_NUMBERS, "conditions", "failure"))
    failure = status.get("failure") or {}
    result["failure"] = (failure.get("reason"), failure.get("pod"))
    keys = ("type", "status", "reason", "observedGeneration")
    result["conditions"] = [tuple(condition.get(key) for key in keys) for condition in status.get("conditions", ())]
    return result


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    for group in _NUMBERS:
        before, after = old[group] or {}, new[group] or {}
        if before.keys() != after.keys():
            return True
        for name, value in after.items():
            was = _number(before[name])
            change = abs(_number(value) - was)
            if change > max(_NOISE.get(name, 0.0), _CHANGE * abs(was)):
                return True
    return False


def _number(value: object) -> float:
    """A number, or milliseconds of a duration as `format_duration` writes it."""
    if isinstance(value, str):
        return float(value[:-2]) if value.endswith("ms") else float(value[:-1]) * 1000
    return float(value) if isinstance(value, (int, float)) else 0.0


def _cost(published: Mapping[str, int]) -> StepCost:
    return StepCost(
        fixed_us=published["fixedMicroseconds"],
        decode_us=published["decodeMicroseconds"],
        per_prefill_token_ns=published["perPrefillTokenNanoseconds"],
    )


def _round_up(value: int) -> int:
    """To three significant digits: the rule errs on the safe side, and noise in the fourth digit causes no write."""
    unit = 10 ** max(0, len(str(value)) - 3)
    return int(-(-value // unit) * unit)
