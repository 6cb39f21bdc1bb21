"""Calls the kernels with tensors of the library's own type on the CPU, contiguous unless a stride is passed.

Owns the loaded library and the arguments' types; knows nothing of the model or of requests. torch is imported first on
purpose: its OpenMP runtime is then the one that the library finds, and both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice_engine.errors import InvalidConfig
from sluice_engine.kernels.block_types import Q8_0, SCALES, block_bytes
from sluice_engine.kernels.build import ELEMENTS, LEVELS, Found, find_or_build

log = logging.getLogger(__name__)

SWITCH = "SLUICE_KERNELS"

# The sources' own limits.
LANES = 16
ROWS_STEP = 4
"""A matrix of blocks has a multiple of this many rows."""
GROUP_ROWS = 16
"""An interleaved one of this many."""
MAX_TILE_QUERIES = 32
MAX_HEAD_DIM = 256

# More queries share what is read and widened of a block of keys; more would leave the first-level cache.
_TILE_QUERIES = 24
EVERY_ROW = 1 << 62
# Matrix units multiply many rows in bfloat16 faster than vectors do in bytes; how many is not measured.
_AMX_INTEGER_ROWS = 32
# Below this many keys a share of a context is not worth a task of its own.
_SHARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows that attend to the paged cache, a few consecutive rows of one request at a time."""

    tables: Tensor
    """[requests, M] block ids; whatever pads them is not read."""
    rows: Tensor
    """[N, 4]: first row, number of rows, tokens the first row attends to (each later one: one more), row of tables."""
    max_tokens: int
    """Tokens that the longest row attends to."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [out, in] as a GGUF file has it, 32 weights a block, but for the scales, which are float32."""

    data: Tensor
    """[out, bytes of a row]"""
    kind: int
    """GGUF's number of the type: one of `SCALES`."""

    @property
    def out_width(self) -> int:
        """Rows of the matrix."""
        return len(self.data)

    @classmethod
    def from_file(cls, raw: npt.NDArray[np.uint8], kind: int) -> Blocks:
        """Blocks [out, bytes of a row] as they lie in a file."""
        scale_bytes = 2 * SCALES[kind]
        blocks = raw.reshape(len(raw), -1, block_bytes(kind, 2))
        scales = np.ascontiguousarray(blocks[..., :scale_bytes]).view(np.float16).astype(np.float32)
        widened = np.concatenate([scales.view(np.uint8), blocks[..., scale_bytes:]], axis=-1)
        return cls(torch.from_numpy(widened.reshape(len(raw), -1)), kind)

    @classmethod
    def stacked(cls, parts: Sequence[Blocks]) -> Blocks | None:
        """Rows of several below each other; none unless all have one type and their rows come to whole steps."""
        if len({part.kind for part in parts}) > 1 or sum(len(part.data) for part in parts) % ROWS_STEP:
            return None
        return cls(torch.cat([part.data for part in parts]), parts[0].kind)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The same blocks in the order in which integer products read them: 16 rows side by side, scales as in the file."""

    data: Tensor
    """[groups, blocks of a row, bytes]: 16 scales, for Q4_1 16 least values, then fours of bytes of 16 rows in turn"""
    kind: int

    @property
    def out_width(self) -> int:
        """Rows of the matrix."""
        return len(self.data) * GROUP_ROWS

    @classmethod
    def of(cls, blocks: Blocks) -> Interleaved | None:
        """None where the rows do not come to whole groups."""
        if len(blocks.data) % GROUP_ROWS:
            return None
        scale_bytes = 4 * SCALES[blocks.kind]
        size = block_bytes(blocks.kind, 4)
        by_row = blocks.data.view(-1, GROUP_ROWS, blocks.data.shape[1] // size, size)
        scales = by_row[..., :scale_bytes].contiguous().view(torch.float32).to(torch.float16).permute(0, 2, 3, 1)
        fours = by_row[..., scale_bytes:].reshape(*by_row.shape[:3], -1, 4).permute(0, 2, 3, 1, 4).flatten(2)
        if blocks.kind == Q8_0:
            fours = fours ^ 0x80  # plus 128: one of two factors has to be unsigned
        return cls(torch.cat([scales.contiguous().view(torch.uint8).flatten(2), fours], dim=-1), blocks.kind)


class Kernels:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL, level: str, dtype: torch.dtype, cpu_flags: frozenset[str]) -> None:
        self.library = library
        self.level = level
        """Registers that it was compiled for: `avx512` or `avx2`."""
        self.dtype = dtype
        """Of every tensor that is no index: the library reads memory, and would take another type's for its own."""
        size, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        # A row's heads are one task there.
        self._rows_together = dtype is torch.bfloat16 and level == "avx512"
        self._attend = library.sluice_attend
        self._attend.argtypes = [address, address, size, address, address, size, address, *[size] * 5, real, size, size]
        self._norm = library.sluice_norm
        self._norm.argtypes = [address, address, address, size, size, real]
        self._turn_and_store = library.sluice_turn_and_store
        self._turn_and_store.argtypes = [*[address] * 5, *[size] * 4, address, real]
        self._silu_mul = library.sluice_silu_mul
        self._silu_mul.argtypes = [address, address, size, size]
        self._multiply = library.sluice_multiply
        self._multiply.argtypes = [*[address] * 4, *[size] * 4]
        self.has_vnni = "avx512_vnni" in cpu_flags
        """Whether the processor adds products of bytes in one step."""
        self.max_integer_rows = _AMX_INTEGER_ROWS if "amx_bf16" in cpu_flags else EVERY_ROW
        """Of a product in integers, where there can be one."""
        self._multiply_quantised = library.sluice_multiply_quantised if dtype is torch.bfloat16 else None
        if self._multiply_quantised is not None:
            self._multiply_quantised.argtypes = [*[address] * 4, *[size] * 5]
        for call in (self._norm, self._turn_and_store, self._silu_mul):
            call.restype = None

    def shares(self, tiles: Tiles, rows: int, kv_heads: int, window: int | None) -> int:
        """Parts that each context is split into, so that few tiles of so many rows keep all threads busy."""
        together = self._rows_together and len(tiles.rows) == rows
        tasks, wanted = len(tiles.rows) * (1 if together else kv_heads), 2 * torch.get_num_threads()
        if tasks >= wanted:
            return 1
        longest = min(tiles.max_tokens, window or tiles.max_tokens)
        return max(1, min(-(-wanted // tasks), longest // (_SHARE_TOKENS // (kv_heads if together else 1))))

    def attend(
        self,
        q: Tensor,
        tiles: Tiles,
        layer: Tensor,
        block_tokens: int,
        kv_heads: int,
        out: Tensor,
        window: int | None = None,
    ) -> None:
        """Rows of q [T, H, D], any row stride → out [T, H, D], for the rows that the tiles name.

        With a `window` each row attends to no more than the last so many of its tokens.
        `layer`: one layer's cache [blocks × block_tokens, 2 G D].
        """
        assert q.dtype is layer.dtype is out.dtype is self.dtype, "attention between types"
        _, heads, dimension = q.shape
        num_tiles = len(tiles.rows)
        shares = self.shares(tiles, len(q), kv_heads, window)
        failed = self._attend(
            out.data_ptr(), q.data_ptr(), q.stride(0), layer.data_ptr(), tiles.tables.data_ptr(),
            tiles.tables.shape[1], tiles.rows.data_ptr(), num_tiles, block_tokens, heads, kv_heads, dimension,
            dimension**-0.5, shares, window or 0,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for a split context")

    def arranged(self, blocks: Blocks) -> Blocks | Interleaved:
        """Blocks in the order in which products with them are fastest: in bfloat16 those are integer products."""
        return (Interleaved.of(blocks) if self._multiply_quantised is not None else None) or blocks

    def multiply(self, x: Tensor, blocks: Blocks | Interleaved, residual: Tensor | None = None) -> Tensor:
        """Rows [T, in] times the weights, plus the residual [T, out] where there is one.

        With interleaved blocks each 32 values of x are quantised to bytes first.
        """
        assert x.dtype is self.dtype, "a product between types"
        assert residual is None or residual.dtype is self.dtype, "a residual of another type"
        rows, in_width = x.shape
        out_width = blocks.out_width
        out = x.new_empty(rows, out_width)
        plus = None if residual is None else residual.data_ptr()
        arguments = (out.data_ptr(), x.data_ptr(), blocks.data.data_ptr(), plus, rows, in_width, out_width, blocks.kind)
        if isinstance(blocks, Blocks):
            failed = self._multiply(*arguments)
        else:
            assert self._multiply_quantised is not None, "integer products are for bfloat16"
            failed = self._multiply_quantised(*arguments, self.has_vnni)
        if failed:
            raise MemoryError("no memory for a product's input")
        return out

    def norm(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Rows of x [T, H] over their root mean square, times the weight [H]."""
        assert x.dtype is self.dtype, "a norm between types"
        assert weight is None or weight.dtype is self.dtype, "a weight of another type"
        out = torch.empty_like(x)
        weights = None if weight is None else weight.data_ptr()
        self._norm(out.data_ptr(), x.data_ptr(), weights, x.shape[0], x.shape[1], epsilon)
        return out

    def turn_and_store(
        self,
        qkv: Tensor,
        turns: Tensor,
        positions: Tensor,
        layer: Tensor,
        kv_rows: Tensor,
        heads: int,
        kv_heads: int,
        norms: tuple[Tensor, float] | None = None,
    ) -> None:
        """Turn q and k of qkv [T, (H + 2 G) D] in place to their positions, and write k and v to the cache's rows.

        `turns`: [positions, 1, D/2] complex numbers. `norms`: weights [2, D] and epsilon with which each head's query
        and key are normed before.
        """
        assert qkv.dtype is layer.dtype is self.dtype, "a cache of another type"
        assert norms is None or norms[0].dtype is self.dtype, "weights of another type"
        dimension = qkv.shape[1] // (heads + 2 * kv_heads)
        self._turn_and_store(
            qkv.data_ptr(), turns.data_ptr(), positions.data_ptr(), layer.data_ptr(), kv_rows.data_ptr(), len(qkv),
            heads, kv_heads, dimension, None if norms is None else norms[0].data_ptr(),
            0.0 if norms is None else norms[1],
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 F] → silu of the first half times the second, [T, F]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, width)
        return out


def rows_per_tile(group: int) -> int:
    """Consecutive rows that one tile takes, where `group` heads share a KV head."""
    return max(1, _TILE_QUERIES // group)


def load_kernels(cpu_flags: frozenset[str], dtype: torch.dtype) -> Kernels | str:
    """The kernels for activations and a cache of this type, or why there are none; logged once.

    Raises:
        InvalidConfig: the switch says neither on nor off.
    """
    element = str(dtype).removeprefix("torch.")
    found: Found | str
    switch = os.environ.get(SWITCH, "")
    levels = [level.name for level in LEVELS]
    if switch not in {"", "on", "off", *levels}:
        raise InvalidConfig(SWITCH, f"is {switch!r} in the environment; on, off, {' and '.join(levels)} are understood")
    if switch == "off":
        found = "switched off"
    elif element not in ELEMENTS:
        found = f"they compute in {' and '.join(ELEMENTS)}, not in {element}"
    else:
        found = find_or_build(cpu_flags, element, switch if switch in levels else None)
    result: Kernels | str
    if isinstance(found, str):
        result = found
    else:
        try:
            result = Kernels(ctypes.CDLL(str(found.path)), found.level.name, dtype, cpu_flags)
        except (OSError, AttributeError) as error:
            result = f"{found.path} cannot be loaded: {error}"
    if isinstance(found, Found) and isinstance(result, Kernels):
        log.info("kernels: %s, %s", result.level, found.origin)
    else:
        log.info("kernels: none: %s", result)
    return result
