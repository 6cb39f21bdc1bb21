"""Every expression of the dashboards, asked of a Prometheus that scrapes a real gate, engine server and operator."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry

from charts.dashboards import FILES, expressions, filled, load, panels
from charts.helm import Helm
from charts.prometheus import Prometheus, prometheus
from charts.promtool import RULES, rules, series
from cluster.testnode import monitoring
from cluster.testnode.errors import Missing
from cluster.testnode.progress import Progress
from engine.serving import Served, served
from metric_lines import DOCS
from sidecar.running import RunningGate, running_gate
from sidecar.scripted_engine import ScriptedEngine
from sluice_operator.health import Health, application
from sluice_operator.metrics import HeartbeatCollector, Metrics

NAMES = [file.stem for file in FILES]
SCRAPE = "200ms"
INTERVAL = "10s"
PATIENCE_S = 60  # two scrapes are enough; two busy cores may take a while for them
ONE = {"namespace": "llm", "inferenceservice": "chat"}


@pytest.fixture
def programs() -> Path:
    try:
        return monitoring.ensure(Progress(sys.stderr))
    except Missing as missing:
        problem = f"the dashboards' test needs Prometheus: {missing}"
        if os.environ.get("CI") == "true":
            pytest.fail(problem)
        pytest.skip(problem)


@dataclass(frozen=True)
class Scene:
    """A service with traffic, and who watches it."""

    gate: RunningGate
    engine: Served
    operator: str

    async def traffic(self) -> None:
        """A request of every part that has a rate: chat at the gate, one in the engine, an unfit one."""
        async with self.gate.post(prompt="x") as answer:
            await answer.read()
        async with self.gate.post(max_tokens=10**6) as answer:
            await answer.read()
        await self.engine.post("/v1/completions", {"model": "tiny", "prompt": "say:abc and nothing", "max_tokens": 9})


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        scripted = await stack.enter_async_context(ScriptedEngine(tmp_path / "engine.sock").running())
        gate = await stack.enter_async_context(running_gate(scripted, tmp_path))
        engine = await stack.enter_async_context(served())
        registry = CollectorRegistry()
        metrics, health = Metrics(registry), Health(asyncio.get_running_loop().time)
        registry.register(HeartbeatCollector(health.ages))
        health.expect("resync", 60)
        metrics.tell_service("llm", "chat", available=True, settled=True, ready=1)
        metrics.leader.set(1)
        metrics.last_resync.set_to_current_time()
        server = await stack.enter_async_context(TestServer(application(health, registry)))
        yield Scene(gate, engine, f"{server.host}:{server.port}")


def config(scene: Scene) -> dict[str, Any]:
    def job(name: str, target: str, labels: dict[str, str]) -> dict[str, Any]:
        return {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target], "labels": labels}]}

    gate = scene.gate.admin_url.removeprefix("http://")
    pod = {**ONE, "pod": "chat-1"}
    engine = str(scene.engine.http._base_url).removeprefix("http://").rstrip("/")
    return {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
        "scrape_configs": [
            job("gate", gate, pod),
            job("engine", engine, pod),
            job("operator", scene.operator, {"namespace": "sluice-system", "pod": "operator-1"}),
        ],
    }


async def test_every_expression_has_an_answer(scene: Scene, programs: Path, tmp_path: Path) -> None:
    def silent(watcher: Prometheus) -> list[str]:
        return [
            f"{name}: {where}: {expression}"
            for name in NAMES
            for where, expression in expressions(name).items()
            if not watcher.query(filled(expression, INTERVAL))
        ]

    with prometheus(programs, tmp_path, config(scene), yaml.safe_load(RULES.read_text())) as watcher:
        deadline = time.monotonic() + PATIENCE_S
        while (missing := await asyncio.to_thread(silent, watcher)) and time.monotonic() < deadline:
            await scene.traffic()
        assert missing == []
        assert watcher.failed_rules() == []


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap_and_say_what_they_show(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in load(name)["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in load(name)["panels"]}) == len(load(name)["panels"])
    assert all(target["legendFormat"] for panel in panels(name) for target in panel["targets"])


@pytest.mark.parametrize("name", NAMES)
def test_panels_name_only_series_that_are_recorded_or_documented(name: str) -> None:
    known = {rule["record"] for rule in rules() if "record" in rule}
    known |= set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))

    for where, expression in expressions(name).items():
        assert series(expression) <= known, where


def test_the_chart_installs_each_dashboard_where_grafana_looks_for_it(helm: Helm) -> None:
    found = [one for one in helm.objects("--set=monitoring.dashboards.install=true") if one["kind"] == "ConfigMap"]

    assert [one["metadata"]["name"] for one in found] == [f"sluice-operator-dashboard-{name}" for name in NAMES]
    for one, file in zip(found, FILES, strict=True):
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["data"] == {f"sluice-{file.name}": file.read_text()}
    assert not [one for one in helm.objects() if one["kind"] == "ConfigMap"]
