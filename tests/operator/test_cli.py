"""The `sluice` command: answers, exit codes, and one line for what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import operator_scene as scene
from sluice_engine import codec
from sluice_engine.core.steptime import StepTable
from sluice_operator.cli import commands, main

SLUICE = str(Path(sys.executable).with_name("sluice"))
MINIMAL = str(scene.EXAMPLES / "minimal.yaml")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def manifest_file(tmp_path: Path) -> Any:
    def write(spec: dict[str, Any], name: str = "chat") -> str:
        document = {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {**scene.MINIMAL_SPEC, **spec},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("latency", "ceiling"),
    [
        pytest.param("150ms", 3428, id="3,428 tokens for 150 ms"),
        pytest.param("100ms", 2000, id="2,000 tokens for 100 ms"),
    ],
)
def test_check_derives_the_ceiling_of_the_planning_profile(
    capsys: pytest.CaptureFixture[str], manifest_file: Any, latency: str, ceiling: int
) -> None:
    code, out, _ = run(capsys, "check", "--json", manifest_file({"slo": {"interTokenLatency": latency}}))

    (verdict,) = json.loads(out)
    assert code == 0
    assert verdict["chunk_ceiling_tokens"] == verdict["prefill_chunk_tokens"] == ceiling
    assert verdict["feasible"]


def test_check_says_no_to_a_chunk_that_breaks_its_own_promise(
    capsys: pytest.CaptureFixture[str], manifest_file: Any
) -> None:
    code, out, _ = run(capsys, "check", manifest_file({"scheduling": {"prefillChunkTokens": 8192}}))

    assert code == 1
    assert out.startswith("chat: by the planning profile the promise cannot be kept\n")
    assert "8,192 tokens (is set); such a step takes 317 ms" in out
    assert "the least that would work is 317 ms" in out


def test_check_judges_a_block_where_not_even_that_keeps_the_promise(
    capsys: pytest.CaptureFixture[str], manifest_file: Any
) -> None:
    code, out, _ = run(capsys, "check", manifest_file({"slo": {"interTokenLatency": "25ms"}}))

    assert code == 1
    assert "16 tokens (one block, the least there is); such a step takes 31 ms" in out


def test_check_accepts_such_a_chunk_where_the_promise_is_only_observed(
    capsys: pytest.CaptureFixture[str], manifest_file: Any
) -> None:
    file = manifest_file({"scheduling": {"prefillChunkTokens": 8192}, "slo": {"enforcement": "Observe"}})

    code, out, _ = run(capsys, "check", file)

    assert code == 0
    assert "SLOFeasible would be False" in out


def test_check_says_no_when_one_of_several_breaks_its_promise(
    capsys: pytest.CaptureFixture[str], manifest_file: Any
) -> None:
    bad = manifest_file({"slo": {"interTokenLatency": "20ms"}}, name="tight")

    code, out, _ = run(capsys, "check", MINIMAL, bad)

    assert code == 1
    assert "chat: by the planning profile the promise can be kept" in out
    assert "tight: by the planning profile the promise cannot be kept" in out


ON_CPU = {"accelerator": {"count": 0}, "cache": {"capacity": "2Gi"}}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        pytest.param(
            {**ON_CPU, "resources": {"limits": {"memory": "1.5Gi"}}},
            ["limits.memory is 1,536 MiB", "862 MiB too little for", "cache.capacity 2,048 MiB + the engine"],
            id="the cache alone",
        ),
        pytest.param(
            {"cache": {"hostSwapCapacity": "8Gi"}, "resources": {"limits": {"memory": "4e9"}}},
            ["limits.memory is 3,815 MiB", "cache.hostSwapCapacity 8,192 MiB"],
            id="the place for preempted requests, beside a GPU",
        ),
        pytest.param({**ON_CPU, "resources": {"limits": {"memory": "3Gi"}}}, [], id="enough"),
        pytest.param({"cache": {"capacity": "2Gi"}, "resources": {"limits": {"memory": "1Gi"}}}, [], id="of a GPU's"),
        pytest.param(ON_CPU, [], id="no limit"),
    ],
)
def test_check_says_no_to_a_memory_limit_below_what_the_manifest_puts_there(
    capsys: pytest.CaptureFixture[str], manifest_file: Any, spec: dict[str, Any], says: list[str]
) -> None:
    slack = {"slo": {"timeToFirstToken": "60s", "interTokenLatency": "2s"}}

    code, out, _ = run(capsys, "check", manifest_file({**slack, **spec}))

    assert code == (1 if says else 0)
    assert all(words in out for words in says)
    assert ("limits.memory" in out) is bool(says)


def test_check_counts_the_files_of_another_engines_model_that_is_here(
    capsys: pytest.CaptureFixture[str], manifest_file: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2 << 30)
    other = {"runtime": {"type": "VLLM", "image": "vllm:1"}, "model": {"source": {"image": {"path": "/m"}}}}
    file = manifest_file({**ON_CPU, **other, "resources": {"limits": {"memory": "3Gi"}}})

    code, out, _ = run(capsys, "check", file, "--model", str(tmp_path), "--json")

    (verdict,) = json.loads(out)
    assert (code, verdict["fits"], verdict["memory"]["weights_bytes"]) == (1, False, 2 << 30)
    code, _, err = run(capsys, "check", file, "--model", str(tmp_path / "nowhere"))
    assert (code, "there is no model at" in err) == (2, True)


def test_check_says_that_the_planning_profile_is_an_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "check", MINIMAL)

    assert "an assumption, not a measurement of your machine; --table FILE judges by a measured one" in out
    assert "kept by `sluice run` in ~/.cache/sluice/step-times" in out


@pytest.fixture
def measured_table(tmp_path: Path) -> str:
    table = StepTable(
        decode_axis=(0, 1, 64),
        prefill_axis=(0, 1024, 4096),
        context_axis=(0, 1024),
        median_us=tuple(
            10_000 + 100 * prefill + (5_000 if decode else 0)
            for decode in (0, 1, 64)
            for prefill in (0, 1024, 4096)
            for _ in (0, 1024)
        ),
        tail_ratio=1.0,
        measured_on="a slow machine",
    )
    path = tmp_path / "table.json"
    path.write_text(codec.to_json(table))
    return str(path)


def test_check_judges_by_a_measured_table(
    capsys: pytest.CaptureFixture[str], manifest_file: Any, measured_table: str
) -> None:
    file = manifest_file({"slo": {"interTokenLatency": "150ms"}})

    code, out, _ = run(capsys, "check", "--table", measured_table, "--json", file)

    (verdict,) = json.loads(out)
    assert verdict["chunk_ceiling_tokens"] == 1350, "(150 − 15) ms at 0.1 ms a token"
    assert verdict["source"] == "measured: a slow machine"
    assert (code, verdict["feasible"], verdict["is_measured"]) == (0, True, True)


@pytest.mark.parametrize(
    ("promise", "set_chunk", "words"),
    [
        pytest.param(
            "150ms",
            None,
            ("3,428 prefill tokens", "440 ms alone in one step", "500 ms in 4 chunks", "540 ms"),
            id="150-ms",
        ),
        pytest.param("100ms", None, ("2,000 prefill tokens", "in 6 chunks"), id="100-ms"),
        pytest.param(
            "150ms", 8192, ("8,192 tokens (is set); such a step takes 317 ms", "cannot be kept"), id="chunk-8192"
        ),
    ],
)
def test_check_says_what_the_worked_example_computes(
    capsys: pytest.CaptureFixture[str], manifest_file: Any, promise: str, set_chunk: int | None, words: tuple[str, ...]
) -> None:
    scheduling = {} if set_chunk is None else {"prefillChunkTokens": set_chunk}

    _, out, _ = run(capsys, "check", manifest_file({"slo": {"interTokenLatency": promise}, "scheduling": scheduling}))

    assert all(word in out for word in words), out


def test_check_judges_by_the_table_that_an_engine_serves(
    capsys: pytest.CaptureFixture[str], manifest_file: Any, measured_table: str, tmp_path: Path
) -> None:
    served = tmp_path / "served.json"
    kept = json.loads(Path(measured_table).read_text())
    served.write_text(json.dumps({"promise_us": 150_000, "ceiling_tokens": {"1": 1350}, "table": kept}))

    _, out, _ = run(capsys, "check", "--table", str(served), "--json", manifest_file({}))

    assert json.loads(out)[0]["source"] == "measured: a slow machine"


def test_a_measured_table_is_no_assumption(capsys: pytest.CaptureFixture[str], measured_table: str) -> None:
    _, out, _ = run(capsys, "check", "--table", measured_table, MINIMAL)

    assert out.startswith("chat: the promise can be kept\n")
    assert "assumption" not in out


@pytest.mark.parametrize(
    "text", ["all:\n\ttrue\n", "[]", "{}", "[" * 100_000], ids=["no JSON", "a list", "no field", "deep"]
)
def test_a_file_that_is_no_table_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    table = tmp_path / "Makefile"
    table.write_text(text)

    code, out, err = run(capsys, "check", "--table", str(table), MINIMAL)

    assert (code, out) == (2, "")
    assert err.startswith(f"sluice: {table}: is no step table: ")
    assert err.count("\n") == 1


def test_check_tells_every_problem_of_every_file_and_judges_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, manifest_file: Any
) -> None:
    broken = manifest_file({"replicas": -1, "slo": {"targetPercent": 200}}, name="broken")
    missing = str(tmp_path / "missing.yaml")

    code, out, err = run(capsys, "check", missing, broken, MINIMAL)

    assert code == 2
    assert out.startswith("chat: by the planning profile the promise can be kept\n")
    lines = err.splitlines()
    assert lines[0] == f"sluice: {missing}: No such file or directory"
    assert [line.split(": ")[:4] for line in lines[1:]] == [
        ["sluice", broken, "InferenceService 'broken'", "spec.replicas"],
        ["sluice", broken, "InferenceService 'broken'", "spec.slo.targetPercent"],
    ]


def test_check_as_json_holds_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")

    code, out, _ = run(capsys, "check", "--json", missing, MINIMAL)

    refused, verdict = json.loads(out)
    assert code == 2
    assert refused == {
        "file": missing, "where": missing, "problems": ["No such file or directory"], "is_kept": False,
    }  # fmt: skip
    assert (verdict["file"], verdict["problems"], verdict["is_kept"]) == (MINIMAL, [], True)


@pytest.mark.parametrize("path", sorted(scene.EXAMPLES.glob("invalid-*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("command", ["check", "render"])
def test_a_manifest_that_breaks_a_rule_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], command: str, path: Path
) -> None:
    code, out, err = run(capsys, command, str(path))

    assert (code, out) == (2, "")
    assert err.startswith(f"sluice: {path}: InferenceService ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["check", "no-such-file.yaml"], "No such file", id="a file that is not there"),
        pytest.param(["check", str(scene.EXAMPLES)], "Is a directory", id="a folder"),
        pytest.param(["check"], "Missing argument", id="no file"),
        pytest.param(["check", "--tables", "x", MINIMAL], "No such option", id="an unknown option"),
        pytest.param(["check", "--table", "no-such-table", MINIMAL], "No such file", id="a table that is not there"),
        pytest.param(["check", "--table", MINIMAL, MINIMAL], "is not JSON", id="a table that is none"),
        pytest.param(["render", "--json"], "Missing argument", id="nothing to render"),
        pytest.param(["render", "--engine-image", "", MINIMAL], "'' is no name of an image", id="no image"),
        pytest.param(["render", "--gate-image", "a b", MINIMAL], "'a b' is no name", id="an image of two words"),
        pytest.param(["render", "--prometheus", "thanos:80", MINIMAL], "is no URL, as http", id="no URL"),
        pytest.param(["run", "--port", "70000", MINIMAL], "70000", id="a port that does not exist"),
        pytest.param(["no-such-command"], "No such command", id="an unknown command"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("sluice: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a: [", "is not YAML", id="no YAML"),
        pytest.param("", "holds no InferenceService", id="nothing"),
        pytest.param("kind: Pod\n", "holds no InferenceService", id="something else"),
        pytest.param(
            "kind: InferenceService\napiVersion: serving.kserve.io/v1\n", "no matches for kind", id="another's"
        ),
        pytest.param(
            "kind: InferenceService\napiVersion: sluice.dev/v1\n",
            'in version "sluice.dev/v1": this release has sluice.dev/v1alpha1',
            id="a version that is not",
        ),
        pytest.param(
            "kind: InferenceService\napiVersion: sluice.dev/v1alpha1\n", "metadata.name: Required", id="without a name"
        ),
        pytest.param(
            "kind: InferenceService\napiVersion: sluice.dev/v1alpha1\nmetadata: {name: a}\n",
            "spec",
            id="without a spec",
        ),
    ],
)
def test_what_is_no_manifest_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)

    code, _, err = run(capsys, "check", str(path))

    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_render_prints_what_would_be_applied(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "render", MINIMAL, "--namespace", "llm", "--engine-image", "mine:1")

    documents = list(yaml.safe_load_all(out))
    assert code == 0
    pods = ["ServiceAccount", "ConfigMap", "ConfigMap", "Service", "Deployment"]
    assert [one["kind"] for one in documents] == [*pods, "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"]
    assert {one["metadata"]["namespace"] for one in documents} == {"llm"}
    assert documents[4]["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"


def test_render_prints_the_autoscaler_where_it_knows_whom_keda_asks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "scaled.yaml"
    path.write_text(Path(MINIMAL).read_text("utf-8") + "  autoscaling: {maxReplicas: 3}\n", "utf-8")

    _, out, err = run(capsys, "render", str(path), "--prometheus", "http://p:9090")
    (scaled,) = [one for one in yaml.safe_load_all(out) if one["kind"] == "ScaledObject"]
    assert {one["metadata"]["serverAddress"] for one in scaled["spec"]["triggers"]} == {"http://p:9090"}
    assert err == ""

    code, out, err = run(capsys, "render", str(path))
    assert (code, "ScaledObject" in out) == (0, False)
    assert "spec.autoscaling: no ScaledObject is printed without --prometheus" in err


def test_render_as_json_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(capsys, "render", MINIMAL)
    _, document, _ = run(capsys, "render", MINIMAL, "--json")

    assert json.loads(document) == list(yaml.safe_load_all(text))


def test_the_list_of_commands_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")

    assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["check", "render", "run"])
def test_help_tells_the_exit_codes_and_how_to_read_standard_input(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    _, out, _ = run(capsys, command, "--help")

    assert "Exit codes: 0" in out
    assert '"-" is standard input' in " ".join(out.split())


def test_every_command_has_help_and_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    own = [entry for entry in importlib.metadata.entry_points(group=commands.GROUP) if "sluice_operator" in entry.value]

    assert {entry.name for entry in own} >= {"check", "render", "run"}
    for entry in own:
        code, out, _ = run(capsys, entry.name, "--help")
        assert code == 0
        assert "--json" in out


def test_run_refuses_a_file_with_two_services(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(f"{Path(MINIMAL).read_text()}\n---\n{Path(MINIMAL).read_text()}")

    code, _, err = run(capsys, "run", str(path))

    assert code == 2
    assert "one can be run at a time" in err


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run([SLUICE, "render", MINIMAL], stdout=full, stderr=subprocess.PIPE, check=False)

    assert done.returncode == 2
    assert done.stderr.decode() == "sluice: No space left on device\n"


def test_a_reader_that_has_had_enough_is_no_traceback() -> None:
    with subprocess.Popen([SLUICE, "render", MINIMAL], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""

    assert process.returncode == 1


def test_ctrl_c_while_a_command_is_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sluice_operator.cli.commands", raising=False)
    monkeypatch.delattr("sluice_operator.cli.commands", raising=False)

    def interrupt(name: str, *_: object) -> None:
        if name == "sluice_operator.cli.commands":
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupt), *sys.meta_path])

    assert main.run(["check", MINIMAL]) == 130
