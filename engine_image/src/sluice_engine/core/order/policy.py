"""The choices of a scheduler that are matters of policy, and from their names to the waiting requests under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice_engine.config import EngineConfig, FairnessUnit, Policy, Resume, VictimPolicy
from sluice_engine.core.order.fair import WeightedFair
from sluice_engine.core.order.keyed import (
    AGE_GUARD_US,
    KeyedOrder,
    earliest_deadline,
    first_come,
    priority,
    shortest_job,
)
from sluice_engine.core.order.lane import Key
from sluice_engine.core.order.meter import Meter
from sluice_engine.core.order.service import Service
from sluice_engine.core.order.waiting import Order, Waiting
from sluice_engine.live_config import LiveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What users choose about who goes first and who gives way; what a policy has no use for is not looked at."""

    order: Policy = "FirstComeFirstServed"
    aging_interval_us: int = 20_000_000
    fairness_unit: FairnessUnit = "Tokens"
    weights: Mapping[str, int] = field(default_factory=dict)
    """Of tenants; 1 for those that are not named."""
    guard_us: int = AGE_GUARD_US
    victim: VictimPolicy = "LeastComputed"
    resume: Resume = "Auto"
    """What becomes of the state of those that gave way."""
    max_preemptions_per_request: int = 3

    @classmethod
    def of(cls, config: EngineConfig, live: LiveConfig) -> Policies:
        """What the two files say."""
        scheduling = config.scheduling
        return cls(
            order=scheduling.policy,
            fairness_unit=scheduling.fairness_unit or "Tokens",
            victim=scheduling.victim,
            resume=scheduling.resume,
            max_preemptions_per_request=scheduling.max_preemptions_per_request,
        ).under(live)

    def under(self, live: LiveConfig) -> Policies:
        """The same policies with the numbers that `live.json` has for them."""
        return replace(
            self,
            aging_interval_us=live.scheduling.aging_interval_us,
            weights={tenant.name: tenant.weight for tenant in live.admission.tenants},
        )


def order_for(policies: Policies, service: Service) -> Waiting:
    """An empty set of waiting requests under these policies."""
    return Waiting(_order(policies, service), service)


def meter_for(policies: Policies, waiting: Waiting) -> Meter | None:
    """What tells `waiting` of the use of running requests; None where nobody asks."""
    shares_use = policies.order == "WeightedFair" and policies.fairness_unit != "Starts"
    return Meter(waiting) if shares_use else None


def reorder(waiting: Waiting, policies: Policies, service: Service) -> None:
    """Sort what waits by the numbers that these policies have now; the order itself is the one it was made with."""
    waiting.configure(_key(policies, service), policies.weights)


def _order(policies: Policies, service: Service) -> Order:
    key = _key(policies, service)
    if policies.order == "WeightedFair":
        return WeightedFair(policies.fairness_unit, key, policies.weights)
    guarded = policies.order in {"ShortestJobFirst", "EarliestDeadline"}
    return KeyedOrder(key, guard_us=policies.guard_us if guarded else None)


def _key(policies: Policies, service: Service) -> Key:
    match policies.order:
        case "FirstComeFirstServed":
            return first_come
        case "ShortestJobFirst":
            return shortest_job(service)
        case "EarliestDeadline":
            return earliest_deadline(service)
        case "Priority" | "WeightedFair":  # classes keep their order inside a tenant's own share
            return priority(policies.aging_interval_us)
