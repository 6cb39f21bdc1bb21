"""Matrices rounded to blocks of 32 weights: what `model.quantization` says, and what becomes of their values.

A rounded matrix is one set of numbers in two forms: blocks, which steps of few tokens multiply with, and the same
values in the data type, which prefill and large batches multiply with. Both give the same result but for rounding, so a
request's tokens do not depend on who it was batched with. Formats are GGUF's Q8_0 and Q4_1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice_engine.config import Quantization
from sluice_engine.errors import InvalidConfig
from sluice_engine.kernels.block_types import ROUNDED_TO, WEIGHTS
from sluice_engine.kernels.library import Blocks
from sluice_engine.model_files.architecture import Architecture

# Of a matrix at a time: the rounding takes several times what it rounds.
_ROWS = 4096


def check(quantization: Quantization, architecture: Architecture, device: torch.device) -> None:
    """Whether the model can be held so.

    Raises:
        InvalidConfig: it cannot, and why.
    """
    if quantization not in ROUNDED_TO:
        return
    if device.type != "cpu":
        raise InvalidConfig("model.quantization", f"is {quantization}, which is for CPUs; leave it out for a GPU")
    widths = {
        architecture.hidden_size,
        architecture.intermediate_size,
        architecture.num_heads * architecture.head_dim,
    }
    if odd := [width for width in sorted(widths) if width % WEIGHTS]:
        raise InvalidConfig(
            "model.quantization", f"is {quantization}, of {WEIGHTS} weights a block; the model has rows of {odd[0]}"
        )


def rounded(values: Tensor, kind: int) -> tuple[Tensor, Blocks | None]:
    """A matrix [out, in] in float32 as what its blocks stand for, and the blocks; none where rows do not divide."""
    import gguf  # noqa: PLC0415  # GGUF files alone need it

    quantised = gguf.GGMLQuantizationType(kind)
    parts, blocks = [], []
    for first in range(0, len(values), _ROWS):
        raw = gguf.quants.quantize(values[first : first + _ROWS].numpy(), quantised)
        parts.append(torch.from_numpy(gguf.quants.dequantize(raw, quantised)))
        blocks.append(Blocks.from_file(raw, kind))
    return torch.cat(parts), Blocks.stacked(blocks)
