"""`model.quantization`: the same values in whatever form a step multiplies with them, and no other choice unsaid."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.gguf_file import make_gguf
from engine.reference import Reference, greedy, outputs, run
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.device import cpu_flags
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import CacheConfig, EngineConfig, ModelConfig, ModelSource, Quantization
from sluice_engine.errors import InvalidConfig
from sluice_engine.kernels.block_types import ROUNDED_TO
from sluice_engine.kernels.library import SWITCH, load_kernels
from sluice_engine.model_files.quantization import check
from sluice_engine.model_files.weights import load, open_tensors
from tiny_model import make_tiny_llama

# Rows of 64 and 128: whole blocks of 32.
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "tied_head": False, "seed": 3}
needs_kernels = pytest.mark.skipif(
    isinstance(load_kernels(cpu_flags(), torch.float32), str),
    reason="no kernels here: another processor, or no compiler",
)


def load_runner(path: Path, quantization: Quantization) -> TorchRunner:
    model = ModelConfig(
        source=ModelSource(path=str(path)), served_name="t", data_type="Float32", quantization=quantization
    )
    config = EngineConfig(model=model, cache=CacheConfig(capacity_bytes=1 << 20))
    return assemble_runner(config, lambda _progress: None)


def round_layers(path: Path, kind: int) -> None:
    """Give the directory's matrices of layers and head, not the embedding, the values that their blocks stand for."""
    quantised = gguf.GGMLQuantizationType(kind)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            blocks = gguf.quants.quantize(tensor.numpy(), quantised)
            tensors[name] = torch.as_tensor(gguf.quants.dequantize(blocks, quantised)).clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "switch", [pytest.param("", marks=needs_kernels, id="kernels"), pytest.param("off", id="torch")]
)
@pytest.mark.parametrize("quantization", ["Int8", "Int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rounded_model_is_the_model_of_the_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: Quantization, switch: str
) -> None:
    """Alone, in batches, in chunks and preempted: the form that a step multiplies with changes no token."""
    monkeypatch.setenv(SWITCH, switch)
    path = make_tiny_llama(tmp_path / "model", family=family, **SHAPE)
    runner = load_runner(path, quantization)
    round_layers(path, ROUNDED_TO[quantization])
    reference = Reference.from_directory(path)
    prompts = [random.Random(length).choices(range(256), k=length) for length in (1, 2, 17, 90, 40)]
    requests = [greedy(str(i), prompt) for i, prompt in enumerate(prompts)]
    scheduler = run(runner, requests, per_request=30, num_blocks=12)
    assert scheduler.preemptions_total > 0
    for prompt, output in zip(prompts, outputs(requests), strict=True):
        reference.assert_greedy(prompt, output)
    assert reference.ties == 0


@pytest.mark.parametrize(("quantization", "kind"), [("Auto", 8), ("None", None), ("Int8", 8), ("Int4", 3)], ids=str)
def test_which_blocks_are_kept_of_a_gguf_file(tmp_path: Path, quantization: Quantization, kind: int | None) -> None:
    directory = make_tiny_llama(tmp_path / "model", **SHAPE)
    tensors = open_tensors(make_gguf(directory, tmp_path / "model.gguf"))
    weights = load(
        tensors, torch.float32, torch.device("cpu"), lambda _: None, keep_blocks=True, quantization=quantization
    )
    found = [weights.head_blocks]
    for layer in weights.layers:
        blocks = layer.blocks
        found += [blocks.qkv, blocks.attention_out, blocks.gate_up, blocks.down]
    assert {None if each is None else each.kind for each in found} == {kind}


def test_a_tied_head_is_rounded_and_the_embedding_is_not(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", **(SHAPE | {"tied_head": True}))
    weights = load(
        open_tensors(path), torch.float32, torch.device("cpu"), lambda _: None, keep_blocks=True, quantization="Int4"
    )
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights.embedding, embedding)
    assert not torch.equal(weights.head, embedding)
    torch.testing.assert_close(weights.head, embedding, rtol=0.2, atol=0.2)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(InvalidConfig, match=r"model\.quantization: is Int8, of 32 weights a block; .* rows of 48"):
        load_runner(path, "Int8")
    assert load_runner(path, "None").description.endswith(", weights None")


def test_rounding_is_for_cpus(tmp_path: Path) -> None:
    shape = open_tensors(make_tiny_llama(tmp_path / "model")).architecture
    for quantization in ("Auto", "None"):
        check(quantization, shape, torch.device("cuda"))
    with pytest.raises(InvalidConfig, match="is Int4, which is for CPUs"):
        check("Int4", shape, torch.device("cuda"))
