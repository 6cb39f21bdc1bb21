"""Writes a tiny model's directory as a GGUF file, as llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Where the converter puts a family that has no name of its own there.
_ARCHITECTURES = {"mistral": "llama"}


def make_gguf(
    directory: Path,
    path: Path,
    *,
    kind: Kind = Kind.Q8_0,
    architecture: str | None = None,
    fields: dict[str, Any] | None = None,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
    raw: dict[str, tuple[npt.NDArray[np.uint8], Kind]] | None = None,
) -> Path:
    """Matrices in `kind`, the rest in float32; `fields`, `extra` tensors and `raw` blocks come on top."""
    config = json.loads((directory / "config.json").read_text())
    own = architecture or _ARCHITECTURES.get(config["model_type"], config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, own)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for name, value in (fields or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add[type(value)](f"{own}.{name}", value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        stem, _, part = name.rpartition(".")
        short = _NAMES[stem.split(".", 3)[3] if stem.startswith("model.layers.") else stem]
        prefix = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        if own == "llama" and stem.endswith(("q_proj", "k_proj")):
            tensor = _permuted(tensor, heads if stem.endswith("q_proj") else kv_heads)  # noqa: PLW2901
        if tensor.ndim == 2 and kind is not Kind.F32:
            writer.add_tensor(f"{prefix}{short}.{part}", gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{prefix}{short}.{part}", tensor.numpy())
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    for name, (blocks, of) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_like(directory: Path, kind: Kind = Kind.Q8_0) -> None:
    """Give the directory's matrices the values that they have in the file: the reference reads them from there."""
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if tensor.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        tensors[name] = torch.as_tensor(values).clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _permuted(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k as the converter writes them for Llama."""
    return rows.view(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()
