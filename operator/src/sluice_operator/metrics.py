"""The operator's own metrics, `sluice_operator_*`; docs/metrics.md describes each. The registry comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_Told = tuple[bool, bool, int]
_SERVICE = (
    ("sluice_operator_service_available", "1 while some pod takes requests, or none is wanted."),
    (
        "sluice_operator_service_settled",
        "1 while every wanted pod is of the newest revision, serves and obeys the newest promise.",
    ),
    ("sluice_operator_service_ready_replicas", "Pods that take requests."),
)


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
        self.requests = Counter(
            "sluice_operator_api_requests_total",
            "Requests to the API server by method, those that follow the InferenceServices left out.",
            ["method"],
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
        self.leader = Gauge(
            "sluice_operator_leader", "1 in the process that acts, 0 in one that stands by.", registry=registry
        )
        self.last_resync = Gauge(
            "sluice_operator_last_resync_timestamp_seconds", "When everything was last listed anew.", registry=registry
        )
        self._told: dict[tuple[str, str], _Told] = {}
        registry.register(_ServiceCollector(self._told))
        for outcome in ("ok", "refused", "failed"):
            self.reconciles.labels(outcome)
        for outcome in ("ok", "unanswered"):
            self.gate_polls.labels(outcome)
        for what in ("apply", "delete", "status", "event"):
            self.writes.labels(what)

    def tell_service(self, namespace: str, name: str, *, available: bool, settled: bool, ready: int) -> None:
        """What was last seen of one service."""
        self._told[namespace, name] = available, settled, ready

    def forget_service(self, namespace: str, name: str) -> None:
        """The service is gone: its last values must not outlive it."""
        self._told.pop((namespace, name), None)


class _ServiceCollector(Collector):
    """What was last seen of each service: made when it is asked for, since a gauge for each is kilobytes."""

    def __init__(self, told: Mapping[tuple[str, str], _Told]) -> None:
        self._told = told

    def collect(self) -> Iterator[Metric]:
        """Three families."""
        families = [GaugeMetricFamily(name, text, labels=["namespace", "inferenceservice"]) for name, text in _SERVICE]
        for place, values in self._told.items():
            for family, value in zip(families, values, strict=True):
                family.add_metric(place, value)
        yield from families


class HeartbeatCollector(Collector):
    """How long each loop and watch has been silent, and how long it may be."""

    def __init__(self, ages: Callable[[], Iterable[tuple[str, float, float]]]) -> None:
        self._ages = ages

    def collect(self) -> Iterator[Metric]:
        """Two families."""
        age = GaugeMetricFamily(
            "sluice_operator_heartbeat_age_seconds", "Since the last sign of life.", labels=["heartbeat"]
        )
        limit = GaugeMetricFamily(
            "sluice_operator_heartbeat_limit_seconds", "What its age may reach.", labels=["heartbeat"]
        )
        for name, age_s, limit_s in self._ages():
            age.add_metric([name], age_s)
            limit.add_metric([name], limit_s)
        yield age
        yield limit
