"""Makes a tiny random Llama, or a relative, as a Hugging Face directory: weights, configuration, tokenizer, template.

Real in every respect but its size, so that servers and clusters can be tested without a download. It needs torch,
safetensors and tokenizers alone. As a program: `python tiny_model.py DIRECTORY [SEED]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TEXT, IM_START, IM_END, PAD = range(256, 260)
VOCAB_SIZE = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_tiny_llama(
    path: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    head_dim: int | None = None,
    max_length_tokens: int = 1024,
    tied_head: bool = True,
    num_shards: int = 1,
    config: dict[str, object] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Write the model to a directory, which is made; `config` overrides fields of its config.json.

    The vocabulary is the 256 bytes and four special tokens: every text can be said.
    """
    path.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden_size // num_heads
    fields: dict[str, object] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_length_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": tied_head,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    if family == "llama":
        fields |= {"attention_bias": False, "mlp_bias": False}
    fields |= config or {}
    (path / "config.json").write_text(json.dumps(fields, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, END_OF_TEXT]}))
    tensors = _tensors(
        seed,
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads * head_dim,
        num_kv_heads * head_dim,
    )
    tensors |= _family_tensors(seed, fields, tensors)
    if tied_head:
        del tensors["lm_head.weight"]
    _save(path, tensors, num_shards)
    _write_tokenizer(path)
    return path


def _tensors(
    seed: int, vocab_size: int, hidden: int, inner: int, num_layers: int, q_size: int, kv_size: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        # Of a size that keeps activations near 1, so that no token stands out by accident of initialisation.
        values: Tensor = torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)
        return values

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden, 4.0)}
    for i in range(num_layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(q_size, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, q_size),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    return tensors | {"model.norm.weight": norm(), "lm_head.weight": matrix(vocab_size, hidden, 4.0)}


def _family_tensors(seed: int, fields: dict[str, object], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Biases, and norms of queries and keys, where the family or the configuration has them."""
    generator = torch.Generator().manual_seed(seed + 1)
    family, head_dim = fields["model_type"], fields["head_dim"]
    assert isinstance(head_dim, int)
    attention_bias, mlp_bias = fields.get("attention_bias"), fields.get("mlp_bias")
    biased = {"q_proj", "k_proj", "v_proj"} if attention_bias or family == "qwen2" else set()
    biased |= {"o_proj"} if attention_bias else set()
    biased |= {"gate_proj", "up_proj", "down_proj"} if mlp_bias else set()
    more = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in biased:
            more[f"{stem}.bias"] = 0.3 * torch.randn(len(tensor), generator=generator)
        if family == "qwen3" and stem.endswith(("q_proj", "k_proj")):
            norm = 1 + 0.2 * torch.randn(head_dim, generator=generator)
            more[f"{stem.removesuffix('proj')}norm.weight"] = norm
    return more


def _save(path: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, path / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_tokenizer(path: Path) -> None:
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[3],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself, or one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


if __name__ == "__main__":
    print(make_tiny_llama(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
