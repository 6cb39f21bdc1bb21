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
from sluice_engine.model_files.adapter_config import TARGETS, WEIGHTS_FILE, AdapterConfig, read_adapter_config
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.tensor_shapes import expected_shapes
from sluice_engine.model_files.weights_gguf import in_rotary_pairs, is_turned
from sluice_engine.model_files.weights_safetensors import read_header

Part = Literal["qkv", "attention_out", "gate_up", "down"]
# The model's products, and the modules whose rows each has below each other.
PARTS: dict[Part, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
# Matrices in float32 that are held while a product is put together, at most: three modules' A, apart and together.
_STAGED, _FLOAT32_BYTES = 6, 4
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

    def __init__(
        self, path: Path, config: AdapterConfig, architecture: Architecture, names: Mapping[str, tuple[str, str]]
    ) -> None:
        """`names`: module, as `model.layers.0.self_attn.q_proj` → the names of its A and B in the file; not empty."""
        self._path = path
        self._config = config
        self._head_dim = architecture.head_dim
        self._num_layers = architecture.num_layers
        self._names = names
        self._shapes = expected_shapes(architecture)
        shapes = [self._shapes[f"{module}.weight"] for module in names]
        self.num_values = sum(config.rank * sum(shape) for shape in shapes)
        """Numbers in its matrices."""
        self.staged_bytes = _STAGED * _FLOAT32_BYTES * config.rank * max(map(max, shapes))
        """Memory of the host that loading takes beside them."""

    def load(self, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
        """Its matrices in the model's type.

        Raises:
            AdapterRefused: a tensor cannot be read, or has values that are no numbers in that type.
        """
        try:
            with safe_open(self._path, framework="pt") as file:
                layers = tuple(self._layer(index, file.get_tensor, dtype, device) for index in range(self._num_layers))
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise AdapterRefused(f"{self._path} cannot be read: {error}") from error
        return AdapterWeights(layers, self._config.rank, self.num_values * dtype.itemsize)

    def _layer(
        self, index: int, get: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Mapping[Part, Delta]:
        deltas: dict[Part, Delta] = {}
        for part, modules in PARTS.items():
            downs: list[Tensor] = []
            ups: list[Up] = []
            first_row = 0
            for module in modules:
                stem = f"model.layers.{index}.{TARGETS[module]}.{module}"
                if stem in self._names:
                    name_a, name_b = self._names[stem]
                    up = get(name_b).float()
                    if is_turned(f"{stem}.weight"):
                        up = in_rotary_pairs(up, self._head_dim)
                    up = self._rounded(name_b, up * self._config.scale, dtype)
                    ups.append(Up(len(ups) * self._config.rank, first_row, _on_device(up.t(), device)))
                    downs.append(self._rounded(name_a, get(name_a), dtype))
                first_row += self._shapes[f"{stem}.weight"][0]
            if downs:
                deltas[part] = Delta(_on_device(torch.cat(downs).t(), device), tuple(ups))
        return deltas

    def _rounded(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        # Looked at in the model's type: what float32 holds, float16 may not, and one infinity is every later token's.
        rounded = values.to(dtype)
        if not bool(torch.isfinite(rounded).all()):
            kind = str(dtype).removeprefix("torch.")
            raise AdapterRefused(f"{self._path}: tensor {name} has values that are not finite in {kind}")
        return rounded


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
    sides: dict[str, dict[str, str]] = {}
    for name, entry in header.items():
        module, side = _checked(path, name, entry.shape, config.rank, expected)
        if sides.setdefault(module, {}).setdefault(side, name) != name:
            raise AdapterRefused(f"{path}: of {module} there is lora_{side} twice")
    if not sides:
        raise AdapterRefused(f"{path} holds no tensors")
    for module, found in sides.items():
        if len(found) == 1:
            raise AdapterRefused(f"{path}: of {module} there is lora_{''.join(found)} alone")
    names = {module: (found["A"], found["B"]) for module, found in sides.items()}
    return AdapterFile(path, config, architecture, names)


def _checked(
    path: Path, name: str, shape: tuple[int, ...], rank: int, expected: Mapping[str, tuple[int, ...]]
) -> tuple[str, str]:
    """The module that a tensor belongs to, and its side, A or B."""
    match = _NAME.fullmatch(name)
    if match is None or match["module"] not in TARGETS:
        raise AdapterRefused(f"{path}: unsupported tensor {name[:120]}")
    weight = f"{match['stem']}.weight"
    if weight not in expected:
        raise AdapterRefused(f"{path}: tensor {name[:120]} is of a layer that the model does not have")
    rows, columns = expected[weight]
    wanted = (rank, columns) if match["side"] == "A" else (rows, rank)
    if shape != wanted:
        raise AdapterRefused(
            f"{path}: tensor {name[:120]} has shape {list(shape)}; the model and r ask for {list(wanted)}"
        )
    return match["stem"], match["side"]


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device).contiguous()
