"""The alerts: each fires when it should and not otherwise, names metrics that exist, and has a page for the night."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.helm import ROOT
from charts.promtool import RULES, Promtool, alerts, rules, series
from metric_lines import DOCS

CASES = Path(__file__).parent / "rules"
RUNBOOKS = ROOT / "docs/runbooks"
NAMES = sorted({rule["alert"] for rule in alerts()})
OF_THE_OPERATOR = {"SluiceOperatorDown", "SluiceWatchSilent"}


def test_prometheus_accepts_the_rules(promtool: Promtool) -> None:
    done = promtool.run("check", "rules", RULES)

    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_not_otherwise(promtool: Promtool) -> None:
    done = promtool.run("test", "rules", *sorted(CASES.glob("*.yaml")))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_must_not(name: str) -> None:
    cases = yaml.safe_load((CASES / f"{name}.yaml").read_text())["tests"]

    fires = {case["name"] for case in cases if expected(case)}
    must_not = {case["name"] for case in cases if not expected(case)}
    assert fires
    assert all(re.match("fires|warns", title) for title in fires)
    assert must_not
    assert all(title.startswith("must not fire") for title in must_not)


def expected(case: dict[str, Any]) -> list[Any]:
    """What a case expects to fire at some time."""
    firing = [alert for test in case.get("alert_rule_test", []) for alert in test["exp_alerts"]]
    return firing + [sample for test in case.get("promql_expr_test", []) for sample in test["exp_samples"]]


def test_every_window_of_a_burn_rate_is_seen_to_fire() -> None:
    for name in ("SluiceTTFTPromiseBurning", "SluiceITLPromiseBurning"):
        declared = {rule["labels"]["window"] for rule in alerts() if rule["alert"] == name}
        said = (CASES / f"{name}.yaml").read_text()
        seen = set(re.findall(r'labels: \'\{severity="\w+", window="(\w+)"\}', said))
        assert seen == declared == {"1h", "6h", "1d", "3d"}


def test_every_series_that_a_rule_names_is_recorded_or_documented() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))

    for rule in rules():
        unknown = series(rule["expr"]) - recorded - documented
        assert not unknown, f"{rule.get('alert', rule.get('record'))} names {unknown}"
    assert recorded <= {name for rule in rules() for name in series(rule["expr"])} | ON_DASHBOARDS


ON_DASHBOARDS = {"sluice:good_requests:rate5m", "sluice:load:ratio"}


@pytest.mark.parametrize(
    "rule", alerts(), ids=lambda rule: f"{rule['alert']} {rule['labels'].get('window', '')}".strip()
)
def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    said = rule["annotations"]

    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert said.keys() == {"summary", "description", "runbook"}
    assert said["runbook"] == f"docs/runbooks/{rule['alert']}.md"
    if rule["alert"] not in OF_THE_OPERATOR:
        for text in (said["summary"], said["description"]):
            assert "$labels.namespace" in text
            assert "$labels.inferenceservice" in text


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    assert sorted(page.stem for page in RUNBOOKS.glob("Sluice*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_starts_with_three_commands_and_goes_on_to_the_remedy(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    title, _, rest = text.partition("\n\n```sh\n")
    block, _, after = rest.partition("\n```\n")

    assert title == f"# {name}"
    commands = block.split("\n")
    assert len(commands) == 3
    assert all(command.startswith("kubectl ") for command in commands)
    headings = re.findall(r"^## (.*)$", after, re.MULTILINE)
    assert headings == ["What it means", "Likely causes, and what to do", "When it is over"]
    assert len(text.split()) < 500, "too long for two in the morning"


def test_a_page_names_only_metrics_that_exist() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))

    for page in RUNBOOKS.glob("*.md"):
        for name in re.findall(r"`(sluice_[a-z_]+)(?:\{[^}]*\})?`", page.read_text()):
            assert name in documented, f"{page.name} names {name}"


def test_every_alert_has_its_line_in_the_docs() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    lines = dict(re.findall(r"^\| \[`(\w+)`\]\(runbooks/\1\.md\) \| ([\w, ]+) \|", page, re.MULTILINE))

    severities = {name: {rule["labels"]["severity"] for rule in alerts() if rule["alert"] == name} for name in NAMES}
    assert {name: set(words.split(", ")) for name, words in lines.items()} == severities
