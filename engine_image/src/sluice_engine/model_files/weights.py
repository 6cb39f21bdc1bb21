"""A model's weights, checked and laid out for the runner.

Owns the order in which tensors are read. What there has to be is `tensor_shapes`; the file formats are next door:
`weights_gguf` and `weights_safetensors` answer to the same names. Start with `open_tensors`, then `load`.

Three liberties, none of which changes a result beyond rounding. q, k and v (and gate and up) are one matrix each: one
large product is faster than several small ones. The rows of q and k are ordered so that the two dimensions which rotary
embedding turns together lie side by side, which makes the turn one complex product; scores are sums over dimensions, so
q and k may be reordered alike. And a layer's norms carry no weights: they are multiplied into the matrix that follows.
Blocks of a GGUF file, kept beside the matrices for kernels, stay as they are: their norms have weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sluice_engine.config import Quantization
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import ModelUnavailable
from sluice_engine.kernels.block_types import ROUNDED_TO
from sluice_engine.kernels.library import Blocks
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.quantization import rounded
from sluice_engine.model_files.shard import WHOLE, Cut, Shard
from sluice_engine.model_files.tensor_shapes import check_shapes, expected_shapes
from sluice_engine.model_files.weights_gguf import GGUFTensors, in_rotary_pairs, is_turned
from sluice_engine.model_files.weights_safetensors import SafetensorsTensors

_EMBEDDING = "model.embed_tokens.weight"


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

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """The values, or those of a part, in any floating type; of a tensor that is turned, whole heads."""
        ...

    def blocks(self, name: str, cut: Cut | None = None) -> Blocks | None:
        """The values as the file's own blocks, q and k rows in rotary pairs; none where it has others.

        None as well where a part begins or ends within a block.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """A layer's matrices once more, as blocks, without the norms' weights; none where kernels cannot use them."""

    qkv: Blocks | None = None
    attention_out: Blocks | None = None
    gate_up: Blocks | None = None
    down: Blocks | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, or a rank's shard of one. Shapes: H hidden, F intermediate, A heads × D, G KV heads × D."""

    qkv: Tensor
    """[A + 2 G, H], the norm's weights in its columns, rows of q and k in rotary pairs"""
    attention_out: Tensor
    """[H, A]"""
    gate_up: Tensor
    """[2 F, H], the norm's weights in its columns"""
    down: Tensor
    """[H, F]"""
    qkv_norm: Tensor
    """[H]: what is in the columns of qkv"""
    gate_up_norm: Tensor
    """[H]"""
    blocks: LayerBlocks
    qkv_bias: Tensor | None
    """[A + 2 G], rows of q and k in rotary pairs"""
    attention_out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    qk_norm: Tensor | None
    """[2, D]: of a query and of a key, in rotary pairs"""


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model, or a rank's shard of one."""

    architecture: Architecture
    """What is computed with them: of a shard its share of the heads."""
    embedding: Tensor
    """[V, H]"""
    layers: Iterator[LayerWeights]
    """Each is read when it is asked for: whoever packs it drops it before the next, and no model is held twice."""
    final_norm: Tensor
    """[H]"""
    head: Tensor
    """[V, H]; the embedding itself where it is tied. Of a shard its rows."""
    head_blocks: Blocks | None


def open_tensors(path: Path) -> Tensors:
    """The tensors of a GGUF file or a Hugging Face directory, headers checked, nothing loaded yet.

    Raises:
        ModelUnavailable: missing, damaged or not supported.
    """
    return SafetensorsTensors(path) if path.is_dir() else GGUFTensors(path)


def load(
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[LoadingProgress], None],
    *,
    keep_blocks: bool = False,
    quantization: Quantization = "Auto",
    shard: Shard = WHOLE,
) -> Weights:
    """Everything, layers as they are asked for; with `keep_blocks`, blocks as well, for kernels.

    `quantization` says which: the file's own, none, or those that matrices are rounded to, also where none are kept.
    Of a `shard` nothing else is read.

    Raises:
        ModelUnavailable: a tensor is missing, has another shape than the configuration asks for, is not known, or
            cannot be read: that one may come with a layer.
    """
    architecture = tensors.architecture
    expected = expected_shapes(architecture)
    check_shapes(tensors.where, tensors.names(), tensors.shape, expected)
    cuts = {name: shard.cut(name, shape) for name, shape in expected.items()}
    of_shard = {
        name: tensors.num_bytes(name)
        if cut is None
        else tensors.num_bytes(name) * (cut.end - cut.first) // shape[cut.dimension]
        for (name, shape), cut in zip(expected.items(), cuts.values(), strict=True)
    }
    total = sum(of_shard.values())
    done = 0

    def read(name: str) -> Tensor:
        """In float32, what rotary embedding turns in rotary pairs."""
        nonlocal done
        try:
            values = tensors.read(name, cuts[name]).to(device=device, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
            raise ModelUnavailable(f"{tensors.where}: tensor {name} cannot be read: {error}", "ModelCorrupt") from error
        done += of_shard[name]
        progress(LoadingProgress(stage="weights", bytes_done=done, bytes_total=total))
        return in_rotary_pairs(values, architecture.head_dim) if is_turned(name) else values

    def quantized(values: Tensor, *names: str) -> tuple[Tensor, Blocks | None]:
        """What `quantization` makes of the values of these tensors, and their blocks."""
        if quantization in ROUNDED_TO:
            values, blocks = rounded(values, ROUNDED_TO[quantization])
            return values, blocks if keep_blocks else None
        return values, _merged(tensors, cuts, *names) if keep_blocks and quantization == "Auto" else None

    def matrix(*names: str) -> tuple[Tensor, Blocks | None]:
        """Rows of several tensors below each other."""
        parts = [read(name) for name in names]
        # A head alone may be gigabytes: of one tensor no second one is made.
        return quantized(parts[0] if len(parts) == 1 else torch.cat(parts), *names)

    embedding = read(_EMBEDDING)
    if architecture.tied_head:
        rows = shard.vocabulary(architecture.vocab_size)
        mine = embedding if shard.size == 1 else embedding[rows.first : rows.end]
        # Read whole above, for every token; the head is a part of it.
        cuts[_EMBEDDING] = None if shard.size == 1 else rows
        head, head_blocks = quantized(mine, _EMBEDDING)
        is_embedding = head is mine
        embedding = embedding.to(dtype)
        if is_embedding:
            head = embedding if shard.size == 1 else embedding[rows.first : rows.end]
    else:
        head, head_blocks = matrix("lm_head.weight")
        embedding = embedding.to(dtype)
    head = head.to(dtype)
    mine_of_layers = shard.of(architecture)
    return Weights(
        architecture=mine_of_layers,
        embedding=embedding,
        layers=(
            _layer(mine_of_layers, f"model.layers.{index}.", read, matrix, dtype, shard)
            for index in range(architecture.num_layers)
        ),
        final_norm=read("model.norm.weight").to(dtype),
        head=head,
        head_blocks=head_blocks,
    )


def _layer(
    architecture: Architecture,
    prefix: str,
    read: Callable[[str], Tensor],
    matrix: Callable[..., tuple[Tensor, Blocks | None]],
    dtype: torch.dtype,
    shard: Shard,
) -> LayerWeights:
    """One layer, put together in float32 before it is rounded to its type."""

    def of(name: str, part: str = "weight") -> Tensor:
        return read(f"{prefix}{name}.{part}")

    def weights(*names: str) -> tuple[Tensor, Blocks | None]:
        return matrix(*(f"{prefix}{name}.weight" for name in names))

    def biases(present: bool, *names: str) -> Tensor | None:  # noqa: FBT001
        if not present or not shard.adds_bias(f"{names[0]}.bias"):
            return None
        return torch.cat([of(name, "bias") for name in names]).to(dtype)

    q_k_v, gate_and_up = [f"self_attn.{name}_proj" for name in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
    qkv_norm, gate_up_norm = of("input_layernorm"), of("post_attention_layernorm")
    qkv, qkv_blocks = weights(*q_k_v)
    attention_out, attention_out_blocks = weights("self_attn.o_proj")
    gate_up, gate_up_blocks = weights(*gate_and_up)
    down, down_blocks = weights("mlp.down_proj")
    norms = [of(f"self_attn.{name}_norm") for name in "qk"] if architecture.qk_norm else None
    return LayerWeights(
        qkv=qkv.mul_(qkv_norm).to(dtype),
        attention_out=attention_out.to(dtype),
        gate_up=gate_up.mul_(gate_up_norm).to(dtype),
        down=down.to(dtype),
        qkv_norm=qkv_norm.to(dtype),
        gate_up_norm=gate_up_norm.to(dtype),
        blocks=LayerBlocks(qkv_blocks, attention_out_blocks, gate_up_blocks, down_blocks),
        qkv_bias=biases(architecture.qkv_bias, *q_k_v),
        attention_out_bias=biases(architecture.output_bias, "self_attn.o_proj"),
        gate_up_bias=biases(architecture.mlp_bias, *gate_and_up),
        down_bias=biases(architecture.mlp_bias, "mlp.down_proj"),
        qk_norm=torch.stack(norms).to(dtype) if norms is not None else None,
    )


def _merged(tensors: Tensors, cuts: Mapping[str, Cut | None], *names: str) -> Blocks | None:
    """Rows of several tensors below each other; none unless all have blocks of one type."""
    parts = [blocks for name in names if (blocks := tensors.blocks(name, cuts[name])) is not None]
    return None if len(parts) < len(names) else Blocks.stacked(parts)
