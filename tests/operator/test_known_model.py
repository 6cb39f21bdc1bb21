"""`sluice check` on the model: the memory that it takes, and what the engine would refuse of it at its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import operator_scene as scene
from sluice_operator.cli.main import run

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """`sluice check` of the demo on a CPU with these changes: exit code and report."""

    def checked(*words: str, **changes: Any) -> tuple[int, str]:
        document = yaml.safe_load((scene.EXAMPLES / "demo-cpu.yaml").read_text())
        for part, fields in changes.items():
            document["spec"][part] = {**document["spec"].get(part, {}), **fields}
        path = tmp_path / "demo.yaml"
        path.write_text(yaml.safe_dump(document))
        code = run(["check", str(path), *words])
        return code, " ".join(capsys.readouterr().out.split())

    return checked


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with the configuration of a small Llama and no weights."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def limited(memory: str) -> dict[str, Any]:
    return {"resources": {"limits": {"memory": memory}}}


def test_the_demo_model_has_its_sum(check: Check) -> None:
    code, out = check(**limited("1000Mi"))

    assert code == 1
    assert (
        "memory resources.limits.memory is 1,000 MiB, 8 MiB too little for cache.capacity 384 MiB + "
        "cache.hostSwapCapacity 128 MiB + weights 146 MiB + the engine itself 350 MiB a pod would not start, or be"
    ) in out


@pytest.mark.parametrize(
    ("memory", "data_type", "code", "words"),
    [
        pytest.param("1007Mi", "Auto", 1, "1 MiB too little", id="too little in any type"),
        pytest.param(
            "1400Mi", "Auto", 0, "where it does not, weights are in float32, and it is 189 MiB", id="on some CPUs"
        ),
        pytest.param("1400Mi", "BFloat16", 0, "", id="enough in the type that is set"),
        pytest.param("1400Mi", "Float32", 1, "189 MiB too little", id="too little in the type that is set"),
        pytest.param("3Gi", "Auto", 0, "", id="enough in any type"),
    ],
)
def test_the_sum_goes_by_the_data_type(check: Check, memory: str, data_type: str, code: int, words: str) -> None:
    found, out = check(model={"dataType": data_type}, **limited(memory))

    assert found == code
    assert words in out
    assert ("limits.memory" in out) is bool(words)


def test_a_device_holds_weights_and_cache_and_the_engine_the_rest(check: Check) -> None:
    code, out = check(accelerator={"count": 1}, **limited("450Mi"))

    assert (code, "28 MiB too little for cache.hostSwapCapacity 128 MiB + the engine itself 350 MiB" in out) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"accelerator": {"count": 2}},
            "accelerator.count is 2, but the model has 3 KV heads, which do not divide among 2 ranks: set "
            "accelerator.count to a number that divides 3",
            id="heads that do not divide",
        ),
        pytest.param(
            {"model": {"maxLengthTokens": 8193}},
            "model.maxLengthTokens is 8193; the model's own length is 8192",
            id="longer than the model",
        ),
        pytest.param(
            {"cache": {"capacity": "512Ki"}},
            "cache.capacity is 524,288 bytes, and at least 737,280 are needed, since 16 tokens of this model take",
            id="a cache of one block",
        ),
        pytest.param(
            {"cache": {"hostSwapCapacity": 1000}}, "cache.hostSwapCapacity is 1,000 bytes", id="room for no block"
        ),
        pytest.param(
            {"accelerator": {"count": 1}, "model": {"quantization": "Int8"}},
            "model.quantization is Int8, which is for CPUs",
            id="blocks on a device",
        ),
    ],
)
def test_what_the_engine_refuses_at_its_start_is_refused(check: Check, changes: dict[str, Any], words: str) -> None:
    code, out = check(**changes)

    assert code == 1
    assert f"start the engine would refuse it: {words}" in out
    assert json.loads(check("--json", **changes)[1])[0]["refusals"][0].startswith(words)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"accelerator": {"count": 3}}, id="heads that divide"),
        pytest.param({"model": {"maxLengthTokens": 8192}}, id="as long as the model"),
        pytest.param({"cache": {"capacity": "720Ki", "hostSwapCapacity": "360Ki"}}, id="the least there is"),
    ],
)
def test_what_the_engine_takes_is_accepted(check: Check, changes: dict[str, Any]) -> None:
    code, out = check(**changes)

    assert (code, "would refuse it" in out) == (0, False)


def test_a_model_of_this_machine_is_known_by_its_headers(check: Check, llama: str) -> None:
    code, out = check("--model", llama, accelerator={"count": 8})
    assert (code, "is 8, but the model has 4 KV heads" in out) == (1, True)
    assert check("--model", llama, accelerator={"count": 4})[0] == 0

    code, out = check("--model", llama, **limited("64Mi"))
    # Layers of 9,437,184 numbers in rows and reordered, embedding and head of 16,384,000 each, two bytes a number.
    assert (code, "+ weights 98 MiB +" in out) == (1, True)


def test_a_model_that_is_not_supported_is_told_before_a_pod_tells_it(check: Check, llama: str) -> None:
    Path(llama, "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma"}))

    code, out = check("--model", llama)

    assert (code, "would refuse it:" in out, "model_type 'gemma'; supported are llama" in out) == (1, True, True)


def test_nothing_is_said_of_another_engine(check: Check, llama: str) -> None:
    other = {"type": "VLLM", "image": "vllm/vllm-openai:v0.11.0"}
    source = {"source": {"image": {"path": "/models/llama"}}}

    code, out = check(
        "--model", llama, accelerator={"count": 8}, runtime=other, model=source, cache={"hostSwapCapacity": "0"}
    )

    assert (code, "would refuse it" in out) == (0, False)
