"""The demo model with a chat template that knows tools, and LoRA adapters of it: what it lacks for a long mixed run."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

from sluice_engine.config import ModelSource
from sluice_engine.model_files.gguf_header import HeaderReader, read_metadata
from sluice_engine.model_files.sources import resolve

# Calls as Hermes and Qwen write them, around the demo model's own turns.
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response>{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    '{% for call in message.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HEAD = struct.Struct("<4sIQQ")
_STRING = 8
# GGUF's own default: the tensors begin at a multiple of it.
_ALIGNMENT = 32
_RANK = 8


def with_tools(path: Path) -> Path:
    """Write the demo model's file with one key more."""
    source = resolve(ModelSource(demo="smollm2-135m"))
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, tensors, keys = _HEAD.unpack_from(data, 0)
        reader = HeaderReader(data)
        reader.metadata()
        with path.open("wb") as out:
            out.write(_HEAD.pack(magic, version, tensors, keys + 1))
            out.write(data[_HEAD.size : reader.at])
            out.write(_key("tokenizer.chat_template.tool_use", _TEMPLATE))
            out.write(data[reader.at :])
    return path


def _key(name: str, text: str) -> bytes:
    """A text of the metadata, filled up with spaces so that the tensors keep their alignment."""
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", _STRING)
    short = -(len(head) + 8 + len(text.encode()) + len("{##}")) % _ALIGNMENT
    value = f"{text}{{#{' ' * short}#}}".encode()
    return head + struct.pack("<Q", len(value)) + value


def adapters(model: Path, folder: Path, count: int) -> list[Path]:
    """Write `count` random adapters of the model, as PEFT would."""
    fields = read_metadata(model)
    layers, hidden, heads, kv_heads = (
        int(str(fields[f"llama.{name}"]))
        for name in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    rows = {"q_proj": hidden, "v_proj": hidden // heads * kv_heads}
    return [_adapter(folder / f"lora-{number}", number, layers, hidden, rows) for number in range(count)]


def _adapter(path: Path, seed: int, layers: int, hidden: int, rows: dict[str, int]) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, outputs in rows.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator) / hidden**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, _RANK, generator=generator) * 0.02
    path.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 16, "bias": "none", "target_modules": list(rows)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path
