"""What a model is, read from its own configuration: the Llama architecture, strictly.

Owns the reading of `config.json` and of GGUF metadata. Only what the runner computes is accepted; anything else is
refused by the name of its field, because a model that runs slightly wrong is worse than one that does not run. It knows
no torch and opens no weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sluice_engine.errors import ModelUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained for.

    `linear` divides every frequency by `factor`. `llama3` divides the slow ones, keeps the fast ones, and blends in
    between. Source: Llama 3.1's reference code.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_length_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder-only model of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length_tokens: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    """Whether the output head is the embedding."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    def inverse_frequencies(self) -> list[float]:
        """Rotation per position of each pair of a head's dimensions, scaling applied."""
        frequencies = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return [frequency / scaling.factor for frequency in frequencies]
        return [_llama3_frequency(frequency, scaling) for frequency in frequencies]


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_length_tokens * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def read_hf_config(path: Path) -> Architecture:
    """The architecture that a Hugging Face `config.json` describes.

    Fields of `LlamaConfig` that change the computation are checked one by one; all others do not touch it.

    Raises:
        ModelUnavailable: missing, not JSON, incomplete, or not a Llama that the runner computes.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}", "ModelMissing") from error
    except ValueError as error:
        raise ModelUnavailable(f"{path} is not JSON: {error}", "ModelCorrupt") from error
    if not isinstance(data, dict):
        raise ModelUnavailable(f"{path} is not a JSON object", "ModelCorrupt")
    fields = _Fields(str(path), data)
    fields.only("model_type", "llama")
    for name in ("attention_bias", "mlp_bias", "rope_interleaved"):
        fields.only(name, False, default=False)
    for name in ("sliding_window", "quantization_config", "num_local_experts"):
        fields.only(name, None, default=None)
    fields.only("hidden_act", "silu", default="silu")
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    rope = _hf_rope(fields)
    return _checked(
        fields,
        Architecture(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", num_heads),
            head_dim=fields.count("head_dim", hidden_size // num_heads),
            max_length_tokens=fields.count("max_position_embeddings", 2048),
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope[0],
            rope_scaling=rope[1],
            tied_head=fields.flag("tie_word_embeddings"),
        ),
    )


def read_gguf_metadata(where: Path, metadata: Mapping[str, object], tensor_names: frozenset[str]) -> Architecture:
    """The architecture that the metadata of a GGUF file describes.

    Raises:
        ModelUnavailable: incomplete, or not a Llama that the runner computes.
    """
    fields = _Fields(str(where), metadata)
    fields.only("general.architecture", "llama")
    fields.only("llama.rope.scaling.type", "none", default="none")
    fields.only("llama.expert_count", 0, default=0)
    if "rope_freqs.weight" in tensor_names:
        fields.unsupported("tensor rope_freqs.weight (scaled rotary frequencies)")
    num_heads = fields.count("llama.attention.head_count")
    hidden_size = fields.count("llama.embedding_length")
    head_dim = fields.count("llama.attention.key_length", hidden_size // num_heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        fields.only(name, head_dim, default=head_dim)
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    return _checked(
        fields,
        Architecture(
            vocab_size=fields.count("llama.vocab_size", len(vocabulary) if isinstance(vocabulary, list) else None),
            hidden_size=hidden_size,
            intermediate_size=fields.count("llama.feed_forward_length"),
            num_layers=fields.count("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.count("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_length_tokens=fields.count("llama.context_length"),
            norm_epsilon=fields.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("llama.rope.freq_base", 10_000.0),
            tied_head="output.weight" not in tensor_names,
        ),
    )


def _hf_rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: `rope_parameters` of newer files, or `rope_theta` beside `rope_scaling` of older ones."""
    data = fields.data
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        fields.corrupt(f"rope parameters must be an object, not {parameters!r}")
    rope = _Fields(fields.where, {"rope_theta": data.get("rope_theta"), **parameters})
    theta = rope.number("rope_theta", 10_000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_length_tokens=rope.count("original_max_position_embeddings"),
        )
    if kind != "default":
        fields.unsupported(f"rope scaling {kind!r}; default, linear and llama3 are supported")
    return theta, None


def _checked(fields: _Fields, shape: Architecture) -> Architecture:
    if shape.num_heads % shape.num_kv_heads:
        fields.corrupt(f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} KV heads")
    if shape.head_dim % 2:
        fields.corrupt(f"the head dimension {shape.head_dim} is odd; rotary embedding turns pairs")
    return shape


class _Fields:
    """A configuration's fields, taken out with checks whose one line names file and field."""

    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        self.where = where
        self.data = data

    def only(self, name: str, accepted: object, *, default: object = ...) -> None:
        value = self.data.get(name, default)
        if value is ...:
            self.corrupt(f"{name} is missing")
        if value != accepted:
            self.unsupported(f"{name} {value!r}; only {accepted!r} is supported")

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.corrupt(f"{name} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            self.corrupt(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._value(name, False)
        if not isinstance(value, bool):
            self.corrupt(f"{name} must be true or false, not {value!r}")
        return value

    def _value(self, name: str, default: object) -> object:
        value = self.data.get(name)
        if value is None:
            value = default
        if value is None:
            self.corrupt(f"{name} is missing")
        return value

    def corrupt(self, problem: str) -> NoReturn:
        raise ModelUnavailable(f"{self.where}: {problem}", "ModelCorrupt")

    def unsupported(self, problem: str) -> NoReturn:
        raise ModelUnavailable(f"{self.where}: unsupported {problem}", "ModelUnsupported")
