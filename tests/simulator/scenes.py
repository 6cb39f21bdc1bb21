"""Scenarios for the tests: small ones, and what to change in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from sluice_simulator import report, scenario
from sluice_simulator.report import Json
from sluice_simulator.run import Finished, run

Document = dict[str, Any]

SMALL: Document = {
    "name": "small",
    "seed": 7,
    "duration": "20s",
    "service": {"spec": {"slo": {"timeToFirstToken": "2s", "interTokenLatency": "150ms"}}},
    "machine": {"kvCapacityTokens": 65536},
    "loads": [
        {
            "name": "chat",
            "arrivals": {"poisson": {"requestsPerSecond": 4}},
            "promptTokens": {"mean": 300},
            "outputTokens": {"mean": 40},
        }
    ],
}


def document(**changes: Any) -> Document:
    """The small scenario, some of its keys changed: `a__b__0__c=value` sets a.b[0].c."""
    settings = [(key.replace("__", "."), value) for key, value in changes.items()]
    return scenario.with_settings(copy.deepcopy(SMALL), settings, "small.yaml")


def outcome(changed: Document, folder: Path | None = None) -> Finished:
    """What comes of it."""
    path = str((folder or Path()) / "small.yaml")
    return run(scenario.parse(changed, path))


def found(changed: Document, folder: Path | None = None) -> Json:
    """Its report."""
    return report.document(outcome(changed, folder))
