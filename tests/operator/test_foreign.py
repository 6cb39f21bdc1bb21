"""Another engine behind the gate: its flags, what it is refused for, and what its container gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import foreign_scene
import operator_scene as scene
from foreign_scene import HUB, foreign
from sluice_engine import codec
from sluice_operator.cli import main
from sluice_operator.errors import InvalidSpec
from sluice_operator.rendering.files import Paths, files
from sluice_operator.rendering.foreign.runtime import command
from sluice_operator.rendering.render import objects
from sluice_sidecar.config import GateConfig

KEPT: dict[str, Any] = json.loads((Path(__file__).parent / "engine_flags.json").read_text())
COMMANDS = [(name, words) for name, lines in foreign_scene.commands().items() for words in lines]


def engine_of(runtime: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    items = objects(foreign(runtime, changes), scene.IMAGES)
    (deployment,) = [one for one in items if one["kind"] == "Deployment"]
    engine: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return engine


@pytest.mark.parametrize(("runtime", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_flag_is_one_of_the_engines_own_parser(runtime: str, words: list[str]) -> None:
    known = KEPT[runtime]
    for word in words:
        name, has_value, value = word.partition("=")
        if not name.startswith("--"):
            assert word == words[0], "the model"
        elif has_value:
            assert name in known["valued"]
            assert value in known["choices"].get(name, [value])
        else:
            assert name in known["switches"]


@pytest.mark.parametrize("runtime", sorted(KEPT))
def test_the_command_lines_have_every_flag_once(runtime: str) -> None:
    """What the real parsers were shown is all that can be rendered."""
    used = {word.partition("=")[0] for name, words in COMMANDS if name == runtime for word in words}
    source = Path(command.__code__.co_filename).with_name(f"{runtime.lower()}.py").read_text()

    assert set(re.findall(r'"(--[a-z-]+)"', source)) - used == set()


@pytest.mark.parametrize(
    ("runtime", "changes", "field", "says"),
    [
        pytest.param(
            "VLLM",
            {"model": {"source": {"huggingFace": {"repository": "a/b", "file": "x.gguf"}}}},
            "spec.model.source.huggingFace.file",
            "given whole repositories",
            id="a GGUF file of a hub",
        ),
        pytest.param(
            "VLLM",
            {"model": {"source": {"image": {"path": "/models/m"}}, "quantization": "Int8"}},
            "spec.model.quantization",
            "reads how a checkpoint is quantised from its files",
            id="rounded weights",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"agingInterval": "5s"}},
            "spec.scheduling.agingInterval",
            "vLLM ages no request",
            id="aging",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"speculation": {"method": "PromptLookup"}}},
            "spec.scheduling.speculation.method",
            "only Sluice's own engine",
            id="guesses",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"overlapDepth": 2}},
            "spec.scheduling.overlapDepth",
            "one step ahead",
            id="two steps ahead",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"preemption": {"victim": "MostSlack"}}},
            "spec.scheduling.preemption.victim",
            "chooses its victims itself (Last)",
            id="a victim",
        ),
        pytest.param(
            "SGLang",
            {"scheduling": {"policy": "Priority", "preemption": {"victim": "Last"}}},
            "spec.scheduling.preemption.victim",
            "(LowestPriority)",
            id="a victim under priority",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"preemption": {"maxPerRequest": 1}}},
            "spec.scheduling.preemption.maxPerRequest",
            "counts no preemptions",
            id="a cap on preemptions",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"tokenBudget": 4096, "prefillChunkTokens": 2048}},
            "spec.scheduling.tokenBudget",
            "one bound",
            id="two bounds of a step",
        ),
        pytest.param(
            "VLLM",
            {"scheduling": {"prefillChunkTokens": 32, "maxSequences": 64}},
            "spec.scheduling.prefillChunkTokens",
            "at least maxSequences, 64",
            id="a chunk below the batch",
        ),
        pytest.param(
            "SGLang",
            {"scheduling": {"tokenBudget": 4096}},
            "spec.scheduling.tokenBudget",
            "prefill alone",
            id="a budget of SGLang",
        ),
        pytest.param(
            "SGLang",
            {"scheduling": {"maxPrefillTokensPerRequest": 64}},
            "spec.scheduling.maxPrefillTokensPerRequest",
            "no single request",
            id="a share of SGLang",
        ),
        pytest.param(
            "SGLang",
            {"cache": {"capacity": "4Gi"}},
            "spec.cache.capacity",
            "in tokens: set memoryPercent",
            id="bytes of SGLang",
        ),
        pytest.param(
            "SGLang",
            {"accelerator": {"count": 0}, "cache": {"capacity": "4Gi"}},
            "spec.accelerator.count",
            "for accelerators",
            id="SGLang on a CPU",
        ),
    ],
)
def test_what_it_cannot_honour_is_refused_by_its_field(
    runtime: str, changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        foreign(runtime, changes)

    assert str(caught.value).startswith(f"{field}: ")
    assert says in str(caught.value)


def test_the_default_block_leaves_the_size_to_the_engine_and_another_is_obeyed() -> None:
    """vLLM's kernels on a CPU end the start at 16: "No common block size for 16 (CPU_ATTN: [MultipleOf(32)])"."""
    on_cpu = {"accelerator": {"count": 0}}

    assert "--block-size" not in str(command(foreign("VLLM", {**on_cpu, "cache": {"capacity": "1Gi"}})))
    obeyed = command(foreign("VLLM", {**on_cpu, "cache": {"capacity": "1Gi", "blockTokens": 64}}))
    assert "--block-size=64" in obeyed
    with pytest.raises(InvalidSpec, match=r"spec\.cache\.blockTokens: vLLM's blocks on a CPU are multiples of 32"):
        foreign("VLLM", {**on_cpu, "cache": {"capacity": "1Gi", "blockTokens": 8}})


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(InvalidSpec) as caught:
        foreign("VLLM", {"scheduling": {"agingInterval": "5s", "overlapDepth": 2}})

    assert "spec.scheduling.overlapDepth: vLLM plans one step ahead" in str(caught.value)


def test_the_gate_is_told_how_the_engine_was_started() -> None:
    scheduling = {"prefillChunkTokens": 2048, "maxSequences": 64, "policy": "Priority"}
    (config,) = [
        one for one in objects(foreign("VLLM", {"scheduling": scheduling}), scene.IMAGES)
        if one["kind"] == "ConfigMap" and one.get("immutable")
    ]  # fmt: skip

    assert set(config["data"]) == {"gate.json"}
    gate = codec.from_json(GateConfig, config["data"]["gate.json"], "gate")
    assert (gate.engine, gate.engine_url) == ("vllm", "http://127.0.0.1:8000")
    assert (gate.engine_max_sequences, gate.engine_chunk_tokens, gate.engine_priorities) == (64, 2048, True)


def test_another_chunk_restarts_the_pods_and_another_promise_does_not() -> None:
    def template(changes: dict[str, Any]) -> Any:
        (deployment,) = [one for one in objects(foreign("VLLM", changes), scene.IMAGES) if one["kind"] == "Deployment"]
        return deployment["spec"]["template"]

    chunk, other = ({"scheduling": {"prefillChunkTokens": size}} for size in (1024, 2048))
    assert template(chunk) != template(other)
    assert template({}) == template({"slo": {"interTokenLatency": "100ms"}})


@pytest.mark.parametrize("runtime", ["VLLM", "SGLang"])
def test_the_container_has_what_a_foreign_image_needs(runtime: str) -> None:
    engine = engine_of(runtime, {"model": HUB})
    env = {one["name"]: one.get("value") for one in engine["env"]}
    mounts = {one["mountPath"] for one in engine["volumeMounts"]}

    assert engine["image"] == foreign_scene.IMAGE
    assert "args" not in engine
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == ("/var/cache/sluice", "sluice", "sluice")
    assert env["HF_HUB_CACHE"] == "/var/lib/sluice/hub"
    assert {"/var/cache/sluice", "/var/lib/sluice/hub", "/dev/shm", "/tmp", "/run/sluice"} <= mounts
    assert any("127.0.0.1" in word for word in engine["command"]), "the gate is the only door"
    assert engine["startupProbe"]["httpGet"] == {"path": "/engine/startupz", "port": 9090}
    assert engine["lifecycle"]["preStop"]["exec"]["command"][0] == "/bin/sh"


def test_a_dollar_in_a_name_stays_what_it_is() -> None:
    engine = engine_of("VLLM", {"model": {**HUB, "servedName": "a $(HF_TOKEN) b"}})

    assert "--served-model-name=a $$(HF_TOKEN) b" in engine["command"], "Kubernetes makes one dollar of two"


def test_the_engine_of_ones_own_is_started_as_ever() -> None:
    assert files(scene.spec(), Paths()).has_own_engine
    assert files(scene.spec(), Paths()).gate.engine == "sluice"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vllm", "spec.runtime.type: the program vllm is not on the PATH"),
        ("sglang", "spec.runtime.type: SGLang is not started by this command"),
    ],
)
def test_run_says_what_it_cannot_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    code = main.run(["run", "--model", "/mine", str(scene.EXAMPLES / f"{name}.yaml")])

    assert code == 2
    assert says in capsys.readouterr().err


def test_check_says_which_chunk_has_to_be_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    manifest = tmp_path / "vllm.yaml"
    text = (scene.EXAMPLES / "vllm.yaml").read_text()
    manifest.write_text(text.replace("    prefillChunkTokens: 3392\n", ""))

    main.run(["check", str(manifest)])

    assert "set scheduling.prefillChunkTokens to it" in capsys.readouterr().out
