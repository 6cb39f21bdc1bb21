"""What the gate was told to keep, as series beside what it measures: alerts need no second source for their limits.

Owns four families. They follow `live.json` without a restart, as the gate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice_engine.live_config import LiveConfig

_US = 1e-6


class PromiseCollector(Collector):
    """The promise and the limits that are declared with it, read when scraped."""

    def __init__(self, live: Callable[[], LiveConfig]) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        """One family for each."""
        slo, admission = self._live().slo, self._live().admission
        yield GaugeMetricFamily(
            "sluice_gate_objective_ratio",
            "Share of requests that shall keep the promise (slo.targetPercent).",
            value=slo.target_percent / 100,
        )
        promise = GaugeMetricFamily(
            "sluice_gate_promise_seconds",
            "The promise: first token (ttft, for prompts up to the reference length) and time between two (itl).",
            labels=["promise"],
        )
        promise.add_metric(["ttft"], slo.time_to_first_token_us * _US)
        promise.add_metric(["itl"], slo.inter_token_latency_us * _US)
        yield promise
        yield GaugeMetricFamily(
            "sluice_gate_preemptions_allowed_per_minute",
            "Preemptions a minute above which the KV ceiling comes down (admission.preemptionsPerMinute).",
            value=admission.preemptions_per_minute,
        )
        yield GaugeMetricFamily(
            "sluice_gate_retry_budget_ratio",
            "Share of the work that retries may take where room is short (admission.retryBudgetPercent).",
            value=admission.retry_budget_percent / 100,
        )
