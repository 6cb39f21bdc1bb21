"""The operator's page and docs/metrics.md say the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metric_lines import check
from sluice_operator.health import Health
from sluice_operator.metrics import HeartbeatCollector, Metrics


def test_every_series_has_its_line_with_type_and_labels_and_no_line_is_stale() -> None:
    registry, health = CollectorRegistry(), Health(lambda: 0.0)
    metrics = Metrics(registry)
    registry.register(HeartbeatCollector(health.ages))
    health.expect("resync", 60)
    metrics.tell_service("llm", "chat", available=True, settled=True, ready=1)
    metrics.watch_restarts.labels("Pod").inc()

    families = [
        family
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        if not family.name.endswith("_created")
    ]

    check(
        "Operator",
        "sluice_operator_",
        families,
        {
            "namespace": frozenset({"llm"}),
            "inferenceservice": frozenset({"chat"}),
            "heartbeat": frozenset({"resync"}),
            "kind": frozenset({"Pod"}),
        },
    )
