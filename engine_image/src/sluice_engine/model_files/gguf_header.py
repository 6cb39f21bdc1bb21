"""The head of a GGUF file as plain values: its metadata, and where its tensors are.

A tokenizer needs a hundred thousand strings from the metadata, which the `gguf` package wraps one by one in arrays
(seconds; here a tenth of one). What is in the tensors is the weights' business. A damaged file is `ModelUnavailable`,
never a struct error. Source: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from sluice_engine.errors import ModelUnavailable

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_HEAD = struct.Struct("<4sIQQ")
_TENSOR_TAIL = struct.Struct("<IQ")
_MAX_DIMENSIONS = 4  # of the format itself


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One line of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """Rows first."""
    kind: int
    """GGUF's number of the type."""
    offset: int
    """From where the tensors begin."""


def read_metadata(path: Path) -> dict[str, Value]:
    """Key → value of everything that precedes the tensors.

    Raises:
        ModelUnavailable: unreadable, not GGUF, another version, or cut short.
    """
    return read_head(path, with_tensors=False)[0]


def read_head(path: Path, *, with_tensors: bool = True) -> tuple[dict[str, Value], list[TensorLine]]:
    """The metadata, and the tensor directory.

    Raises:
        ModelUnavailable: unreadable, not GGUF, another version, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = HeaderReader(data)
            return reader.metadata(), reader.tensors() if with_tensors else []
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}", "ModelMissing") from error
    except (ValueError, struct.error, IndexError, OverflowError) as error:
        raise ModelUnavailable(f"{path} is not a sound GGUF file: {error}", "ModelCorrupt") from error


class HeaderReader:
    """A cursor over the mapped file: the metadata, then, for whoever goes on, the tensor directory."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0
        """Byte that is read next."""

    def metadata(self) -> dict[str, Value]:
        """Key → value, from the beginning of the file.

        Raises:
            ValueError: not GGUF, another version, or damaged. `struct.error`, `IndexError` where it is cut short.
        """
        magic, version, _tensors, num_keys = _HEAD.unpack_from(self._data, 0)
        if magic != b"GGUF":
            raise ValueError("it does not start with GGUF")
        if version not in {2, 3}:
            raise ValueError(f"version {version} is not supported; 2 and 3 are")
        self.at = _HEAD.size
        return {self.string(): self._value(self._unpack(_TYPE)) for _ in range(self.count(num_keys, 13))}

    def tensors(self) -> list[TensorLine]:
        """The tensor directory, which follows the metadata.

        Raises:
            ValueError: damaged. `struct.error`, `IndexError` where it is cut short.
        """
        _magic, _version, num_tensors, _keys = _HEAD.unpack_from(self._data, 0)
        return [self._tensor() for _ in range(self.count(num_tensors, _TENSOR_TAIL.size))]

    def _tensor(self) -> TensorLine:
        name = self.string()
        dimensions = self._unpack(_TYPE)
        assert isinstance(dimensions, int)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", self._data, self.at)
        self.at += _LENGTH.size * dimensions
        kind, offset = _TENSOR_TAIL.unpack_from(self._data, self.at)
        self.at += _TENSOR_TAIL.size
        return TensorLine(name, tuple(reversed(shape)), kind, offset)

    def _value(self, kind: object) -> Value:
        if kind != _ARRAY:
            return self._scalar(kind)
        item_kind = self._unpack(_TYPE)
        size = _LENGTH.size if item_kind == _STRING else 1
        return [self._scalar(item_kind) for _ in range(self.count(self._unpack(_LENGTH), size))]

    def _scalar(self, kind: object) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} at byte {self.at}")
        return self._unpack(_SCALARS[kind])

    def string(self) -> str:
        """The string that comes next."""
        length = self.count(self._unpack(_LENGTH), 1)
        text = self._data[self.at : self.at + length].decode()
        self.at += length
        return text

    def _unpack(self, layout: struct.Struct) -> Scalar:
        (value,) = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return value  # type: ignore[no-any-return]  # the layouts hold one scalar each

    def count(self, number: object, item_bytes: int) -> int:
        """A count that the rest of the file can hold, so that a damaged one does not ask for terabytes."""
        assert isinstance(number, int)
        if number * item_bytes > len(self._data) - self.at:
            raise ValueError(f"it ends early: {number} items cannot follow byte {self.at}")
        return number
