"""Tensors of a GGUF file, dequantised, under the names that Hugging Face gives them.

Owns the file's tensor directory and the quantised formats (through the `gguf` package). The converter to GGUF reorders
the rows of q and k so that the two dimensions which rotary embedding turns together lie side by side; `read` undoes it,
so a tensor is the same whichever file it came from.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice_engine.errors import ModelUnavailable
from sluice_engine.kernels.block_types import SCALES
from sluice_engine.kernels.library import Blocks
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.gguf_header import HeaderReader
from sluice_engine.model_files.gguf_metadata import ROPE_FACTORS, has_rotary_pairs, read_gguf_metadata, tensor_names
from sluice_engine.model_files.shard import Cut

if TYPE_CHECKING:
    import gguf

_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the tensor directory."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFTensors:
    """The tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read the directory and check that every tensor lies within the file.

        Raises:
            ModelUnavailable: unreadable, damaged, cut short, or not a supported architecture.
        """
        self.where = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, self._entries = _directory(data, path)
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read: {error.strerror}", "ModelMissing") from error
        except (ValueError, struct.error, IndexError, OverflowError) as error:
            raise ModelUnavailable(f"{path} is not a sound GGUF file: {error}", "ModelCorrupt") from error
        self._data = np.memmap(path, mode="r", dtype=np.uint8)
        scaling = self._entries.get(ROPE_FACTORS)
        factors = tuple(self._values(scaling).ravel().tolist()) if scaling is not None else None
        self.architecture: Architecture = read_gguf_metadata(path, metadata, frozenset(self._entries), factors)
        self._names = tensor_names(self.architecture.num_layers)
        self._has_rotary_pairs = has_rotary_pairs(metadata)

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors; one that has none keeps its own."""
        own = {theirs: name for name, theirs in self._names.items()}
        # The factors of rotary frequencies are part of the architecture.
        return frozenset(own.get(name, name) for name in self._entries.keys() - {ROPE_FACTORS})

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self._entry(name).num_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as torch sees it: rows first."""
        return self._entry(name).shape

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """A tensor, or a part of one, in float32, q and k rows in Hugging Face's order."""
        tensor = torch.from_numpy(self._values(self._entry(name), cut))
        if self._has_rotary_pairs and is_turned(name):
            tensor = _unpermuted(tensor, self.architecture.head_dim)
        return tensor

    def blocks(self, name: str, cut: Cut | None = None) -> Blocks | None:
        """A tensor's own blocks, where kernels multiply with such; q and k rows in rotary pairs.

        None where a part begins or ends within a block, which is never taken apart.
        """
        entry = self._entry(name)
        if int(entry.kind) not in SCALES or (cut is not None and not _is_whole(cut, entry)):
            return None
        blocks = Blocks.from_file(self._raw(entry, cut), int(entry.kind))
        if is_turned(name) and not self._has_rotary_pairs:
            return Blocks(in_rotary_pairs(blocks.data, self.architecture.head_dim), blocks.kind)
        return blocks

    def _entry(self, name: str) -> _Entry:
        return self._entries[self._names.get(name, name)]

    def _raw(self, entry: _Entry, cut: Cut | None = None) -> npt.NDArray[np.uint8]:
        """A tensor as it lies in the file: [rows, bytes of a row]; of a part, the blocks that it lies in."""
        import gguf  # noqa: PLC0415  # GGUF files alone need it

        block_size, type_size = (int(size) for size in gguf.GGML_QUANT_SIZES[entry.kind])
        row_bytes = entry.shape[-1] * type_size // block_size
        rows = self._data[entry.offset : entry.offset + entry.num_bytes].reshape(-1, row_bytes)
        if cut is None:
            return rows
        if cut.dimension == 0 and len(entry.shape) > 1:
            return rows[cut.first : cut.end]
        return rows[:, cut.first // block_size * type_size : -(-cut.end // block_size) * type_size]

    def _values(self, entry: _Entry, cut: Cut | None = None) -> npt.NDArray[np.float32]:
        import gguf  # noqa: PLC0415  # GGUF files alone need it

        values = np.array(gguf.quants.dequantize(self._raw(entry, cut), entry.kind), dtype=np.float32)
        if cut is None:
            return values.reshape(entry.shape)
        if cut.dimension == 0 and len(entry.shape) > 1:
            return values.reshape(-1, *entry.shape[1:])
        values = values.reshape(*entry.shape[:-1], -1)
        before = cut.first % int(gguf.GGML_QUANT_SIZES[entry.kind][0])
        return np.ascontiguousarray(values[..., before : before + cut.end - cut.first])


def _is_whole(cut: Cut, entry: _Entry) -> bool:
    """Whether a part of a matrix consists of whole blocks; those lie within rows."""
    import gguf  # noqa: PLC0415  # GGUF files alone need it

    block_size = int(gguf.GGML_QUANT_SIZES[entry.kind][0])
    return cut.dimension == 0 or not (cut.first % block_size or cut.end % block_size)


def in_rotary_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """[out, …] with dimensions i and i + D/2 of each head side by side."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _unpermuted(rows: Tensor, head_dim: int) -> Tensor:
    """[out, …] with the halves of each head apart again: pairs (i, i + D/2), not (2i, 2i + 1)."""
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def is_turned(name: str) -> bool:
    """Whether a tensor's rows are dimensions that rotary embedding turns."""
    return name.rpartition(".")[0].endswith(("q_proj", "k_proj", "q_norm", "k_norm"))


@cache
def can_read(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the `gguf` package knows what values this type stands for: asked of it, with a block of zeros."""
    import gguf  # noqa: PLC0415  # GGUF files alone need it

    try:
        gguf.quants.dequantize(np.zeros((1, int(gguf.GGML_QUANT_SIZES[kind][1])), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _directory(data: mmap.mmap, path: Path) -> tuple[dict[str, object], dict[str, _Entry]]:
    reader = HeaderReader(data)
    metadata: dict[str, object] = dict(reader.metadata())
    lines = reader.tensors()
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    base = -(-reader.at // alignment) * alignment
    entries = {}
    for line in lines:
        entry = _entry(path, line.name, line.shape, line.kind, base + line.offset)
        if entry.offset + entry.num_bytes > len(data):
            raise ModelUnavailable(f"{path}: tensor {line.name} is cut short: the file ends within it", "ModelCorrupt")
        entries[line.name] = entry
    return metadata, entries


def _entry(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> _Entry:
    import gguf  # noqa: PLC0415  # GGUF files alone need it

    try:
        quantisation = gguf.GGMLQuantizationType(kind)
        block_size, type_size = gguf.GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError):
        raise ModelUnavailable(f"{path}: tensor {name} has the unknown type {kind}", "ModelUnsupported") from None
    if not can_read(quantisation):
        known = ", ".join(kind.name for kind in gguf.GGMLQuantizationType if can_read(kind))
        raise ModelUnavailable(
            f"{path}: tensor {name} has type {quantisation.name}; supported are {known}", "ModelUnsupported"
        )
    num_elements = int(np.prod(shape, dtype=np.uint64))
    if shape[-1] % int(block_size) or not num_elements:
        raise ModelUnavailable(f"{path}: tensor {name} has the impossible shape {list(shape)}", "ModelCorrupt")
    return _Entry(shape, quantisation, offset, num_elements * int(type_size) // int(block_size))
