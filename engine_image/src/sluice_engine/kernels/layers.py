"""Decoder layers whose products are all in integers, computed in one call: what lies between them takes no torch.

Owns the C structures of `layers.h` and what they point to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice_engine.kernels.library import Interleaved, Kernels, Tiles

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    _fields_ = [("blocks", _ADDRESS), ("bias", _ADDRESS), ("kind", _SIZE), ("out_width", _SIZE)]  # ctypes reads it


class _Layer(ctypes.Structure):
    _fields_ = [  # ctypes reads it
        *((name, _Product) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, _ADDRESS) for name in ("qkv_norm", "gate_up_norm", "qk_norm")),
        ("window", _SIZE),
    ]


class _Step(ctypes.Structure):
    _fields_ = [  # ctypes reads it
        *((name, _ADDRESS) for name in ("turns", "positions", "kv_rows", "tables", "tiles")),
        *((name, _SIZE) for name in ("rows", "table_width", "num_tiles", "shares", "window_shares", "block_tokens")),
        *((name, _SIZE) for name in ("hidden", "heads", "kv_heads", "dimension", "vnni")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    ]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer's products, each with its bias if it has one, and its norms' weights."""

    qkv: tuple[Interleaved, Tensor | None]
    attention_out: tuple[Interleaved, Tensor | None]
    gate_up: tuple[Interleaved, Tensor | None]
    down: tuple[Interleaved, Tensor | None]
    qkv_norm: Tensor
    gate_up_norm: Tensor
    qk_norm: Tensor | None
    window: int | None


class LayerStack:
    """A model's layers, or the first of them."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[LayerParts], heads: int, kv_heads: int, epsilon: float
    ) -> None:
        assert kernels.dtype is torch.bfloat16, "integer products are for bfloat16"
        self._kernels = kernels
        self.max_rows = kernels.max_integer_rows
        self._kept = layers  # what the structures point to
        self._layers = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        self._window = next((layer.window for layer in layers if layer.window is not None), None)
        self._heads, self._kv_heads, self._epsilon = heads, kv_heads, epsilon
        self._call = kernels.library.sluice_layers
        self._call.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS]

    def __len__(self) -> int:
        return len(self._kept)

    def run(
        self,
        x: Tensor,
        turns: Tensor,
        positions: Tensor,
        kv_rows: Tensor,
        tiles: Tiles,
        caches: Sequence[Tensor],
        block_tokens: int,
    ) -> None:
        """Rows x [T, H] in place through as many layers as there are `caches`, each as `Kernels.attend` takes it."""
        assert x.dtype is torch.bfloat16, "layers of another type"
        assert all(layer.dtype is torch.bfloat16 for layer in caches), "a cache of another type"
        if not caches:
            return
        dimension = caches[0].shape[1] // (2 * self._kv_heads)
        shares = [self._kernels.shares(tiles, len(x), self._kv_heads, window) for window in (None, self._window)]
        step = _Step(
            turns.data_ptr(), positions.data_ptr(), kv_rows.data_ptr(), tiles.tables.data_ptr(), tiles.rows.data_ptr(),
            len(x), tiles.tables.shape[1], len(tiles.rows), *shares, block_tokens,
            x.shape[1], self._heads, self._kv_heads, dimension, self._kernels.has_vnni,
            self._epsilon, dimension**-0.5,
        )  # fmt: skip
        addresses = (_ADDRESS * len(caches))(*(layer.data_ptr() for layer in caches))
        if self._call(x.data_ptr(), self._layers, addresses, len(caches), ctypes.byref(step)):
            raise MemoryError("no memory for what lies between products")


def _layer(parts: LayerParts) -> _Layer:
    return _Layer(
        *(_product(*product) for product in (parts.qkv, parts.attention_out, parts.gate_up, parts.down)),
        parts.qkv_norm.data_ptr(),
        parts.gate_up_norm.data_ptr(),
        None if parts.qk_norm is None else parts.qk_norm.data_ptr(),
        parts.window or 0,
    )


def _product(blocks: Interleaved, bias: Tensor | None) -> _Product:
    return _Product(blocks.data.data_ptr(), None if bias is None else bias.data_ptr(), blocks.kind, blocks.out_width)
