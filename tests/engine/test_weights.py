"""Models that are damaged, incomplete or of another kind: each refused in one line that names file and part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.reference import Reference, greedy, load_runner, run
from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable
from sluice_engine.weights import load, open_tensors
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
        pytest.param(_edit_config(attention_bias=True), "ModelUnsupported", "attention_bias True", id="attention bias"),
        pytest.param(_edit_config(mlp_bias=True), "ModelUnsupported", "mlp_bias True", id="mlp bias"),
        pytest.param(_edit_config(hidden_act="gelu"), "ModelUnsupported", "hidden_act 'gelu'", id="gelu"),
        pytest.param(_edit_config(sliding_window=64), "ModelUnsupported", "sliding_window 64", id="sliding window"),
        pytest.param(
            _edit_config(quantization_config={"bits": 4}), "ModelUnsupported", "quantization_config", id="quantised"
        ),
        pytest.param(
            _edit_config(rope_scaling={"type": "yarn", "factor": 4}),
            "ModelUnsupported",
            "rope scaling 'yarn'",
            id="yarn",
        ),
        pytest.param(_edit_config(hidden_size="DELETE"), "ModelCorrupt", "hidden_size is missing", id="no hidden size"),
        pytest.param(_edit_config(vocab_size=-3), "ModelCorrupt", "vocab_size must be a positive", id="negative size"),
        pytest.param(
            _edit_config(num_key_value_heads=3), "ModelCorrupt", "8 attention heads", id="heads do not divide"
        ),
        pytest.param(_edit_config(vocab_size=300), "ModelCorrupt", r"\[260, 64\].*asks for \[300, 64\]", id="shape"),
        pytest.param(_write("config.json", b"{"), "ModelCorrupt", "config.json is not JSON", id="config cut short"),
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


def _permuted(rows: torch.Tensor, num_heads: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Rows of q or k as llama.cpp's converter writes them."""
    size_out, size_in = rows.shape
    return (
        rows.numpy()
        .reshape(num_heads, 2, size_out // num_heads // 2, size_in)
        .swapaxes(1, 2)
        .reshape(size_out, size_in)
    )


def make_gguf(directory: Path, path: Path, **overrides: object) -> Path:
    """A tiny model's directory as a GGUF file: matrices in Q8_0 where they divide, the rest in float32."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    writer = gguf.GGUFWriter(path, str(overrides.get("architecture", "llama")))
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(8)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(260)
    if "scaling" in overrides:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    for name, tensor in load_file(directory / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            own = f"blk.{layer}.{names[rest]}.weight"
        else:
            own = f"{names[stem]}.weight"
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _permuted(tensor, 8 if "q_proj" in name else 4)
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, values)
    if "extra" in overrides:
        writer.add_tensor(str(overrides["extra"]), np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied_head", [True, False])
def test_a_gguf_file_says_what_transformers_says_of_the_same_weights(tmp_path: Path, tied_head: bool) -> None:  # noqa: FBT001
    directory = make_tiny_llama(tmp_path / "model", tied_head=tied_head)
    path = make_gguf(directory, tmp_path / "model.gguf")
    # The reference gets the quantised values, in its own order of rows.
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        kind = gguf.GGMLQuantizationType.Q8_0
        rounded = (
            gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind) if tensor.ndim == 2 else tensor
        )
        tensors[name] = torch.as_tensor(rounded).clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
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
            {"architecture": "qwen2"}, "ModelUnsupported", "general.architecture 'qwen2'", id="another family"
        ),
        pytest.param({"scaling": True}, "ModelUnsupported", "llama.rope.scaling.type 'yarn'", id="yarn"),
        pytest.param({"extra": "rope_freqs.weight"}, "ModelUnsupported", "tensor rope_freqs.weight", id="frequencies"),
        pytest.param({"extra": "blk.0.attn_q.bias"}, "ModelUnsupported", "tensor blk.0.attn_q.bias", id="a bias"),
    ],
)
def test_a_gguf_of_another_kind_is_one_line(tmp_path: Path, overrides: dict[str, object], code: str, says: str) -> None:
    path = make_gguf(make_tiny_llama(tmp_path / "model"), tmp_path / "model.gguf", **overrides)
    with pytest.raises(ModelUnavailable, match=says) as caught:
        _load(path)
    assert caught.value.code == code
    assert str(path) in str(caught.value)


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
