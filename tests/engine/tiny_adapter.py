"""Makes random LoRA adapters for a tiny model, in PEFT's files, and the same model with one merged into its weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path,
    path: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ALL,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
) -> Path:
    """Write an adapter for a model's directory; `config` and `tensors` replace or, with None, leave out."""
    generator = torch.Generator().manual_seed(seed)
    written: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in targets and stem.startswith("model.layers"):
            rows, columns = weight.shape
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            b = torch.randn(rows, rank, generator=generator) / rank**0.5
            written[f"base_model.model.{stem}.lora_A.weight"] = a
            written[f"base_model.model.{stem}.lora_B.weight"] = b
    for name, tensor in (tensors or {}).items():
        written.pop(name, None)
        if tensor is not None:
            written[name] = tensor
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": {},
        "target_modules": list(targets),
        "use_dora": False,
        "use_rslora": False,
    } | (config or {})
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps({k: v for k, v in fields.items() if v != "left out"}))
    save_file(written, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def merged(model: Path, adapter: Path, path: Path) -> Path:
    """A copy of a model with W + B A · scale in the place of W."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    shutil.copytree(model, path)
    weights, delta = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in list(weights):
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in delta:
            a, b = delta[f"{stem}.lora_A.weight"].double(), delta[f"{stem}.lora_B.weight"].double()
            weights[name] = (weights[name].double() + b @ a * scale).float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
