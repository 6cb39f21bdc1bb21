"""Adapters that PEFT itself makes and saves: what the engine says equals what PEFT says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine.reference import Reference, greedy, load_runner, outputs, run
from sluice_engine.config import ModelSource
from tiny_model import make_tiny_llama

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "root": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "one layer": {
        "r": 2, "lora_alpha": 7, "init_lora_weights": "gaussian", "target_modules": ["down_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "pattern": {"r": 3, "lora_alpha": 3, "target_modules": r".*self_attn\.(k|o)_proj"},
}  # fmt: skip


def _saved(model: Path, path: Path, options: dict[str, Any]) -> Path:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for seed, (name, weights) in enumerate(peft.named_parameters()):
            if "lora_" in name:
                generator = torch.Generator().manual_seed(seed)
                weights.copy_(torch.randn(weights.shape, generator=generator) / weights.shape[-1] ** 0.5)
    peft.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own
def test_the_engine_says_what_peft_says(tmp_path: Path) -> None:
    """On Qwen2: with biases, which an adapter adds to."""
    model = make_tiny_llama(tmp_path / "model", family="qwen2", seed=3, num_heads=4, num_kv_heads=2, head_dim=16)
    runner = load_runner(ModelSource(path=str(model)), capacity_bytes=1 << 20, block_tokens=8)
    references = {"": Reference.from_directory(model)}
    for name, options in ADAPTERS.items():
        path = _saved(model, tmp_path / name, options)
        runner.adapters.load(name, path)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        references[name] = Reference(PeftModel.from_pretrained(base, path))
    requests = []
    for seed, name in enumerate([*references] * 2):
        request = greedy(str(seed), random.Random(seed).choices(range(256), k=5 + 7 * seed), 16)
        request.adapter = name
        requests.append(request)
    run(runner, requests, per_request=9)
    for request, output in zip(requests, outputs(requests), strict=True):
        references[request.adapter].assert_greedy(request.tokens[: request.num_prompt], output)
    assert sum(reference.ties for reference in references.values()) == 0
