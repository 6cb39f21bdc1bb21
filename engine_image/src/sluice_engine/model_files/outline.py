"""What a model's headers tell before anything is loaded: its shape, and what a CPU will hold of it.

For whoever judges a manifest where no engine runs. Knows no tensor's values; no torch. Start with `outline`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sluice_engine.config import ModelSource, Quantization
from sluice_engine.kernels.block_types import Q4_1, Q8_0, ROUNDED_TO, SCALES, WEIGHTS, block_bytes
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.gguf_header import TensorLine, read_head
from sluice_engine.model_files.gguf_metadata import read_gguf_metadata
from sluice_engine.model_files.hf_config import read_hf_config
from sluice_engine.model_files.shard import WHOLE
from sluice_engine.model_files.sources import resolve

KEEP_ROWS_UP_TO_BYTES = 1 << 30
"""Up to this size a CPU holds layers twice, in rows and reordered, so that a single stream is as fast as its memory."""

_INTEGER_ELEMENT_BYTES = 2
# Matrices that are held as one, so that their blocks are of one type or not kept.
_AS_ONE = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as its headers have it."""

    architecture: Architecture
    blocks: tuple[tuple[int, int], ...] = ()
    """GGUF's number of a type, and how many of the file's blocks are of it: of those that a CPU multiplies with."""

    def held_bytes(self, element_bytes: int, quantization: Quantization) -> int:
        """What a CPU holds of the weights at least: in the data type, a tied head once more for products, as blocks.

        With bfloat16, what is there as blocks is there in no other form, unless the CPU has matrix units.
        """
        shape = self.architecture
        head_values = shape.vocab_size * shape.hidden_size
        values = WHOLE.least_weight_values(shape) + (head_values if shape.tied_head else 0)
        blocks = dict(self.blocks) if quantization == "Auto" else {}
        if (kind := ROUNDED_TO.get(quantization)) is not None:
            blocks = {kind: (shape.layer_values + head_values) // WEIGHTS}
        if blocks and element_bytes == _INTEGER_ELEMENT_BYTES:
            values -= sum(blocks.values()) * WEIGHTS
            return values * element_bytes + _bytes_of(blocks, scale_bytes=2)
        if not blocks and shape.layer_values * element_bytes <= KEEP_ROWS_UP_TO_BYTES:
            values += shape.layer_values
        return values * element_bytes + _bytes_of(blocks, scale_bytes=4)


def _bytes_of(blocks: Mapping[int, int], scale_bytes: int) -> int:
    return sum(number * block_bytes(kind, scale_bytes) for kind, number in blocks.items())


DEMOS = {
    "smollm2-135m": Outline(
        Architecture(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_length_tokens=8192,
            norm_epsilon=9.999999747378752e-06,
            rope_theta=100_000.0,
            tied_head=True,
        ),
        blocks=((Q4_1, 3_317_760), (Q8_0, 884_736)),
    )
}
"""The demo models, known without their files: those are in the engine's image."""


def outline(source: ModelSource) -> Outline:
    """What is known of a model: of a demo always, else of what lies on this machine.

    Raises:
        ModelUnavailable: there are no such files, or they are damaged or not supported.
    """
    if source.demo is not None and source.demo in DEMOS:
        return DEMOS[source.demo]
    return read_outline(resolve(source))


def read_outline(path: Path) -> Outline:
    """What the headers of a Hugging Face directory or a GGUF file tell.

    Raises:
        ModelUnavailable: missing, damaged or not supported.
    """
    if path.is_dir():
        return Outline(read_hf_config(path / "config.json"))
    metadata, lines = read_head(path)
    architecture = read_gguf_metadata(path, metadata, frozenset(line.name for line in lines))
    return Outline(architecture, _blocks(lines, is_tied=architecture.tied_head))


def _blocks(lines: Iterable[TensorLine], *, is_tied: bool) -> tuple[tuple[int, int], ...]:
    """Of the matrices that are multiplied with: not an embedding that is no head, nor unlike parts of one matrix."""

    def group(line: TensorLine) -> str:
        layer, _, rest = line.name.removesuffix(".weight").rpartition(".")
        return f"{layer}.{_AS_ONE.get(rest, rest)}"

    matrices = [line for line in lines if len(line.shape) > 1 and (is_tied or line.name != "token_embd.weight")]
    found: Counter[int] = Counter()
    for _, parts in groupby(sorted(matrices, key=group), key=group):
        held = list(parts)
        kinds = {line.kind for line in held}
        if len(kinds) == 1 and held[0].kind in SCALES:
            found[held[0].kind] += sum(math.prod(line.shape) for line in held) // WEIGHTS
    return tuple(sorted(found.items()))
