"""The architecture that a GGUF file's metadata and tensor names describe, and how its tensors are called.

Families are llama.cpp's: Mistral's models, too, are `llama` there. A field of the family is read, known to change
nothing, or refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.model_fields import ModelFields
from sluice_engine.model_files.rope import RopeScaling, yarn_attention_factor


@dataclass(frozen=True, slots=True)
class _Family:
    """What sets a family apart from Llama."""

    rotary_pairs: bool = False
    """Whether the converter laid the dimensions that are turned together side by side."""
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {"llama": _Family(rotary_pairs=True), "qwen2": _Family(qkv_bias=True), "qwen3": _Family(qk_norm=True)}
_KNOWN = (
    "block_count context_length embedding_length feed_forward_length vocab_size expert_count expert_used_count "
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon attention.sliding_window attention.causal rope.dimension_count rope.freq_base "
    "rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.attn_factor tensor_data_layout"
)
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with a factor for each rotary frequency: how Llama 3's scaling comes."""

_LAYER_NAMES = {
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
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def has_rotary_pairs(metadata: Mapping[str, object]) -> bool:
    """Whether rows of q and k are in rotary pairs, in a file whose architecture was read."""
    return _FAMILIES[str(metadata["general.architecture"])].rotary_pairs


def tensor_names(num_layers: int) -> dict[str, str]:
    """Hugging Face's name of each tensor that a family may have → the file's."""
    names = dict(_NAMES)
    for layer in range(num_layers):
        for theirs, own in _LAYER_NAMES.items():
            for part in ("weight", "bias"):
                names[f"model.layers.{layer}.{theirs}.{part}"] = f"blk.{layer}.{own}.{part}"
    return names


def read_gguf_metadata(
    where: Path,
    metadata: Mapping[str, object],
    tensor_names: frozenset[str],
    rope_factors: tuple[float, ...] | None = None,
) -> Architecture:
    """The architecture that the metadata of a GGUF file describes; `rope_factors`: what tensor `ROPE_FACTORS` holds.

    Raises:
        ModelUnavailable: incomplete, or not a model that the runner computes.
    """
    kind = metadata.get("general.architecture")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    fields = ModelFields(str(where), metadata, f"{kind}.")
    if family is None:
        fields.unsupported(f"general.architecture {kind!r}; supported are {', '.join(_FAMILIES)}")
    fields.known(_KNOWN.split())
    fields.only("expert_count", 0, default=0)
    fields.only("attention.causal", True, default=True)
    num_heads, hidden_size, num_layers = (
        fields.count(name) for name in ("attention.head_count", "embedding_length", "block_count")
    )
    head_dim = fields.count("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        fields.only(name, head_dim, default=head_dim)
    window = fields.count("attention.sliding_window") if fields.get("attention.sliding_window") else None
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    return fields.checked(
        Architecture(
            vocab_size=fields.count("vocab_size", len(vocabulary) if isinstance(vocabulary, list) else None),
            hidden_size=hidden_size,
            intermediate_size=fields.count("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_length_tokens=fields.count("context_length"),
            norm_epsilon=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10_000.0),
            rope_scaling=_scaling(fields, head_dim, rope_factors),
            tied_head="output.weight" not in tensor_names,
            qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            qk_norm=family.qk_norm,
            sliding_window=window,
            sliding_layers=tuple(range(num_layers)) if window else (),
        )
    )


def _scaling(fields: ModelFields, head_dim: int, factors: tuple[float, ...] | None) -> RopeScaling | None:
    kind = str(fields.get("rope.scaling.type", "none"))
    if kind not in {"none", "linear", "yarn"}:
        fields.unsupported(f"rope.scaling.type {kind!r}; supported are none, linear and yarn")
    if factors is not None:
        if kind != "none":
            fields.unsupported(f"rope.scaling.type {kind!r} beside the tensor {ROPE_FACTORS}")
        if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
            fields.corrupt(f"tensor {ROPE_FACTORS} must hold {head_dim // 2} positive numbers")
        return RopeScaling(kind="factors", factors=factors)
    # With attn_factor the file says what else q and k are multiplied by.
    fields.only("rope.scaling.attn_factor", 1.0, default=1.0)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("rope.scaling.factor"))
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor")
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_length_tokens=fields.count("rope.scaling.original_context_length", fields.count("context_length")),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=yarn_attention_factor(factor),
        )
    return None
