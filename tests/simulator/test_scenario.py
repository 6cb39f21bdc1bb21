"""Scenario files: what is read from them, and one line for everything that is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.scenes import SMALL, document
from sluice_engine.core.link import Link
from sluice_operator.cli import main
from sluice_simulator import scenario
from sluice_simulator.errors import InvalidInput
from sluice_simulator.traces import MOST_TRACE_TOKENS

ROOT = Path(__file__).resolve().parents[2]
POISSON = "loads__0__arrivals__poisson__requestsPerSecond"


def problem_of(changed: dict[str, Any], path: str = "small.yaml") -> str:
    with pytest.raises(InvalidInput) as raised:
        scenario.parse(changed, path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"machine__speed": 3}, "machine.speed: is not a known key", id="unknown-key"),
        pytest.param({"service": {"slo": {}}}, "service.slo: is not a known key", id="unknown-key-of-the-service"),
        pytest.param({"scheduling__chunk": 3}, 'service: unknown field "spec.scheduling.chunk"', id="unknown-field"),
        pytest.param({"loads__0__color": 3}, "loads[0].color: is not a known key", id="unknown-key-of-a-load"),
        pytest.param({"loads": []}, "loads: must be a list of at least one", id="no-load"),
        pytest.param({"duration": None}, "duration: is missing", id="a-stream-without-an-end"),
        pytest.param({"duration": "0s"}, "duration: must be positive, not 0s", id="no-time-at-all"),
        pytest.param({"duration": "-3s"}, "duration: '-3s' is no duration", id="negative-time"),
        pytest.param({"duration": 5}, "duration: must be a duration such as 150ms, not 5", id="a-bare-number"),
        pytest.param({"warmup": 0}, "warmup: must be a duration such as 150ms, not 0", id="a-bare-zero"),
        pytest.param({"warmup": "20s"}, "warmup: must end before", id="nothing-but-warm-up"),
        pytest.param({"seed": -1}, "seed: must be 0 to", id="negative-seed"),
        pytest.param({"seed": 1.5}, "seed: must be a whole number, not 1.5", id="half-a-seed"),
        pytest.param(
            {POISSON: 0},
            "loads[0].arrivals.poisson.requestsPerSecond: must be 0.000001 to 100,000",
            id="nothing-arrives",
        ),
        pytest.param(
            {"loads__0__arrivals": {"poisson": {"requestPerSecond": 4}}},
            "poisson.requestsPerSecond: is missing; there is requestPerSecond, which is not known",
            id="a-misspelt-key",
        ),
        pytest.param({POISSON: -4}, "loads[0].arrivals.poisson.requestsPerSecond: must be", id="negative-rate"),
        pytest.param(
            {POISSON: float("nan")}, "loads[0].arrivals.poisson.requestsPerSecond: must be a number", id="NaN"
        ),
        pytest.param({POISSON: True}, "loads[0].arrivals.poisson.requestsPerSecond: must be a number", id="truth"),
        pytest.param({"loads__0__arrivals": {}}, "loads[0].arrivals: must name exactly one of", id="no-arrivals"),
        pytest.param(
            {"loads__0__arrivals__closedLoop": {"clients": 1}}, "loads[0].arrivals: must name exactly one of", id="two"
        ),
        pytest.param({"machine__kvCapacityTokens": 0}, "machine.kvCapacityTokens: must be 16 to", id="zero-capacity"),
        pytest.param({"machine__kvCapacityTokens": 15}, "machine.kvCapacityTokens: must be 16 to", id="half-a-block"),
        pytest.param({"machine__kvBytesPerToken": 0}, "machine.kvBytesPerToken: must be 1 to", id="state-of-no-size"),
        pytest.param(
            {"machine__link": {"outNanosecondsPerBlock": 0}},
            "machine.link.outNanosecondsPerBlock: must be 1 to",
            id="a-link-that-takes-no-time",
        ),
        pytest.param(
            {"loads__0__promptTokens": {"distribution": "Fixed", "tokens": 1_000_000}},
            "loads[0].promptTokens.tokens: must be 1 to 32,767, not 1,000,000",
            id="a-million-token-prompt",
        ),
        pytest.param(
            {"loads__0__promptTokens": {"mean": 100, "most": 32_000}, "loads__0__outputTokens": {"mean": 1000}},
            "loads[0].promptTokens: prompts of 32,000 tokens and answers of 20,000 do not fit",
            id="prompt-and-answer-beyond-the-model",
        ),
        pytest.param(
            {"loads__0__promptTokens": {"least": 9, "most": 8}},
            "loads[0].promptTokens.most: must be at least 9",
            id="most",
        ),
        pytest.param({"loads__0__deadline": "0s"}, "loads[0].deadline: must be positive, not 0s", id="past-deadline"),
        pytest.param(
            {"loads__0__deadline": "1s", "loads__0__firstTokenDeadline": "2s"},
            "loads[0].firstTokenDeadline: must not be later than deadline",
            id="first-token-after-the-end",
        ),
        pytest.param(
            {"loads__0__retries__budgetPercent": 0}, "loads[0].retries.budgetPercent: 0 allows no retry", id="budgets"
        ),
        pytest.param(
            {"loads__0__retries__longest": "1ms"}, "loads[0].retries.longest: must not be shorter", id="backoff-shrinks"
        ),
        pytest.param({"loads__0__class": "vip"}, "loads[0].class: must be one of critical,", id="unknown-class"),
        pytest.param({"router": "Random"}, "router: must be one of RoundRobin, LeastLoaded", id="unknown-router"),
        pytest.param(
            {"scheduling__tokenBudget": 64, "scheduling__prefillChunkTokens": 128},
            "service: spec.scheduling.tokenBudget: Invalid value",
            id="contradictory-budgets",
        ),
        pytest.param({"replicas": 0}, "service: spec.replicas", id="no-replica"),
        pytest.param(
            {"machine__stepTimes__table": "none.json"}, "none.json: No such file or directory", id="no-such-table"
        ),
    ],
)
def test_a_broken_scenario_is_refused_in_one_line_with_file_and_key(changes: dict[str, Any], problem: str) -> None:
    text = problem_of(document(**changes))

    assert text.startswith(("small.yaml: ", "none.json: "))
    assert problem in text


def test_the_host_pool_is_what_fits_into_the_service_s_host_memory_over_a_planned_or_a_measured_link() -> None:
    planned = scenario.parse(document(cache__hostSwapCapacity="1Gi"), "small.yaml").machine
    measured = scenario.parse(
        document(
            cache__hostSwapCapacity="1Gi",
            machine__kvBytesPerToken=65_536,
            machine__link={"fixedMicroseconds": 7, "outNanosecondsPerBlock": 8, "inNanosecondsPerBlock": 9},
        ),
        "small.yaml",
    ).machine
    without = scenario.parse(document(), "small.yaml").machine

    assert planned.num_host_blocks == (1 << 30) // (16 * 320 * 1024)
    assert planned.link == Link(0, 100_000, 100_000), "5 MiB at 52.4 GB/s"
    assert (measured.num_host_blocks, measured.link) == (1024, Link(7, 8, 9))
    assert (without.num_host_blocks, without.link) == (0, None)


def test_two_loads_need_two_names() -> None:
    changed = document()
    changed["loads"] *= 2

    assert "loads: two are named chat" in problem_of(changed)


def test_a_trace_is_refused_where_a_request_can_never_fit(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,{MOST_TRACE_TOKENS},10\n"
    )
    trace = {"format": "Azure", "file": "trace.csv"}
    changed = document(loads__0__arrivals={"trace": trace}, duration=None)
    for key in ("promptTokens", "outputTokens"):
        del changed["loads"][0][key]

    text = problem_of(changed, str(tmp_path / "small.yaml"))

    assert text.startswith(f"{tmp_path}/trace.csv: line 2: a request of 1,000,009 tokens can never fit")
    trace["tooLong"] = "Send"
    assert scenario.parse(changed, str(tmp_path / "small.yaml")).end_us == 1


def test_lengths_beside_a_trace_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,10,10\n")
    changed = document(loads__0__arrivals={"trace": {"format": "Azure", "file": "trace.csv"}}, duration=None)

    assert "loads[0].outputTokens: is not a known key" in problem_of(changed, str(tmp_path / "small.yaml"))


def test_a_setting_changes_the_spec_or_the_scenario() -> None:
    changed = document(scheduling__prefillChunkTokens=512, spec__replicas=3, seed=9)
    parsed = scenario.parse(changed, "small.yaml")

    assert parsed.spec.live.scheduling.prefill_chunk_tokens == 512
    assert parsed.spec.replicas == 3
    assert parsed.seed == 9
    assert SMALL["seed"] == 7, "the document itself is left alone"


@pytest.mark.parametrize("key", ["loads.7.name", "loads.x.name", "seed.a", "a..b"])
def test_a_setting_that_leads_nowhere_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match=r"--set|must be a whole number, not a mapping"):
        scenario.parse(scenario.with_settings(SMALL, [(key, 1)], "small.yaml"), "small.yaml")


def test_a_scenario_may_name_a_manifest_and_change_it(tmp_path: Path) -> None:
    manifest = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": {"image": {"path": "/m"}}}, "slo": {"interTokenLatency": "70ms"}},
    }
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(manifest))
    path = str(tmp_path / "small.yaml")
    changed = {**SMALL, "service": {"file": "chat.yaml"}}

    read = scenario.parse(changed, path)
    slower = scenario.parse(scenario.with_settings(changed, [("slo.interTokenLatency", "80ms")], path), path)

    assert read.spec.live.slo.inter_token_latency_us == 70_000
    assert slower.spec.live.slo.inter_token_latency_us == 80_000
    assert read.spec.name == slower.spec.name == "chat"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("", "must hold one mapping", id="empty"),
        pytest.param("- a", "must hold one mapping", id="a-list"),
        pytest.param("a: .nan", "is out of the range of numbers", id="NaN"),
        pytest.param("a: 1\na: 2", 'key "a" is set twice', id="twice"),
        pytest.param("a: [", "is not YAML: line 1, column 5", id="no-YAML"),
        pytest.param("name: x", "loads: must be a list", id="no-loads"),
    ],
)
def test_the_command_refuses_a_broken_file_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    code = main.run(["simulate", str(path)])

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith(f"sluice: {path}: ")
    assert captured.err.count("\n") == 1
    assert problem in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "seed"],
        ["--set", "a=["],
        ["--sweep", "seed="],
        ["--sweep", "seed"],
        ["--sweep", "replicas=4..1"],
        ["--sweep", "seed=1,"],
        ["--html", ""],
        ["--plot", ""],
    ],
)
def test_the_command_refuses_a_broken_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))

    assert main.run(["simulate", str(path), *arguments]) == 2
    assert capsys.readouterr().err.startswith("sluice: Invalid value for ")


@pytest.mark.parametrize("path", sorted((ROOT / "docs/scenarios").glob("*.yaml")), ids=lambda path: path.name)
def test_the_scenarios_of_the_documentation_are_whole(path: Path) -> None:
    parsed = scenario.load_document(str(path))

    if not any("trace" in load["arrivals"] for load in parsed["loads"]):
        scenario.parse(parsed, str(path))


def test_the_page_shows_every_key_of_a_scenario() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/simulator.md").read_text(), re.DOTALL)
    document = yaml.safe_load(shown)
    del document["machine"]["stepTimes"]  # names a file that is not here

    parsed = scenario.parse(document, "docs/simulator.md")

    assert set(document) == set(scenario.KEYS)
    assert parsed.loads[0].client.retries.budget_percent == 20
