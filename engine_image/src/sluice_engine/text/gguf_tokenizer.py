"""The tokenizer that a GGUF file's metadata describes, put together with the `tokenizers` library.

Two kinds: byte-level BPE (`gpt2`), whose way of cutting text into words the file only names, and SentencePiece's BPE
(`llama`), whose merges follow from the scores of its tokens. A name that is not known here is refused: a text cut
otherwise gives other tokens, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.gguf_header import Value

# `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Words as the families' own tokenizer.json cuts them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Words:
    """How a family cuts text before merging."""

    patterns: tuple[str, ...]
    """One after the other, each within what the last left."""
    composes: bool = False
    """Whether text is normalised to composed characters first (NFC)."""
    takes_whole_words: bool = False
    """Whether a word that is a token is taken without merging."""


_WORDS = {
    "gpt-2": _Words((_GPT2,)),
    "smollm": _Words((r"\p{N}", _GPT2)),
    "llama-bpe": _Words((_LLAMA3,), takes_whole_words=True),
    "qwen2": _Words((_QWEN2,), composes=True),
    "deepseek-r1-qwen": _Words((_QWEN2,)),
    "tekken": _Words((_TEKKEN,), takes_whole_words=True),
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a file says of its tokenizer."""

    backend: tokenizers.Tokenizer
    eos_ids: frozenset[int]
    """The end of a turn and the end of a text differ in some models; both end an answer."""
    special: dict[str, str]
    """`bos_token` and the like → its text, for chat templates."""


def read_gguf_tokenizer(path: Path, metadata: Mapping[str, Value]) -> GGUFTokenizer:
    """The tokenizer of the file at `path`.

    Raises:
        ModelUnavailable: none, damaged, or of a kind that is not supported.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is None:
        raise ModelUnavailable(f"{path} has no tokenizer: the key tokenizer.ggml.model is missing", "ModelMissing")
    words = _WORDS.get(pre) if kind == "gpt2" and isinstance(pre, str) else None
    if words is None and kind != "llama":
        raise ModelUnavailable(
            f"{path}: its tokenizer is {kind!r} with pre-tokenizer {pre!r}; supported in GGUF are 'gpt2' with "
            f"{', '.join(map(repr, _WORDS))}, and 'llama' (a Hugging Face directory with tokenizer.json may hold any)",
            "ModelUnsupported",
        )
    try:
        tokens = [str(token) for token in cast("list[str]", metadata["tokenizer.ggml.tokens"])]
        types = cast("list[int]", metadata["tokenizer.ggml.token_type"])
        if words is None:
            scores = cast("list[float]", metadata["tokenizer.ggml.scores"])
            prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
            backend = _sentencepiece(tokens, scores, types, prefixed=prefixed)
        else:
            merges = [str(merge).split(" ", 1) for merge in cast("list[str]", metadata["tokenizer.ggml.merges"])]
            backend = _byte_level(tokens, cast("list[tuple[str, str]]", list(map(tuple, merges))), words)
        # Control tokens add no text; those that somebody added by hand do.
        backend.add_tokens(
            [
                AddedToken(token, special=of == _CONTROL, normalized=False)
                for token, of in zip(tokens, types, strict=True)
                if of in {_CONTROL, _USER_DEFINED}
            ]
        )
    except KeyError as error:
        raise ModelUnavailable(f"{path} lacks the key {error.args[0]}") from error
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        line = " ".join(str(error).split())[:300]
        raise ModelUnavailable(f"{path}: its tokenizer is damaged: {line}") from error
    special = {
        f"{short}_token": tokens[token_id]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := _id_within(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))) is not None
    }
    # SentencePiece's models begin with it unless they say otherwise, the others only if they say so.
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in special:
        bos = special["bos_token"]
        first = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))])
        backend.post_processor = (
            first if words is None else processors.Sequence([processors.ByteLevel(trim_offsets=False), first])
        )
    eos_ids = {
        token_id
        for name in ("eos", "eot", "eom")
        if (token_id := _id_within(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))) is not None
    }
    return GGUFTokenizer(backend, frozenset(eos_ids), special)


def _byte_level(tokens: list[str], merges: list[tuple[str, str]], words: _Words) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words.takes_whole_words))
    if words.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: list[str], scores: list[float], types: list[int], *, prefixed: bool) -> tokenizers.Tokenizer:
    """BPE over characters with a byte where there is no token, and a space in front of the text if `prefixed`."""
    ids = {token: index for index, token in enumerate(tokens)}
    normal = {token for token, of in zip(tokens, types, strict=True) if of == _NORMAL}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        parts = [(token[:at], token[at:]) for at in range(1, len(token))] if token in normal else []
        merges += [(-score, -len(left), left, right) for left, right in parts if left in normal and right in normal]
    # The likeliest token first; of the ways to put one together, that with the longest beginning.
    merges.sort(key=lambda merge: merge[:2])
    unknown = next((token for token, of in zip(tokens, types, strict=True) if of == _UNKNOWN), None)
    pairs = [(left, right) for _, _, left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # Also after each special token, as the families' own tokenizer.json and llama.cpp have it.
    first = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _id_within(metadata: Mapping[str, Value], key: str, size: int) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and 0 <= value < size else None
