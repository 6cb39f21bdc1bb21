"""Llamas of stated shapes with random weights from a seed, as a Hugging Face directory without a tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """What a config.json says."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    dtype: torch.dtype
    max_length_tokens: int = 8192


TINY = Shape("tiny", 64, 128, 2, 4, 2, 300, torch.float32, 512)
SMALL = Shape("small", 512, 1408, 6, 8, 4, 8192, torch.float32)
# As Llama 3.2 1B, but for a vocabulary of a quarter.
ONE_BILLION = Shape("1b", 2048, 8192, 16, 32, 8, 32_768, torch.bfloat16)


def make(shape: Shape, folder: Path) -> Path:
    """The model's directory; it is written once."""
    path = folder / shape.name
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True)
    save_file(dict(_tensors(shape)), path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def _tensors(shape: Shape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_heads * shape.num_kv_heads

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        # Of a size that keeps activations near 1, so that no token stands out by accident.
        return torch.randn(rows, columns, generator=generator).mul_(scale / columns**0.5).to(shape.dtype)

    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, hidden, 4.0),
        "model.norm.weight": torch.ones(hidden, dtype=shape.dtype),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden, dtype=shape.dtype),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden, dtype=shape.dtype),
            f"{prefix}self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    return tensors
