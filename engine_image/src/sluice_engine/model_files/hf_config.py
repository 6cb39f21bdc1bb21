"""The architecture that a Hugging Face `config.json` describes: which families are computed, and every field they have.

A field is read, known to change nothing, or refused by its name. Defaults are those of the family's class in
`transformers`, for that is what the file's author saw.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.model_fields import ModelFields
from sluice_engine.model_files.rope import RopeScaling, yarn_attention_factor


@dataclass(frozen=True, slots=True)
class _Family:
    """What sets a family apart from Llama."""

    class_name: str
    default_length_tokens: int
    default_kv_heads: int | None = None
    """None: as many as there are heads."""
    default_head_dim: int | None = None
    """None: the hidden size over the heads."""
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048),
    "mistral": _Family("MistralForCausalLM", 131_072, default_kv_heads=8),
    "qwen2": _Family("Qwen2ForCausalLM", 32_768, default_kv_heads=32, qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", 32_768, default_kv_heads=32, default_head_dim=128, qk_norm=True),
}
_DEFAULT_WINDOW = 4096

# Read below, or checked.
_READ = (
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
    "num_key_value_heads hidden_act max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters "
    "tie_word_embeddings attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types "
    "partial_rotary_factor original_max_position_embeddings"
)
# What training, saving, generating and other tasks left in files: none of it changes a token's logits.
_INERT = (
    "transformers_version torch_dtype dtype use_cache initializer_range attention_dropout hidden_dropout resid_pdrop "
    "embd_pdrop attn_pdrop pretraining_tp gradient_checkpointing bos_token_id eos_token_id pad_token_id sep_token_id "
    "unk_token_id decoder_start_token_id is_decoder is_llama_config return_dict output_attentions output_hidden_states "
    "chunk_size_feed_forward id2label label2id finetuning_task task_specific_params problem_type tokenizer_class "
    "prefix torchscript use_bfloat16 tie_encoder_decoder max_length min_length do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty max_new_tokens attn_implementation _attn_implementation "
    "_name_or_path _attn_implementation_autoset _flash_attn_2_enabled transformers.js_config unsloth_version "
    "unsloth_fixed model_name"
)
_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}
_ROPE_READ = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"}


def read_hf_config(path: Path) -> Architecture:
    """The architecture that a Hugging Face `config.json` describes.

    Raises:
        ModelUnavailable: missing, not JSON, incomplete, or not a model that the runner computes.
    """
    fields = ModelFields(str(path), _document(path))
    kind = fields.get("model_type")
    if kind is None:
        fields.corrupt("model_type is missing")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        fields.unsupported(f"model_type {kind!r}; supported are {', '.join(_FAMILIES)}")
    classes = fields.get("architectures")
    if classes not in (None, [], [family.class_name]):
        fields.unsupported(f"architectures {classes!r}; only {family.class_name} is supported for {kind}")
    fields.known({*_READ.split(), *_INERT.split()})
    fields.only("hidden_act", "silu", default="silu")
    fields.only("partial_rotary_factor", 1.0, default=1.0)
    attention_bias = _attention_bias(fields, kind)
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers")
    length = fields.count("max_position_embeddings", family.default_length_tokens)
    theta, scaling = _rope(fields, length)
    if scaling is not None and scaling.kind == "yarn":
        length = max(length, round(scaling.factor * scaling.original_length_tokens))
    window, sliding = _window(fields, kind, num_layers)
    return fields.checked(
        Architecture(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", family.default_kv_heads or num_heads),
            head_dim=fields.count("head_dim", family.default_head_dim or hidden_size // num_heads),
            max_length_tokens=length,
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_head=fields.flag("tie_word_embeddings"),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            sliding_window=window,
            sliding_layers=sliding,
        )
    )


def _document(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}", "ModelMissing") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{path} is not JSON: {error}", "ModelCorrupt") from error
    if not isinstance(data, dict):
        raise ModelUnavailable(f"{path} is not a JSON object", "ModelCorrupt")
    return data


def _attention_bias(fields: ModelFields, kind: object) -> bool:
    """Whether all four of attention's projections have one. Classes without the field ignore it: so none may set it."""
    if kind != "llama":
        fields.only("mlp_bias", False, default=False)
    if kind == "mistral":
        fields.only("attention_bias", False, default=False)
        return False
    # Some Qwen2 files say what the class does anyway.
    return fields.flag("attention_bias") and kind != "qwen2"


def _window(fields: ModelFields, kind: object, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the layers that have it."""
    if kind == "llama":
        for name in ("sliding_window", "layer_types"):
            fields.only(name, None, default=None)
        fields.only("use_sliding_window", False, default=False)
        return None, ()
    if kind == "mistral":
        fields.only("layer_types", None, default=None)  # its class does not obey them
        # Left out is not the same as null.
        if fields.get("sliding_window", ...) is None:
            return None, ()
        return fields.count("sliding_window", _DEFAULT_WINDOW), tuple(range(num_layers))
    sliding = _qwen_sliding_layers(fields, num_layers)
    return (fields.count("sliding_window", _DEFAULT_WINDOW), sliding) if sliding else (None, ())


def _qwen_sliding_layers(fields: ModelFields, num_layers: int) -> tuple[int, ...]:
    slides = fields.flag("use_sliding_window")
    types = fields.get("layer_types")
    if types is None:
        if not slides or fields.get("sliding_window", ...) is None:
            return ()
        first = fields.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            fields.corrupt(f"max_window_layers must be a whole number of at least 0, not {first!r}")
        return tuple(range(first, num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        fields.corrupt(f"layer_types must name each of the {num_layers} layers")
    known = ("full_attention", "sliding_attention")
    if unknown := [each for each in types if each not in known]:
        fields.unsupported(f"layer_types {unknown[0]!r}; supported are {' and '.join(known)}")
    sliding = tuple(layer for layer, each in enumerate(types) if each == "sliding_attention")
    if sliding and not slides:
        fields.corrupt("layer_types has sliding_attention, and use_sliding_window is not true")
    return sliding


def _rope(fields: ModelFields, length: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: `rope_parameters` of newer files, or `rope_theta` beside `rope_scaling` of older ones."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        fields.corrupt(f"rope parameters must be an object, not {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        fields.unsupported(f"rope scaling {kind!r}; supported are {', '.join(_ROPE_FIELDS)}")
    original = fields.get("original_max_position_embeddings")
    defaults = {"rope_theta": fields.get("rope_theta"), "original_max_position_embeddings": length}
    outside = {} if original is None else {"original_max_position_embeddings": original}
    rope = ModelFields(f"{fields.where}, rope parameters", {**defaults, **parameters, **outside})
    rope.known(_ROPE_READ | _ROPE_FIELDS[kind])
    rope.only("partial_rotary_factor", 1.0, default=1.0)
    return rope.number("rope_theta", 10_000.0), _scaling(kind, rope)


def _scaling(kind: str, rope: ModelFields) -> RopeScaling | None:
    match kind:
        case "linear":
            return RopeScaling(kind="linear", factor=rope.number("factor"))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_length_tokens=rope.count("original_max_position_embeddings"),
            )
        case "yarn":
            factor = rope.number("factor")
            suggested = yarn_attention_factor(factor)
            if rope.get("mscale") and rope.get("mscale_all_dim"):
                suggested = yarn_attention_factor(factor, rope.number("mscale"))
                suggested /= yarn_attention_factor(factor, rope.number("mscale_all_dim"))
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_length_tokens=rope.count("original_max_position_embeddings"),
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                truncate=rope.flag("truncate", default=True),
                attention_factor=rope.number("attention_factor", suggested),
            )
        case _:
            return None
