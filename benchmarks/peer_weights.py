"""The demo model's GGUF file as a Hugging Face directory in bfloat16, for vLLM: `peer_weights.py DIRECTORY`.

The tensors are read by the engine's own reader, which undoes the converter's order of q and k; the tokenizer comes from
the file as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from sluice_engine.config import ModelSource
from sluice_engine.model_files.sources import resolve
from sluice_engine.model_files.weights_gguf import GGUFTensors

DEMO = "smollm2-135m"


def gguf_path() -> Path:
    """The demo model's own file."""
    return resolve(ModelSource(demo=DEMO))


def convert(directory: Path) -> Path:
    """Write the directory, unless it is there already."""
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    tensors = GGUFTensors(gguf_path())
    shape = tensors.architecture
    names = sorted(tensors.names() - {"rope_freqs.weight"})
    weights = {name: tensors.read(name).to(torch.bfloat16).contiguous() for name in names}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path().parent), gguf_file=gguf_path().name)
    tokenizer.save_pretrained(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length_tokens,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_head,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "bfloat16",
    }
    # Last: a directory that has it is whole.
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


if __name__ == "__main__":
    print(convert(Path(sys.argv[1])))
