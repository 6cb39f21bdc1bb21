"""What headers tell of a model, held against the model that is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.gguf_file import make_gguf
from sluice_engine.config import ModelSource, Quantization
from sluice_engine.errors import ModelUnavailable
from sluice_engine.kernels.library import Blocks
from sluice_engine.model_files.outline import DEMOS, Outline, outline, read_outline
from sluice_engine.model_files.sources import resolve
from sluice_engine.model_files.weights import load, open_tensors
from tiny_model import make_tiny_llama


@pytest.mark.parametrize("name", list(DEMOS))
def test_a_demo_is_known_as_its_file_has_it(name: str) -> None:
    assert outline(ModelSource(demo=name)) == read_outline(resolve(ModelSource(demo=name)))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "a-head-of-its-own"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16])
def test_the_blocks_of_a_file_are_those_that_are_held(tmp_path: Path, kind: Kind, *, tied: bool) -> None:
    path = make_gguf(make_tiny_llama(tmp_path / "model", tied_head=tied), tmp_path / "model.gguf", kind=kind)
    tensors = open_tensors(path)

    weights = load(tensors, torch.float32, torch.device("cpu"), lambda _: None, keep_blocks=True)

    held: list[Blocks | None] = [weights.head_blocks]
    for layer in weights.layers:
        held += [layer.blocks.qkv, layer.blocks.attention_out, layer.blocks.gate_up, layer.blocks.down]
    known = read_outline(path)
    assert known.architecture == tensors.architecture
    sizes = {Kind.Q4_0: 20, Kind.Q4_1: 24, Kind.Q8_0: 36}
    in_blocks = sum(number * sizes[Kind(of)] for of, number in known.blocks)
    assert in_blocks == sum(blocks.data.numel() for blocks in held if blocks is not None)


def test_a_folder_is_known_by_its_configuration_alone(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    shape = open_tensors(directory).architecture
    for weights in directory.glob("*.safetensors"):
        weights.unlink()

    assert read_outline(directory) == Outline(shape)


LAYERS, HEAD = 106_168_320, 28_311_552


@pytest.mark.parametrize(
    ("element_bytes", "quantization", "held"),
    [
        # Rows of the embedding alone: what is multiplied is there as blocks, of 4 bits in the layers and 8 in the head.
        pytest.param(2, "Auto", 2 * HEAD + LAYERS // 32 * 20 + HEAD // 32 * 34, id="bfloat16 with the file's blocks"),
        pytest.param(2, "Int8", 2 * HEAD + (LAYERS + HEAD) // 32 * 34, id="bfloat16 with blocks made of it"),
        pytest.param(2, "None", 2 * 2 * (LAYERS + HEAD), id="bfloat16 without, in rows and reordered"),
        pytest.param(4, "Auto", 4 * (LAYERS + 2 * HEAD) + LAYERS // 32 * 24 + HEAD // 32 * 36, id="float32"),
    ],
)
def test_a_cpu_holds_blocks_alone_or_beside_the_data_type(
    element_bytes: int, quantization: Quantization, held: int
) -> None:
    assert DEMOS["smollm2-135m"].held_bytes(element_bytes, quantization) == held


def test_what_is_not_supported_or_damaged_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    with pytest.raises(ModelUnavailable, match="supported are llama"):
        read_outline(tmp_path)
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:1200])
    with pytest.raises(ModelUnavailable, match="not a sound GGUF file"):
        read_outline(path)
