"""The operator's own metrics, `sluice_operator_*`; docs/metrics.md describes each. The registry comes in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters and gauges of one operator process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter(
            "sluice_operator_reconciles_total", "Reconciles by outcome.", ["outcome"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "sluice_operator_reconcile_seconds",
            "Duration of a reconcile.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.writes = Counter(
            "sluice_operator_api_writes_total",
            "Writes to the API server by what was written.",
            ["what"],
            registry=registry,
        )
        self.services = Gauge("sluice_operator_services", "InferenceServices that are looked after.", registry=registry)
        self.not_ready = Gauge(
            "sluice_operator_services_not_ready",
            "InferenceServices whose Ready condition is not True.",
            registry=registry,
        )
        self.gate_polls = Counter(
            "sluice_operator_gate_polls_total", "Reads of a pod's state by outcome.", ["outcome"], registry=registry
        )
        self.watch_restarts = Counter(
            "sluice_operator_watch_restarts_total", "Watches that broke and began anew.", ["kind"], registry=registry
        )
        self.last_reconcile = Gauge(
            "sluice_operator_last_reconcile_timestamp_seconds", "When a reconcile last succeeded.", registry=registry
        )
        self.last_resync = Gauge(
            "sluice_operator_last_resync_timestamp_seconds", "When everything was last listed anew.", registry=registry
        )
        for outcome in ("ok", "refused", "failed"):
            self.reconciles.labels(outcome)
        for outcome in ("ok", "unanswered"):
            self.gate_polls.labels(outcome)
        for what in ("apply", "delete", "status", "event"):
            self.writes.labels(what)
