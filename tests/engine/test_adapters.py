"""LoRA adapters: what a request says with one equals the merged model, whatever else is in its batch."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.gguf_file import make_gguf, round_like
from engine.reference import Reference, greedy, load_runner, outputs, run
from engine.tiny_adapter import make_adapter, merged
from sluice_engine.compute.adapters import AdapterStore, StepAdapters, grouped
from sluice_engine.compute.device import cpu_flags
from sluice_engine.config import ModelSource
from sluice_engine.core.request import Request
from sluice_engine.errors import AdapterRefused
from sluice_engine.kernels.library import SWITCH, load_kernels
from sluice_engine.model_files.adapter_weights import AdapterWeights, Delta, Up
from sluice_engine.model_files.weights import open_tensors
from tiny_model import make_tiny_llama

SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
# Of different rank, scale and modules; "" is the model alone.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 11, "rank": 4},
    "attention": {"seed": 12, "rank": 8, "targets": ("q_proj", "v_proj"), "config": {"use_rslora": True}},
    "one": {"seed": 13, "rank": 1, "alpha": 2.0, "targets": ("k_proj", "down_proj", "o_proj")},
}
HAS_KERNELS = not isinstance(load_kernels(cpu_flags(), torch.float32), str)
SWITCHES = [
    pytest.param("", marks=pytest.mark.skipif(not HAS_KERNELS, reason="no kernels here"), id="kernels"),
    pytest.param("off", id="torch"),
]


class Adapted:
    """A tiny model with its adapters loaded, and the reference of each."""

    def __init__(self, folder: Path, source: Path, model: Path, switch: str = "") -> None:
        self.switch = switch
        self.runner = load_runner(
            ModelSource(path=str(source)), capacity_bytes=1 << 20, block_tokens=8, host_swap_bytes=1 << 19
        )
        self.references = {"": Reference.from_directory(model)}
        for name, options in ADAPTERS.items():
            adapter = make_adapter(model, folder / name, **options)
            self.runner.adapters.load(name, adapter)
            self.references[name] = Reference.from_directory(merged(model, adapter, folder / f"{name}-merged"))

    def check(self, requests: list[Request]) -> None:
        for request, output in zip(requests, outputs(requests), strict=True):
            reference = self.references[request.adapter]
            reference.assert_greedy(request.tokens[: request.num_prompt], output)
            assert reference.ties == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "model", seed=3, **SHAPE)


@pytest.fixture(scope="module", params=SWITCHES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Adapted:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, request.param)
        return Adapted(tmp_path_factory.mktemp("adapted"), model, model, request.param)


def _request(name: str, adapter: str, length: int, *, seed: int | None = None, max_tokens: int = 12) -> Request:
    prompt = random.Random(length if seed is None else seed).choices(range(256), k=length)
    request = greedy(name, prompt, max_tokens)
    request.adapter = adapter
    return request


def _mixed(*, same_prompt: bool = False) -> list[Request]:
    """Twice each adapter and the model alone, of different lengths."""
    names = ["", *ADAPTERS] * 2
    return [
        _request(f"{at}", adapter, 40 if same_prompt else (1, 33, 17, 60, 2, 9, 48, 25)[at], seed=at % 2)
        for at, adapter in enumerate(names)
    ]


@pytest.mark.parametrize("adapter", ["", "all", "attention"])
def test_a_request_alone_says_what_the_merged_model_says(adapted: Adapted, adapter: str) -> None:
    request = _request("r", adapter, 20)
    run(adapted.runner, [request])
    adapted.check([request])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in one batch"),
        pytest.param({"per_request": 7}, id="chunked"),
        pytest.param({"num_blocks": 16, "per_request": 16}, id="preempted"),
        pytest.param({"num_blocks": 16, "per_request": 16, "swap": True}, id="swapped"),
        pytest.param({"prefix": True, "max_sequences": 2}, id="with the prefix cache"),
        pytest.param({"depth": 1}, id="overlapped"),
        pytest.param({"drafts": 4}, id="speculating"),
    ],
)
def test_adapters_in_one_batch_do_not_touch_each_other(adapted: Adapted, options: dict[str, Any]) -> None:
    if options and adapted.switch and HAS_KERNELS:
        pytest.skip("once is enough: which products run does not depend on it")
    requests = _mixed()
    scheduler = run(adapted.runner, requests, **options)
    if "num_blocks" in options:
        assert scheduler.preemptions_total > 0
    if "drafts" in options:
        assert scheduler.drafts is not None
        assert scheduler.drafts.proposed_total > 0
    adapted.check(requests)


def test_blocks_are_shared_within_an_adapter_and_never_beyond(adapted: Adapted) -> None:
    """One prompt for all, one after the other: the second of each adapter finds the first's blocks, and only those."""
    prompt = random.Random(5).choices(range(256), k=40)
    requests = []
    for at, adapter in enumerate(["", *ADAPTERS] * 2):
        requests.append(greedy(f"{at}", prompt))
        requests[-1].adapter = adapter
    run(adapted.runner, requests, prefix=True, max_sequences=1)
    adapted.check(requests)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 0, 32, 32, 32, 32]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("llama", Kind.F32, id="Llama"),
        pytest.param("llama", Kind.Q8_0, id="Llama, blocks as they are"),
        pytest.param("qwen3", Kind.Q8_0, id="Qwen3, blocks as they are"),
    ],
)
def test_a_gguf_base_takes_the_same_adapter(tmp_path: Path, family: str, kind: Kind) -> None:
    """Rows of q and k lie elsewhere in such a file; blocks have their norms apart."""
    model = make_tiny_llama(tmp_path / "model", family=family, seed=4, **SHAPE)
    file = make_gguf(model, tmp_path / "model.gguf", kind=kind)
    if kind is not Kind.F32:
        round_like(model)
    adapted = Adapted(tmp_path, file, model)
    requests = _mixed()
    run(adapted.runner, requests)
    adapted.check(requests)


def test_a_dropped_adapter_is_gone_and_its_key_never_comes_back(model: Path, tmp_path: Path) -> None:
    store = AdapterStore(open_tensors(model).architecture, torch.float32, torch.device("cpu"))
    adapter = make_adapter(model, tmp_path / "a", seed=1)
    assert store.load("a#1", adapter)[0] == 4
    number = store.number("a#1")
    store.drop("a#1")
    store.load("a#2", adapter)
    assert store.number("a#1") == 0
    assert store.number("a#2") not in {0, number}
    assert store.step(np.array([0, number]), torch.device("cpu")) is None


def test_an_adapter_too_large_for_the_memory_is_refused_with_both_sizes(model: Path, tmp_path: Path) -> None:
    """With the matrices that are put together meanwhile, and beside what steps need."""
    adapter = make_adapter(model, tmp_path / "a", seed=1, rank=4)
    held = sum(tensor.numel() * 4 for tensor in load_file(adapter / "adapter_model.safetensors").values())
    needed = held + 6 * 4 * 128 * 4
    free = needed
    store = AdapterStore(open_tensors(model).architecture, torch.float32, torch.device("cpu"), lambda _device: free)
    assert store.load("fits", adapter) == (4, held)
    free = needed - 1
    with pytest.raises(AdapterRefused, match=f"needs {needed} bytes of memory, and {free} are free$"):
        store.load("a", adapter)
    free, store.reserved_bytes = needed + 1000, 1001
    with pytest.raises(AdapterRefused, match=f"and {needed - 1} are free beside the 1001 that steps need"):
        store.load("a", adapter)


def test_what_only_float32_can_hold_is_refused_in_float16(model: Path, tmp_path: Path) -> None:
    store = AdapterStore(open_tensors(model).architecture, torch.float16, torch.device("cpu"))
    adapter = make_adapter(model, tmp_path / "a", seed=1, config={"lora_alpha": 1e6})
    with pytest.raises(AdapterRefused, match="not finite in float16"):
        store.load("a", adapter)


BEYOND = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
REFUSED: list[Any] = [
    pytest.param({"config": {"use_dora": True}}, "use_dora is true, which is not supported", id="DoRA"),
    pytest.param({"config": {"modules_to_save": ["lm_head"]}}, "modules_to_save is", id="whole modules"),
    pytest.param({"config": {"bias": "all"}}, 'bias is "all"; supported is "none"', id="biases"),
    pytest.param({"config": {"peft_type": "LOHA"}}, 'peft_type is "LOHA"', id="another method"),
    pytest.param({"config": {"peft_type": "left out"}}, "peft_type is null", id="no method"),
    pytest.param({"config": {"task_type": "SEQ_CLS"}}, 'task_type is "SEQ_CLS"', id="a classifier"),
    pytest.param({"config": {"init_lora_weights": "pissa"}}, 'init_lora_weights is "pissa"', id="a changed base"),
    pytest.param({"config": {"rank_pattern": {"q_proj": 2}}}, "rank_pattern is", id="ranks of their own"),
    pytest.param({"config": {"r": 0}}, "r is 0; supported is 1 to 512", id="rank 0"),
    pytest.param({"config": {"r": True}}, "r is true", id="a rank that is no number"),
    pytest.param({"config": {"lora_alpha": "8"}}, 'lora_alpha is "8"', id="a scale that is no number"),
    pytest.param({"config": {"lora_alpha": 10**400}}, "lora_alpha is 1000", id="a scale that no float holds"),
    pytest.param({"config": {"task_type": []}}, r"task_type is \[\]", id="a task that is a list"),
    pytest.param({"config": {"fan_in_fan_out": True}}, "fan_in_fan_out is true", id="turned matrices"),
    pytest.param({"config": {"from_tomorrow": 1}}, "from_tomorrow is 1", id="an option nobody knows"),
    pytest.param({"config": {"target_modules": ["embed_tokens"]}}, 'has "embed_tokens"; supported', id="embeddings"),
    pytest.param({"config": {"r": 5}}, r"has shape \[4, 128\]; the model and r ask for \[5, 128\]", id="another rank"),
    pytest.param({"tensors": {Q.format("A"): torch.zeros(4, 32)}}, r"shape \[4, 32\]", id="another base"),
    pytest.param({"tensors": {Q.format("B"): None}}, "there is lora_A alone", id="half a pair"),
    pytest.param({"tensors": {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}}, "unsupported", id="head"),
    pytest.param(
        {"tensors": {BEYOND: torch.zeros(4, 64)}}, "a layer that the model does not", id="layer"
    ),
    pytest.param({"tensors": {Q.format("A"): torch.full((4, 64), torch.nan)}}, "not finite", id="NaN"),
    pytest.param({"tensors": {Q.format("A")[17:]: torch.zeros(4, 64)}}, "of model.* there is lora_A twice", id="twice"),
    pytest.param({"targets": ()}, "holds no tensors", id="nothing in it"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "problem"), REFUSED)
def test_what_is_not_computed_is_refused_by_name_in_one_line(
    model: Path, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    store = AdapterStore(open_tensors(model).architecture, torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterRefused, match=problem) as caught:
        store.load("a", make_adapter(model, tmp_path / "a", seed=1, **options))
    assert "\n" not in str(caught.value)
    assert store.number("a") == 0


def _without_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def _pipe_for_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()
    os.mkfifo(path / "adapter_config.json")


def _header(text: str) -> Callable[[Path], object]:
    content = struct.pack("<Q", len(text)) + text.encode()
    return lambda path: (path / "adapter_model.safetensors").write_bytes(content)


def _cut(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(_without_config, "adapter_config.json cannot be read: No such file", id="no configuration"),
        pytest.param(lambda path: (path / "adapter_config.json").write_text("{"), "not valid JSON", id="half of one"),
        pytest.param(lambda path: (path / "adapter_config.json").write_text("[]"), "not a JSON object", id="a list"),
        pytest.param(
            lambda path: (path / "adapter_model.safetensors").unlink(), "has no adapter_model", id="no tensors"
        ),
        pytest.param(lambda path: (path / "adapter_model.safetensors").write_text("x"), "not a safetensors", id="text"),
        pytest.param(_pipe_for_config, "is no regular file", id="a pipe for a configuration"),
        pytest.param(
            lambda path: (path / "adapter_config.json").write_text(" " * (1 << 20) + "{}"),
            "holds more than",
            id="a configuration of more than 1 MiB",
        ),
        pytest.param(_header("[]"), "not a safetensors", id="a header that is a list"),
        pytest.param(_header("[" * 100_000), "not a safetensors", id="a header of 100,000 levels"),
        pytest.param(_cut, "cut short", id="cut short"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    model: Path, tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    store = AdapterStore(open_tensors(model).architecture, torch.float32, torch.device("cpu"))
    adapter = make_adapter(model, tmp_path / "a", seed=1)
    damage(adapter)
    with pytest.raises(AdapterRefused, match=problem) as caught:
        store.load("a", adapter)
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 4), max_size=20), st.sets(st.integers(1, 4)))
def test_every_row_is_in_the_group_of_its_adapter_and_in_no_other(numbers: list[int], known: set[int]) -> None:
    groups = grouped(np.array(numbers, dtype=np.int64), dict.fromkeys(known))
    seen = {row: number for number, rows in groups for row in (range(len(numbers)) if rows is None else rows.tolist())}
    assert seen == {row: number for row, number in enumerate(numbers) if number in known}
    assert sum(len(numbers) if rows is None else len(rows) for _, rows in groups) == len(seen), "a row in two groups"
    assert [number for number, _ in groups] == sorted({*numbers} & known)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 1000))
def test_what_is_added_to_a_row_is_what_its_adapter_makes_of_it_alone(numbers: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random_matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def adapter(rank: int) -> AdapterWeights:
        ups = (Up(0, 0, random_matrix(rank, 5)), Up(rank, 7, random_matrix(rank, 2)))  # a module between has none
        return AdapterWeights(({"qkv": Delta(random_matrix(6, 2 * rank), ups)},), rank, 0)

    weights = {number: adapter(number) for number in (1, 2, 3)}
    x, norm, out = random_matrix(len(numbers), 6), random_matrix(6), random_matrix(len(numbers), 9)
    expected = out.clone()
    for row, number in enumerate(numbers):
        for up in weights[number].layers[0]["qkv"].ups if number else ():
            rank, width = up.matrix.shape
            small = (x[row] * norm) @ weights[number].layers[0]["qkv"].down[:, up.first_rank : up.first_rank + rank]
            expected[row, up.first_row : up.first_row + width] += small @ up.matrix
    groups = grouped(np.array(numbers, dtype=np.int64), weights)
    step = StepAdapters(
        tuple((weights[number], None if rows is None else torch.from_numpy(rows)) for number, rows in groups)
    )
    step.add(0, "qkv", x, out, norm)
    step.add(0, "down", x, out)  # nothing of that product is adapted
    torch.testing.assert_close(out, expected)
    untouched = [row for row, number in enumerate(numbers) if not number]
    assert torch.equal(out[untouched], expected[untouched])
