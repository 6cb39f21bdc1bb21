"""From a scrape to the webhook: the documented configuration, the chart's own rules, a real storm and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from charts.prometheus import Prometheus, prometheus
from cluster.service.alerting import alertmanager, webhook
from cluster.service.release import CHART, Release
from cluster.service.space import KIND, PATIENCE_S, Space
from cluster.service.streams import client, stream
from cluster.testnode import monitoring
from cluster.testnode.cluster import Cluster, Object
from cluster.testnode.progress import Progress

pytestmark = pytest.mark.cluster

DOCS = CHART.parents[1] / "docs/monitoring.md"
STORM = "SluicePreemptionStorm"


def documented(node: Cluster, folder: Path, receiver: str) -> dict[str, Any]:
    """The configuration that the docs show, faster.

    Debian's build knows no `kubernetes_sd_configs`: a file has what the API server would have told, and everything
    after that, the relabeling, is the docs' own.
    """
    (block,) = re.findall(r"```yaml\n(rule_files.*?)```", DOCS.read_text(), re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(block)
    config["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
    (folder / "pods.json").write_text(json.dumps([target for pod in node.list("pods") for target in discovered(pod)]))
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [{"files": ["pods.json"]}]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [receiver]}]}] if receiver else []
    return config


def discovered(pod: Object) -> list[dict[str, Any]]:
    """A target for each port of each container, init containers too, as Prometheus finds them in the role `pod`."""
    metadata, meta = pod["metadata"], "__meta_kubernetes"
    labels = {f"{meta}_namespace": metadata["namespace"], f"{meta}_pod_name": metadata["name"]}
    for key, value in metadata.get("labels", {}).items():
        name = re.sub(r"[^a-zA-Z0-9_]", "_", key)
        labels |= {f"{meta}_pod_label_{name}": value, f"{meta}_pod_labelpresent_{name}": "true"}
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {**labels, f"{meta}_pod_container_port_name": port.get("name", "")},
        }
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
        for port in container.get("ports", ())
        if "podIP" in pod["status"]
    ]


def rules(node: Cluster, *values: str) -> dict[str, Any]:
    """What the chart would install as a PrometheusRule."""
    words = ["--set=monitoring.rules.install=Enabled", "--show-only=templates/prometheusrule.yaml", *values]
    spec: dict[str, Any] = yaml.safe_load(node.helm("template", "sluice", str(CHART), *words))["spec"]
    return spec


@contextmanager
def watching(node: Cluster, folder: Path, receiver: str = "", *values: str) -> Iterator[Prometheus]:
    """A Prometheus that watches the node as the docs say."""
    programs = monitoring.ensure(Progress(sys.stderr))
    with prometheus(programs, folder, documented(node, folder, receiver), rules(node, *values)) as watcher:
        yield watcher


def test_the_documented_configuration_scrapes_gates_and_operator_with_the_labels_that_rules_need(
    space: Space, tmp_path: Path
) -> None:
    space.serve(space.tiny("watched"))
    one = f'namespace="{space.name}", inferenceservice="watched"'

    with watching(space.node, tmp_path) as watcher:

        def seen(expression: str) -> bool:
            return bool(watcher.query(expression))

        space.node.wait_for("series of the gate", lambda: seen(f"sluice:objective:ratio{{{one}}} == 0.99"))
        space.node.wait_for("series of the engine", lambda: seen(f"sluice_engine_kv_blocks{{{one}}} > 0"))
        space.node.wait_for("series of the operator", lambda: seen(f"sluice_operator_service_available{{{one}}} == 1"))
        space.node.wait_for("it to settle", lambda: seen(f"sluice_operator_service_settled{{{one}}} == 1"))
        assert watcher.query('count(up{job="sluice-operator"} == 1)')
        assert watcher.query('sluice_operator_leader{namespace!=""} == 1')
        assert watcher.failed_rules() == []
        # What is absent before the first scrape is pending until the next look.
        silent = f'ALERTS{{{one}}} or ALERTS{{alertname=~"SluiceOperatorDown|SluiceWatchSilent"}}'
        space.node.wait_for("no alert to be pending", lambda: not seen(silent))


@asynccontextmanager
async def load(url: str, clients: int) -> AsyncIterator[None]:
    """That many clients, each of which asks for a long answer again and again, whatever becomes of it."""

    async def go_on(who: openai.AsyncOpenAI) -> None:
        while True:
            with contextlib.suppress(openai.APIError):
                await stream(who, "tiny", "word " * 20, max_tokens=200)
            await asyncio.sleep(0.2)  # a refused one comes back, as SDKs do

    async with client(url) as who:
        tasks = [asyncio.create_task(go_on(who)) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.full
async def test_a_preemption_storm_wakes_somebody_and_the_runbooks_remedy_ends_it(space: Space, tmp_path: Path) -> None:
    """A gate that only observes lets in more than the pool holds; `admission.mode: Enforce` is what the page says."""
    url = await asyncio.to_thread(
        space.serve, space.tiny("stormy", cache={"capacity": "192Ki"}, admission={"mode": "Observe"})
    )
    shorter = f"--set=monitoring.rules.overrides.{STORM}.for=10s"

    with (
        webhook() as (hook, at),
        alertmanager(monitoring.ensure(Progress(sys.stderr)), tmp_path, at) as receiver,
        watching(space.node, tmp_path, receiver, shorter) as watcher,
    ):

        async def until(what: str, status: str) -> list[dict[str, Any]]:
            await asyncio.to_thread(space.node.wait_for, what, lambda: hook.delivered(STORM, status), PATIENCE_S)
            return hook.delivered(STORM, status)

        async with load(url, clients=16):
            (fired, *_) = await until("the alert at the webhook", "firing")
            assert watcher.query('sluice:preemptions_per_minute:avg2m{inferenceservice="stormy"} > 6')
            space.kubectl(
                "patch", f"{KIND}/stormy", "--type=merge", "-p", '{"spec": {"admission": {"mode": "Enforce"}}}'
            )
            await until("its end at the webhook", "resolved")

        assert fired["labels"]["namespace"] == space.name
        assert fired["labels"]["inferenceservice"] == "stormy"
        assert fired["labels"]["severity"] == "critical"
        assert f"{space.name}/stormy" in fired["annotations"]["summary"]
        assert (CHART.parents[1] / fired["annotations"]["runbook"]).is_file()


# What a command may say on a healthy node that has no Prometheus Operator and no operator that has crashed.
HEALTHY = re.compile(r"previous terminated container|doesn't have a resource type \"podmonitors\"")


@pytest.mark.full
def test_the_commands_of_every_runbook_work_as_they_stand(release: Release, space: Space) -> None:
    space.serve(space.tiny("night"))
    broken = []
    for page in sorted((DOCS.parent / "runbooks").glob("*.md")):
        text = page.read_text()
        of_the_operator = "`NAMESPACE` is where the operator was installed" in text
        where = {"NAMESPACE": release.namespace} if of_the_operator else {"NAMESPACE": space.name, "SERVICE": "night"}
        for line in text.partition("```sh\n")[2].partition("\n```")[0].splitlines():
            words = ["bash", "-u", "-o", "pipefail", "-c", line]
            done = subprocess.run(
                words, env={**os.environ, **where}, capture_output=True, text=True, check=False, timeout=60
            )
            if not (done.returncode == 0 and done.stdout.strip()) and not HEALTHY.search(done.stderr):
                broken.append(f"{page.stem}: {line}: {done.returncode} {done.stdout[-200:]} {done.stderr[-300:]}")
    assert broken == []
