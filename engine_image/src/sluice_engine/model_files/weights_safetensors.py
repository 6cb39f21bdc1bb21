"""Tensors of a Hugging Face directory: one `model.safetensors`, or shards named by an index.

Owns the files' directory. Headers are checked here before the library opens a file, so that a damaged one is named with
its tensor in one line.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from sluice_engine.errors import ModelUnavailable
from sluice_engine.kernels.library import Blocks
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.hf_config import read_hf_config
from sluice_engine.model_files.shard import Cut

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000  # of the format itself


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies."""

    path: Path
    shape: tuple[int, ...]
    num_bytes: int


class SafetensorsTensors:
    """The tensors of one Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        """Read configuration, index and headers.

        Raises:
            ModelUnavailable: a file is missing, damaged, cut short, or not a supported architecture.
        """
        self.where = directory
        self.architecture: Architecture = read_hf_config(directory / "config.json")
        self._entries: dict[str, Entry] = {}
        for path in _files(directory):
            self._entries.update(read_header(path))
        # Opened once a file: its header is parsed on each opening.
        self._open: tuple[Path, Any] | None = None

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._entries)

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        return self._entries[name].num_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """A tensor, or a part of one, in the type it is stored in; nothing else is read of the file."""
        path = self._entries[name].path
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(path, framework="pt"))
        if cut is None:
            tensor: Tensor = self._open[1].get_tensor(name)
        else:
            part = slice(cut.first, cut.end)
            tensor = self._open[1].get_slice(name)[part if cut.dimension == 0 else (slice(None), part)]
        return tensor

    def blocks(self, name: str, cut: Cut | None = None) -> Blocks | None:  # noqa: ARG002  # the format has none
        """Nothing: blocks are GGUF's."""
        return None


def _files(directory: Path) -> list[Path]:
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelUnavailable(f"{directory} has neither {_SINGLE} nor {_INDEX}", "ModelMissing")
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except OSError as error:
        raise ModelUnavailable(f"{index} cannot be read: {error.strerror}", "ModelMissing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelUnavailable(f"{index} is not an index of safetensors: no weight_map", "ModelCorrupt") from error
    paths = [directory / name for name in sorted(names)]
    for path in paths:
        if path.parent != directory or not path.is_file():
            raise ModelUnavailable(f"{path}, named by {_INDEX}, is missing", "ModelMissing")
    return paths


def read_header(path: Path) -> dict[str, Entry]:
    """Where each tensor of a file lies.

    Raises:
        ModelUnavailable: unreadable, damaged, cut short, or of a type that is not supported.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelUnavailable(f"{path} is cut short within its header", "ModelCorrupt")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            return {name: _entry(path, name, line, size - 8 - length) for name, line in header.items()}
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}", "ModelMissing") from error
    except (ValueError, struct.error, TypeError, AttributeError, RecursionError) as error:
        raise ModelUnavailable(f"{path} is not a safetensors file", "ModelCorrupt") from error


def _entry(path: Path, name: str, line: object, data_bytes: int) -> Entry:
    match line:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
            isinstance(size, int) for size in shape
        ):
            pass
        case _:
            raise ModelUnavailable(f"{path}: tensor {name} has a damaged header entry", "ModelCorrupt")
    if kind not in _ELEMENT_BYTES:
        known = ", ".join(_ELEMENT_BYTES)
        raise ModelUnavailable(f"{path}: tensor {name} has type {kind}; supported are {known}", "ModelUnsupported")
    if end - start != math.prod(shape) * _ELEMENT_BYTES[kind]:
        raise ModelUnavailable(f"{path}: tensor {name} of shape {shape} holds {end - start} bytes", "ModelCorrupt")
    if end > data_bytes:
        raise ModelUnavailable(f"{path}: tensor {name} is cut short: the file ends within it", "ModelCorrupt")
    return Entry(path, tuple(shape), end - start)
