"""What KEDA asks of Prometheus: pods' worth of work, by a real promtool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import operator_scene as scene
from charts.promtool import Promtool
from sluice_operator.rendering.autoscale import scaled_object
from sluice_operator.resource.spec import Autoscaling

OURS = 'namespace="llm",inferenceservice="chat"'
PODS = (f'{OURS},pod="a"', f'{OURS},pod="b"')


@pytest.fixture(scope="module")
def queries() -> dict[str, str]:
    made = scaled_object(scene.spec(), Autoscaling(min_replicas=1, max_replicas=9), "http://prometheus:9090")
    return {trigger["name"]: trigger["metadata"]["query"] for trigger in made["spec"]["triggers"]}


def counter(name: str, labels: str, per_minute: int) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": f"0+{per_minute}x20"}


def tokens(per_minute: int) -> list[dict[str, str]]:
    """What each of two pods is asked for: half of it is let in, half is shed, and all of it is sent once more."""
    name = "sluice_gate_demand_tokens_total"
    verdicts = [
        counter(name, f'{pod},verdict="{verdict}",attempt="first"', per_minute // 2)
        for pod in PODS
        for verdict in ("admitted", "shed")
    ]
    return [*verdicts, *(counter(name, f'{pod},verdict="shed",attempt="retry"', per_minute) for pod in PODS)]


def capacity(values: str) -> list[dict[str, str]]:
    return [{"series": f"sluice_gate_capacity_tokens_per_second{{{pod}}}", "values": values} for pod in PODS]


OTHERS = [counter("sluice_gate_demand_tokens_total", 'namespace="llm",inferenceservice="other",attempt="first"', 10**9)]


def asked(promtool: Promtool, folder: Path, query: str, series: list[dict[str, str]], expected: float | None) -> None:
    samples = [] if expected is None else [{"labels": "{}", "value": expected}]
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": f"round({query}, 0.01)", "eval_time": "15m", "exp_samples": samples}],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = promtool.run("test", "rules", folder / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        # 2 × 6,000 tokens a minute are 200 a second.
        pytest.param([*tokens(6000), *capacity("50x20"), *OTHERS], 4, id="what is shed asks for pods, retries do not"),
        pytest.param([*tokens(6000), *capacity("50x8 _x12")], 4, id="what a pod can do is remembered for a while"),
        pytest.param([*tokens(0), *capacity("50x20")], 0, id="no traffic asks for none"),
        pytest.param(tokens(0), 0, id="nor before any traffic"),
        pytest.param(OTHERS, None, id="nothing known is no answer, by which nothing is changed"),
    ],
)
def test_tokens_ask_for_pods(
    promtool: Promtool, tmp_path: Path, queries: dict[str, str], series: list[dict[str, str]], expected: float | None
) -> None:
    asked(promtool, tmp_path, queries["tokens"], series, expected)


def test_blocks_ask_for_pods(promtool: Promtool, tmp_path: Path, queries: dict[str, str]) -> None:
    name = "sluice_gate_demand_block_seconds_total"
    # 2 × 45,000 block-seconds a minute are 1,500 blocks, of pods that have 1,000.
    series = [counter(name, f'{pod},verdict="admitted",attempt="first"', 45_000) for pod in PODS]
    series += [{"series": f"sluice_engine_kv_blocks{{{pod}}}", "values": "1000x20"} for pod in PODS]

    asked(promtool, tmp_path, queries["blocks"], series, 1.5)
