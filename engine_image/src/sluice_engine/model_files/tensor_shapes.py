"""The tensors that a model of an architecture consists of: their Hugging Face names and shapes, and the check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.architecture import Architecture

# Older checkpoints store what follows from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor there has to be, in the order of a file."""
    hidden, vocab, inner = architecture.hidden_size, architecture.vocab_size, architecture.intermediate_size
    head_dim = architecture.head_dim
    q_size, kv_size = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if architecture.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    biases = [
        *(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if architecture.qkv_bias else ()),
        *(("self_attn.o_proj",) if architecture.output_bias else ()),
        *(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if architecture.mlp_bias else ()),
    ]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not architecture.tied_head:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(architecture.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"{prefix}{name}.bias": layer[name][:1] for name in biases}
    return shapes


def check_shapes(
    where: Path,
    names: frozenset[str],
    shape_of: Callable[[str], tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
) -> None:
    """Compare what a file has with what there has to be.

    Raises:
        ModelUnavailable: a tensor is missing, has another shape, or would not be computed.
    """
    for name, shape in expected.items():
        if name not in names:
            raise ModelUnavailable(f"{where}: tensor {name} is missing", "ModelCorrupt")
        if shape_of(name) != shape:
            raise ModelUnavailable(
                f"{where}: tensor {name} has shape {list(shape_of(name))}; the configuration asks for {list(shape)}",
                "ModelCorrupt",
            )
    # A tied checkpoint may store the head a second time; anything else is a part that would silently not be computed.
    for name in sorted(names - expected.keys() - {"lm_head.weight"}):
        if not name.endswith(_DERIVED_SUFFIX):
            raise ModelUnavailable(f"{where}: unsupported tensor {name}", "ModelUnsupported")
