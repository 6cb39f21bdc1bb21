"""`adapter_config.json` as PEFT writes it: what of LoRA is computed here, and a refusal by name of all that is not.

Pure. An adapter that ran slightly wrong would be worse than one that does not load. The tensors are
`adapter_weights`' part.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice_engine.errors import AdapterRefused
from sluice_engine.watched import read_small

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512
# Module → the block of a layer that it is in, as Llama and its relatives name both.
TARGETS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
# What says nothing about the product: where it came from, how it was trained, and what the tensors say better.
_IGNORED = frozenset({
    "alora_invocation_tokens_text", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout",
    "loftq_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
})  # fmt: skip
_READ = frozenset(
    {"bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "target_modules", "task_type", "use_rslora"}
)
# Other ways to begin change the base's own weights, which an adapter does not bring.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter is."""

    rank: int
    scale: float
    """What the product of both matrices is multiplied by."""


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The configuration in a directory that PEFT wrote.

    Raises:
        AdapterRefused: missing, damaged, or something that is not computed here.
    """
    path = directory / CONFIG_FILE
    try:
        fields = json.loads(read_small(path))
    except OSError as error:
        raise AdapterRefused(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{path} is not valid JSON") from error
    if not isinstance(fields, dict):
        raise AdapterRefused(f"{path} is not a JSON object")
    return _checked(fields, path)


def _checked(fields: Mapping[str, object], path: Path) -> AdapterConfig:
    rank, alpha, rooted = fields.get("r"), fields.get("lora_alpha"), fields.get("use_rslora", False)
    for name, is_supported, supported in (
        ("peft_type", fields.get("peft_type") == "LORA", '"LORA"'),
        ("task_type", fields.get("task_type") in (None, "CAUSAL_LM"), '"CAUSAL_LM"'),
        ("bias", fields.get("bias", "none") == "none", '"none"'),
        ("init_lora_weights", fields.get("init_lora_weights") in _BEGINNINGS, "a way that leaves the base as it is"),
        ("r", isinstance(rank, int) and not isinstance(rank, bool) and 1 <= rank <= MAX_RANK, f"1 to {MAX_RANK}"),
        (
            "lora_alpha",
            isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha <= sys.float_info.max,
            "a number above 0",
        ),
        ("use_rslora", isinstance(rooted, bool), "true or false"),
    ):
        if not is_supported:
            raise AdapterRefused(f"{path}: {name} is {_shown(fields.get(name))}; supported is {supported}")
    targets = fields.get("target_modules")
    for target in targets if isinstance(targets, list) else ():  # a pattern matches what the tensors say
        if not isinstance(target, str) or target.rpartition(".")[2] not in TARGETS:
            raise AdapterRefused(f"{path}: target_modules has {_shown(target)}; supported are {', '.join(TARGETS)}")
    # DoRA, modules_to_save, ranks of their own, tokens of their own, and whatever comes next: off, or refused.
    for name in sorted(fields.keys() - _IGNORED - _READ):
        if fields[name]:
            raise AdapterRefused(f"{path}: {name[:80]} is {_shown(fields[name])}, which is not supported")
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return AdapterConfig(rank, alpha / (math.sqrt(rank) if rooted else rank))


def _shown(value: object) -> str:
    return json.dumps(value)[:80]
