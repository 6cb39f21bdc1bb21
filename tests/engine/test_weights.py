"""Models that are damaged, incomplete or of another kind: each refused in one line that names file and part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.gguf_file import make_gguf, round_like
from engine.reference import Reference, greedy, load_runner, run
from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.shard import Shard
from sluice_engine.model_files.tensor_shapes import expected_shapes
from sluice_engine.model_files.weights import load, open_tensors
from sluice_engine.model_files.weights_gguf import GGUFTensors, can_read
from tiny_model import make_tiny_llama

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def _load(path: Path) -> None:
    load(open_tensors(path), torch.float32, torch.device("cpu"), lambda _: None)


def _edit_config(**fields: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config |= fields
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "DELETE"}))

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).write_bytes(content)

    return write


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _remove_shard(path: Path) -> None:
    make_tiny_llama(path, num_shards=2)
    (path / "model.safetensors").unlink()
    (path / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        pytest.param(
            _edit_config(model_type="mamba"), "ModelUnsupported", "config.json.*model_type 'mamba'", id="mamba"
        ),
        pytest.param(
            _edit_config(attention_bias=True), "ModelCorrupt", "q_proj.bias is missing", id="a bias that is not there"
        ),
        pytest.param(
            _edit_config(architectures=["LlamaForSequenceClassification"]),
            "ModelUnsupported",
            "architectures .*only LlamaForCausalLM",
            id="another task",
        ),
        pytest.param(
            _edit_config(logits_scaling=2.0),
            "ModelUnsupported",
            "field logits_scaling 2.0: it may change",
            id="unknown",
        ),
        pytest.param(
            _edit_config(auto_map={"AutoModel": "own.Model"}),
            "ModelUnsupported",
            "field auto_map",
            id="code of its own",
        ),
        pytest.param(_edit_config(model_type="DELETE"), "ModelCorrupt", "model_type is missing", id="no family"),
        pytest.param(
            _edit_config(model_type="mistral", architectures=None, layer_types=["full_attention"] * 2),
            "ModelUnsupported",
            "layer_types",
            id="layers that their class ignores",
        ),
        pytest.param(
            _edit_config(model_type="qwen2", architectures=None, layer_types=["full_attention", "chunked_attention"]),
            "ModelUnsupported",
            "layer_types 'chunked_attention'",
            id="another kind of layer",
        ),
        pytest.param(
            _edit_config(model_type="mistral", architectures=None, attention_bias=True),
            "ModelUnsupported",
            "attention_bias True",
            id="a bias that its class ignores",
        ),
        pytest.param(
            _edit_config(partial_rotary_factor=0.5),
            "ModelUnsupported",
            "partial_rotary_factor 0.5",
            id="a part is turned",
        ),
        pytest.param(
            _edit_config(rope_scaling={"type": "linear", "factor": 2.0, "mrope_section": [1, 2]}),
            "ModelUnsupported",
            r"rope parameters: unsupported field mrope_section \[1, 2\]",
            id="an unknown way of turning",
        ),
        pytest.param(_edit_config(hidden_act="gelu"), "ModelUnsupported", "hidden_act 'gelu'", id="gelu"),
        pytest.param(_edit_config(sliding_window=64), "ModelUnsupported", "sliding_window 64", id="sliding window"),
        pytest.param(
            _edit_config(quantization_config={"bits": 4}), "ModelUnsupported", "quantization_config", id="quantised"
        ),
        pytest.param(
            _edit_config(rope_scaling={"type": "dynamic", "factor": 4}),
            "ModelUnsupported",
            "rope scaling 'dynamic'; supported are default, linear, llama3, yarn",
            id="dynamic",
        ),
        pytest.param(_edit_config(hidden_size="DELETE"), "ModelCorrupt", "hidden_size is missing", id="no hidden size"),
        pytest.param(_edit_config(vocab_size=-3), "ModelCorrupt", "vocab_size must be a positive", id="negative size"),
        pytest.param(
            _edit_config(num_key_value_heads=3), "ModelCorrupt", "8 attention heads", id="heads do not divide"
        ),
        pytest.param(_edit_config(vocab_size=300), "ModelCorrupt", r"\[260, 64\].*asks for \[300, 64\]", id="shape"),
        pytest.param(_write("config.json", b"{"), "ModelCorrupt", "config.json is not JSON", id="config cut short"),
        pytest.param(
            _write("config.json", b"[" * 100_000), "ModelCorrupt", "is not JSON", id="config of 100,000 levels"
        ),
        pytest.param(_write("config.json", b"[]"), "ModelCorrupt", "not a JSON object", id="config is a list"),
        pytest.param(
            lambda path: (path / "model.safetensors").unlink(),
            "ModelMissing",
            "has neither model.safeten",
            id="no weights",
        ),
        pytest.param(_cut, "ModelCorrupt", r"tensor \S+ is cut short", id="weights cut short"),
        pytest.param(_write("model.safetensors", b""), "ModelCorrupt", "not a safetensors file", id="empty weights"),
        pytest.param(_write("model.safetensors", b"\xff" * 90), "ModelCorrupt", "cut short within", id="another file"),
        pytest.param(
            _edit_tensors(lambda t: t.pop(Q_PROJ)), "ModelCorrupt", f"{Q_PROJ} is missing", id="a tensor missing"
        ),
        pytest.param(
            _edit_tensors(lambda t: t.update({Q_PROJ: torch.zeros(8, 64)})),
            "ModelCorrupt",
            f"{Q_PROJ} has shape",
            id="flat",
        ),
        pytest.param(
            _edit_tensors(lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)})),
            "ModelUnsupported",
            f"{Q_PROJ} has type I8",
            id="integers",
        ),
        pytest.param(
            _edit_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
            "ModelUnsupported",
            "unsupported tensor model.layers.0.self_attn.q_proj.bias",
            id="a tensor that nobody computes",
        ),
        pytest.param(_remove_shard, "ModelMissing", "model-00002-of-00002.safetensors, named by", id="a shard missing"),
    ],
)
def test_a_bad_directory_is_one_line(tmp_path: Path, damage: Callable[[Path], None], code: str, says: str) -> None:
    path = make_tiny_llama(tmp_path / "model")
    damage(path)

    with pytest.raises(ModelUnavailable, match=says) as caught:
        _load(path)
    assert caught.value.code == code
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tied_head", [True, False])
def test_a_gguf_file_says_what_transformers_says_of_the_same_weights(tmp_path: Path, tied_head: bool) -> None:  # noqa: FBT001
    directory = make_tiny_llama(tmp_path / "model", tied_head=tied_head)
    path = make_gguf(directory, tmp_path / "model.gguf")
    round_like(directory)
    reference = Reference.from_directory(directory)

    runner = load_runner(ModelSource(path=str(path)), capacity_bytes=1 << 20)
    request = greedy("r", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
    run(runner, [request])
    reference.assert_greedy(request.tokens[:10], request.tokens[10:])
    assert reference.ties == 0


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        pytest.param(
            {"architecture": "gemma2"}, "ModelUnsupported", "general.architecture 'gemma2'", id="another family"
        ),
        pytest.param(
            {"fields": {"rope.scaling.type": "longrope"}},
            "ModelUnsupported",
            "rope.scaling.type 'longrope'",
            id="longrope",
        ),
        pytest.param(
            {"fields": {"logit_scale": 0.5}}, "ModelUnsupported", "field llama.logit_scale 0.5", id="a field of others"
        ),
        pytest.param({"fields": {"expert_count": 8}}, "ModelUnsupported", "llama.expert_count 8", id="experts"),
        pytest.param(
            {"fields": {"rope.dimension_count": 4}}, "ModelUnsupported", "rope.dimension_count 4", id="a part is turned"
        ),
        pytest.param(
            {"extra": {"rope_freqs.weight": np.ones(3, dtype=np.float32)}},
            "ModelCorrupt",
            "rope_freqs.weight must hold 4",
            id="frequencies of another head",
        ),
        pytest.param(
            {"extra": {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}},
            "ModelCorrupt",
            "model.layers.0.self_attn.k_proj.bias is missing",
            id="a bias alone",
        ),
        pytest.param(
            {"extra": {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}},
            "ModelUnsupported",
            "unsupported tensor blk.0.attn_sinks.weight",
            id="a tensor that nobody computes",
        ),
    ],
)
def test_a_gguf_of_another_kind_is_one_line(tmp_path: Path, overrides: dict[str, Any], code: str, says: str) -> None:
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf", **overrides)
    with pytest.raises(ModelUnavailable, match=says) as caught:
        _load(path)
    assert caught.value.code == code
    assert str(path) in str(caught.value)


READABLE = [kind for kind in gguf.GGMLQuantizationType if can_read(kind)]


def test_every_type_that_the_library_dequantises_is_read() -> None:
    """The two plain ones, and all that it has a class for."""
    assert {kind.name for kind in READABLE} == {"F32", "F16"} | {kind.name for kind in gguf.quants._type_traits}
    assert len(READABLE) >= 26


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_a_tensor_of_every_type_is_read_row_by_row(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Any bytes stand for something: what is read equals what the library says of each row alone."""
    size, num_bytes = (int(number) for number in gguf.GGML_QUANT_SIZES[kind])
    width, rows = max(512, 2 * size), 16
    raw = np.random.default_rng(3).integers(0, 256, (rows, width // size * num_bytes), dtype=np.uint8)
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf", raw={"any": (raw, kind)})

    tensors = GGUFTensors(path)
    assert tensors.shape("any") == (rows, width)
    with np.errstate(all="ignore"):  # any bytes: scales that are no numbers among them
        expected = np.concatenate([np.array(gguf.quants.dequantize(row[None], kind)) for row in raw])
        np.testing.assert_array_equal(tensors.read("any").numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "I8", "F64"])
def test_a_type_without_values_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf")
    content = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    number = int(gguf.GGMLQuantizationType[kind]).to_bytes(4, "little")
    path.write_bytes(content[:at] + number + content[at + 4 :])

    with pytest.raises(
        ModelUnavailable, match=rf"tensor blk.0.ffn_up.weight has type {kind}; supported are F32"
    ) as caught:
        _load(path)
    assert caught.value.code == "ModelUnsupported"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_gguf_that_is_cut_short_is_one_line(tmp_path: Path, share: float) -> None:
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelUnavailable, match=r"model\.gguf") as caught:
        _load(path)
    assert caught.value.code == "ModelCorrupt"
    assert "\n" not in str(caught.value)
    if share > 0.1:
        assert "tensor" in str(caught.value)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_the_shards_of_all_ranks_are_the_whole_model(
    tmp_path: Path, kind: gguf.GGMLQuantizationType | None, size: int
) -> None:
    """Also where a rank's columns begin within a block: with four ranks, at 16 of 32."""
    path = make_tiny_llama(tmp_path / "model", tied_head=False)
    if kind is not None:
        path = make_gguf(path, tmp_path / "model.gguf", kind=kind)
    tensors = open_tensors(path)

    for name, shape in expected_shapes(tensors.architecture).items():
        cuts = [Shard(rank, size).cut(name, shape) for rank in range(size)]
        if cuts[0] is None:
            assert cuts == [None] * size
            continue
        parts = [tensors.read(name, cut) for cut in cuts]
        assert torch.equal(torch.cat(parts, dim=cuts[0].dimension), tensors.read(name)), name
        assert all(part.numel() * size == tensors.read(name).numel() for part in parts), name


def test_a_block_is_never_taken_apart(tmp_path: Path) -> None:
    """64 columns in blocks of 32: two ranks have whole ones, four have none, and their values all the same."""
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf")
    tensors = open_tensors(path)
    name, rows = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    whole = tensors.blocks(name)
    assert whole is not None

    halves = [tensors.blocks(name, Shard(rank, 2).cut(name, (64, 64))) for rank in range(2)]
    assert torch.equal(torch.cat([half.data for half in halves if half is not None], dim=1), whole.data)
    assert tensors.blocks(name, Shard(1, 4).cut(name, (64, 64))) is None
    quarter = tensors.blocks(rows, Shard(1, 4).cut(rows, (64, 64)))
    assert quarter is not None
    assert len(quarter.data) == 16


def test_a_bias_that_follows_a_sum_over_ranks_is_added_once(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", config={"attention_bias": True, "mlp_bias": True})
    tensors = open_tensors(path)
    layers = [
        next(load(tensors, torch.float32, torch.device("cpu"), lambda _: None, shard=Shard(rank, 2)).layers)
        for rank in range(2)
    ]

    assert [layer.attention_out_bias is None for layer in layers] == [False, True]
    assert [layer.down_bias is None for layer in layers] == [False, True]
    assert [bias.shape for layer in layers if (bias := layer.qkv_bias) is not None] == [(64,), (64,)]


def test_the_vocabulary_is_split_though_it_does_not_divide() -> None:
    rows = [Shard(rank, 4).vocabulary(10) for rank in range(4)]

    assert [(cut.first, cut.end) for cut in rows] == [(0, 3), (3, 6), (6, 9), (9, 10)]
