"""A LoRA adapter's weights, checked against the model they are for and laid out for the runner.

Owns the names and shapes of `adapter_model.safetensors`. Everything that can be refused is refused before a tensor is
read: by the file's header. Start with `open_adapter`, then `AdapterFile.load`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice_engine.errors import AdapterRefused, ModelUnavailable
from sluice_engine.model_files.adapter_config import TARGETS, AdapterConfig, read_adapter_config
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.tensor_shapes import expected_shapes
from sluice_engine.model_files.weights_gguf import in_rotary_pairs, is_turned
from sluice_engine.model_files.weights_safetensors import read_header

WEIGHTS_FILE = "adapter_model.safetensors"
Part = Literal["qkv", "attention_out", "gate_up", "down"]
# The model's products, and the modules whose rows each has below each other.
PARTS: dict[Part, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<stem>model\.layers\.\d+\.(?:self_attn|mlp)\.(?P<module>\w+))\.lora_(?P<side>[AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class Up:
    """One module's way out of its product's small space."""

    first_rank: int
    first_row: int
    """Of the product's output."""
    matrix: Tensor
    """[r, out], scaled; columns of q and k in rotary pairs"""


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one product: x ↦ (x Aᵀ) Bᵀ · scale."""

    down: Tensor
    """[in, Σ r]: A of all its modules side by side"""
    ups: tuple[Up, ...]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """All that an adapter adds."""

    layers: tuple[Mapping[Part, Delta], ...]
    rank: int
    num_bytes: int


class AdapterFile:
    """An adapter whose header was checked; nothing of it is loaded yet."""

    def __init__(self, path: Path, config: AdapterConfig, architecture: Architecture, names: Mapping[str, str]) -> None:
        """`names`: `model.layers.….q_proj A` → the tensor's name in the file."""
        self._path = path
        self._config = config
        self._shape = architecture
        self._names = names
        expected = expected_shapes(architecture)
        rank = config.rank
        self.num_values = sum(
            rank * sum(expected[f"{key.rpartition(' ')[0]}.weight"]) for key in names if key.endswith("A")
        )
        """Numbers in its matrices."""

    def load(self, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
        """Its matrices in the model's type.

        Raises:
            AdapterRefused: a tensor cannot be read, or has values that are no numbers.
        """
        shapes = expected_shapes(self._shape)
        try:
            with safe_open(self._path, framework="pt") as file:
                layers = tuple(self._layer(index, file.get_tensor, shapes, dtype, device) for index in self._indices())
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise AdapterRefused(f"{self._path} cannot be read: {error}") from error
        return AdapterWeights(layers, self._config.rank, self.num_values * dtype.itemsize)

    def _indices(self) -> range:
        return range(self._shape.num_layers)

    def _layer(
        self,
        index: int,
        get: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Mapping[Part, Delta]:
        deltas: dict[Part, Delta] = {}
        for part, modules in PARTS.items():
            downs: list[Tensor] = []
            ups: list[Up] = []
            first_row = 0
            for module in modules:
                stem = f"model.layers.{index}.{TARGETS[module]}.{module}"
                if f"{stem} A" in self._names:
                    down, up = (self._finite(self._names[f"{stem} {side}"], get) for side in "AB")
                    if is_turned(f"{stem}.weight"):
                        up = in_rotary_pairs(up, self._shape.head_dim)
                    up = (up * self._config.scale).t()
                    ups.append(Up(len(downs) * self._config.rank, first_row, _held(up, dtype, device)))
                    downs.append(down)
                first_row += shapes[f"{stem}.weight"][0]
            if downs:
                deltas[part] = Delta(_held(torch.cat(downs).t(), dtype, device), tuple(ups))
        return deltas

    def _finite(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        values = get(name).float()
        if not bool(torch.isfinite(values).all()):
            raise AdapterRefused(f"{self._path}: tensor {name} has values that are not finite")
        return values


def open_adapter(directory: Path, architecture: Architecture) -> AdapterFile:
    """An adapter for a model of this architecture, configuration and header checked.

    Raises:
        AdapterRefused: missing, damaged, not supported, or for another model.
    """
    config = read_adapter_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterRefused(f"{directory} has no {WEIGHTS_FILE}")
    try:
        header = read_header(path)
    except ModelUnavailable as error:
        raise AdapterRefused(str(error)) from error
    expected = expected_shapes(architecture)
    names: dict[str, str] = {}
    for name, entry in header.items():
        match = _NAME.fullmatch(name)
        whole = f"{match['stem']}.weight" if match is not None else ""
        if match is None or match["module"] not in TARGETS:
            raise AdapterRefused(f"{path}: unsupported tensor {name[:120]}")
        if whole not in expected:
            raise AdapterRefused(f"{path}: tensor {name[:120]} is of a layer that the model does not have")
        rows, columns = expected[whole]
        wanted = (config.rank, columns) if match["side"] == "A" else (rows, config.rank)
        if entry.shape != wanted:
            raise AdapterRefused(
                f"{path}: tensor {name[:120]} has shape {list(entry.shape)}; the model and r ask for {list(wanted)}"
            )
        names[f"{match['stem']} {match['side']}"] = name
    if not names:
        raise AdapterRefused(f"{path} holds no tensors")
    for key in names:
        stem, _, side = key.partition(" ")
        if f"{stem} {'B' if side == 'A' else 'A'}" not in names:
            raise AdapterRefused(f"{path}: of {stem} there is lora_{side} alone")
    return AdapterFile(path, config, architecture, names)


def _held(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return values.to(device=device, dtype=dtype).contiguous()
