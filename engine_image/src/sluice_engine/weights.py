"""A model's weights, checked and laid out for the runner.

Owns the names and shapes of a Llama's tensors, and the order in which they are read. The file formats are next door:
`weights_gguf` and `weights_safetensors` answer to the same names. Start with `open_tensors`, then `load`.

Three liberties, none of which changes a result beyond rounding. q, k and v (and gate and up) are one matrix each: one
large product is faster than several small ones. The rows of q and k are ordered so that the two dimensions which rotary
embedding turns together lie side by side, which makes the turn one complex product; scores are sums over dimensions, so
q and k may be reordered alike. And a layer's norms carry no weights: they are multiplied into the matrix that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sluice_engine.architecture import Architecture
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import ModelUnavailable
from sluice_engine.weights_gguf import GGUFTensors
from sluice_engine.weights_safetensors import SafetensorsTensors

# Older checkpoints store what follows from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


class Tensors(Protocol):
    """A model's tensors by their Hugging Face names."""

    where: Path
    architecture: Architecture

    def names(self) -> frozenset[str]:
        """All there are."""
        ...

    def num_bytes(self, name: str) -> int:
        """Bytes in the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        ...

    def read(self, name: str) -> Tensor:
        """The values, in any floating type."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Shapes: H hidden, F intermediate, A heads × D, G KV heads × D."""

    qkv: Tensor
    """[A + 2 G, H], the norm's weights in its columns, rows of q and k in rotary pairs"""
    attention_out: Tensor
    """[H, A]"""
    gate_up: Tensor
    """[2 F, H], the norm's weights in its columns"""
    down: Tensor
    """[H, F]"""


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model."""

    architecture: Architecture
    embedding: Tensor
    """[V, H]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[H]"""
    head: Tensor
    """[V, H]; the embedding itself where it is tied."""

    @property
    def layer_bytes(self) -> int:
        """Size of all layers' matrices."""
        return sum(
            matrix.nbytes
            for layer in self.layers
            for matrix in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        )


def open_tensors(path: Path) -> Tensors:
    """The tensors of a GGUF file or a Hugging Face directory, headers checked, nothing loaded yet.

    Raises:
        ModelUnavailable: missing, damaged or not supported.
    """
    return SafetensorsTensors(path) if path.is_dir() else GGUFTensors(path)


def load(
    tensors: Tensors, dtype: torch.dtype, device: torch.device, progress: Callable[[LoadingProgress], None]
) -> Weights:
    """Read everything.

    Raises:
        ModelUnavailable: a tensor is missing, has another shape than the configuration asks for, or is not known.
    """
    architecture = tensors.architecture
    expected = _expected_shapes(architecture)
    _check(tensors, expected)
    total = sum(tensors.num_bytes(name) for name in expected)
    done = 0

    def read(name: str) -> Tensor:
        nonlocal done
        try:
            values = tensors.read(name).to(device=device, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
            raise ModelUnavailable(f"{tensors.where}: tensor {name} cannot be read: {error}", "ModelCorrupt") from error
        done += tensors.num_bytes(name)
        progress(LoadingProgress(stage="weights", bytes_done=done, bytes_total=total))
        return values

    embedding = read("model.embed_tokens.weight").to(dtype)
    return Weights(
        architecture=architecture,
        embedding=embedding,
        layers=tuple(_layer(architecture, f"model.layers.{i}.", read, dtype) for i in range(architecture.num_layers)),
        final_norm=read("model.norm.weight").to(dtype),
        head=embedding if architecture.tied_head else read("lm_head.weight").to(dtype),
    )


def _layer(architecture: Architecture, prefix: str, read: Callable[[str], Tensor], dtype: torch.dtype) -> LayerWeights:
    """One layer, put together in float32 before it is rounded to its type."""

    def of(name: str) -> Tensor:
        return read(f"{prefix}{name}.weight")

    head_dim = architecture.head_dim
    q, k = (_in_rotary_pairs(of(f"self_attn.{name}_proj"), head_dim) for name in ("q", "k"))
    qkv = torch.cat([q, k, of("self_attn.v_proj")]).mul_(of("input_layernorm"))
    gate_up = torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]).mul_(of("post_attention_layernorm"))
    return LayerWeights(
        qkv=qkv.to(dtype),
        attention_out=of("self_attn.o_proj").to(dtype),
        gate_up=gate_up.to(dtype),
        down=of("mlp.down_proj").to(dtype),
    )


def _in_rotary_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """[out, in] with dimensions i and i + D/2 of each head side by side."""
    size_in = rows.shape[1]
    return rows.view(-1, 2, head_dim // 2, size_in).transpose(1, 2).reshape(-1, size_in)


def _expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, vocab, inner = architecture.hidden_size, architecture.vocab_size, architecture.intermediate_size
    q_size = architecture.num_heads * architecture.head_dim
    kv_size = architecture.num_kv_heads * architecture.head_dim
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
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not architecture.tied_head:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(architecture.num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _check(tensors: Tensors, expected: dict[str, tuple[int, ...]]) -> None:
    names = tensors.names()
    for name, shape in expected.items():
        if name not in names:
            raise ModelUnavailable(f"{tensors.where}: tensor {name} is missing", "ModelCorrupt")
        if tensors.shape(name) != shape:
            raise ModelUnavailable(
                f"{tensors.where}: tensor {name} has shape {list(tensors.shape(name))}; "
                f"the configuration asks for {list(shape)}",
                "ModelCorrupt",
            )
    # A tied checkpoint may store the head a second time; anything else is a part that would silently not be computed.
    for name in sorted(names - expected.keys() - {"lm_head.weight"}):
        if not name.endswith(_DERIVED_SUFFIX):
            raise ModelUnavailable(f"{tensors.where}: unsupported tensor {name}", "ModelUnsupported")
