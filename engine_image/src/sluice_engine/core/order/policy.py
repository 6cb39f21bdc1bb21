"""From the name of a policy to the waiting requests under it."""

from __future__ import annotations

from collections.abc import Mapping

from sluice_engine.config import FairnessUnit, Policy
from sluice_engine.core.order.fair import WeightedFair
from sluice_engine.core.order.keyed import (
    AGE_GUARD_US,
    KeyedOrder,
    earliest_deadline,
    first_come,
    priority,
    shortest_job,
)
from sluice_engine.core.order.service import Service
from sluice_engine.core.order.waiting import Order, Waiting

DEFAULT_AGING_INTERVAL_US = 20_000_000


def order_for(
    policy: Policy,
    service: Service,
    *,
    aging_interval_us: int = DEFAULT_AGING_INTERVAL_US,
    fairness_unit: FairnessUnit = "Tokens",
    weights: Mapping[str, int] | None = None,
    guard_us: int = AGE_GUARD_US,
) -> Waiting:
    """An empty set of waiting requests under `policy`; what a policy has no use for is not looked at."""
    return Waiting(_order(policy, service, aging_interval_us, fairness_unit, weights, guard_us), service)


def _order(
    policy: Policy,
    service: Service,
    aging_interval_us: int,
    fairness_unit: FairnessUnit,
    weights: Mapping[str, int] | None,
    guard_us: int,
) -> Order:
    match policy:
        case "FirstComeFirstServed":
            return KeyedOrder(first_come)
        case "ShortestJobFirst":
            return KeyedOrder(shortest_job(service), guard_us=guard_us)
        case "Priority":
            return KeyedOrder(priority(aging_interval_us))
        case "EarliestDeadline":
            return KeyedOrder(earliest_deadline(service), guard_us=guard_us)
        case "WeightedFair":
            # Classes keep their order inside a tenant's own share.
            return WeightedFair(fairness_unit, priority(aging_interval_us), weights)
