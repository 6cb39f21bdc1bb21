"""Tokenizers put together from a GGUF file's metadata: as each family has them, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.errors import ModelUnavailable
from sluice_engine.text.gguf_tokenizer import GGUFTokenizer, read_gguf_tokenizer
from sluice_engine.text.token_bytes import _byte_alphabet, token_bytes

PATH = Path("model.gguf")


def byte_level(pre: str, **more: Any) -> GGUFTokenizer:
    """Bytes alone, one merge, and two tokens added by hand."""
    tokens = [*_byte_alphabet(), "he", "hey", "<|end|>", "<mark>"]
    types = [1] * 258 + [3, 4]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 258,
    }
    return read_gguf_tokenizer(PATH, metadata | more)


def words(pre: str, text: str) -> list[str]:
    splitter = byte_level(pre).backend.pre_tokenizer
    return [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "It's 2024, DON'T", ["It", "'s", " 2024", ",", " DON", "'", "T"]),
        ("smollm", "It's 2024, DON'T", ["It", "'s", " ", "2", "0", "2", "4", ",", " DON", "'", "T"]),
        ("llama-bpe", "It's 2024, DON'T", ["It", "'s", " ", "202", "4", ",", " DON", "'T"]),
        ("qwen2", "It's 2024, DON'T", ["It", "'s", " ", "2", "0", "2", "4", ",", " DON", "'T"]),
        ("tekken", "It's 2024, DON'T", ["It", "'s", " ", "2", "0", "2", "4", ",", " DON", "'T"]),
        ("llama-bpe", "HelloWorld a/b\n\n  x", ["HelloWorld", " a", "/b", "\n\n", " ", " x"]),
        ("tekken", "HelloWorld a/b\n\n  x", ["Hello", "World", " a", "/b", "\n\n", " ", " x"]),
        ("gpt-2", "HelloWorld a/b\n\n  x", ["HelloWorld", " a", "/", "b", "\n\n ", " x"]),
        ("tekken", "a ?!/\nb", ["a", " ?!/\n", "b"]),
        ("qwen2", "a ?!/\nb", ["a", " ?!/\n", "b"]),
    ],
)
def test_words_are_cut_as_the_family_cuts_them(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def test_a_word_that_is_a_token_is_taken_whole_where_the_family_does_so() -> None:
    assert byte_level("llama-bpe").backend.encode("hey").tokens == ["hey"]
    assert byte_level("qwen2").backend.encode("hey").tokens == ["he", "y"]


def test_text_is_composed_where_the_family_does_so() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    for pre, same in (("qwen2", True), ("llama-bpe", False), ("deepseek-r1-qwen", False)):
        backend = byte_level(pre).backend
        assert (backend.encode(decomposed).ids == backend.encode(composed).ids) is same, pre


def test_control_tokens_are_no_text_and_others_added_by_hand_are() -> None:
    read = byte_level("qwen2")
    table = token_bytes(read.backend)
    assert read.backend.encode("<|end|>he<mark>").ids == [258, 256, 259]
    assert [table[token] for token in (258, 256, 259)] == [b"", b"he", b"<mark>"]
    assert read.eos_ids == {258}


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        pytest.param({"tokenizer.ggml.pre": "gpt-4o"}, "ModelUnsupported", "pre-tokenizer 'gpt-4o'", id="another cut"),
        pytest.param({"tokenizer.ggml.pre": None}, "ModelUnsupported", "pre-tokenizer None", id="no name"),
        pytest.param({"tokenizer.ggml.model": "t5"}, "ModelUnsupported", "is 't5'", id="another kind"),
        pytest.param({"tokenizer.ggml.model": None}, "ModelMissing", "has no tokenizer", id="none"),
        pytest.param({"tokenizer.ggml.merges": ["h xyz"]}, "ModelCorrupt", "damaged", id="a merge of unknown tokens"),
        pytest.param({"tokenizer.ggml.token_type": [1]}, "ModelCorrupt", "damaged", id="types of fewer tokens"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(change: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(ModelUnavailable, match=says) as caught:
        byte_level("qwen2", **change)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_a_file_without_tokens_is_one_line() -> None:
    with pytest.raises(ModelUnavailable, match=r"lacks the key tokenizer\.ggml\.tokens"):
        read_gguf_tokenizer(PATH, {"tokenizer.ggml.model": "llama"})


# ---- SentencePiece

PIECES = {
    "<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)},
    "▁t": -1.0, "he": -2.0, "▁the": -3.0, "re": -4.0, "▁▁": -5.0, "here": -6.0, "▁there": -7.0, "▁a": -8.0, "er": -9.0,
    "▁": -20.0, "t": -21.0, "h": -22.0, "e": -23.0, "r": -24.0, "a": -25.0,
}  # fmt: skip
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]


def sentencepiece(**more: Any) -> GGUFTokenizer:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.scores": list(PIECES.values()),
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return read_gguf_tokenizer(PATH, metadata | more)


def by_hand(text: str) -> list[str]:
    """SentencePiece's own way: of all neighbours that are a piece together, the likeliest is put together first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (PIECES[pieces[at] + pieces[at + 1]], -at)
            for at in range(len(pieces) - 1)
            if pieces[at] + pieces[at + 1] in PIECES
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        one
        for piece in pieces
        for one in ([piece] if piece in PIECES else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


@settings(max_examples=200, deadline=None)
@given(text=st.text("there a é", min_size=1, max_size=30))
def test_scores_give_the_tokens_that_sentencepiece_gives(text: str) -> None:
    read = sentencepiece()
    encoded = read.backend.encode(text)
    assert encoded.tokens == ["<s>", *by_hand(text)]
    table = token_bytes(read.backend)
    assert b"".join(table[token] for token in encoded.ids).decode() == " " + text


def test_a_space_and_a_beginning_are_put_in_front_unless_the_file_says_otherwise() -> None:
    said = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    assert sentencepiece().backend.encode("the").tokens == ["<s>", "▁the"]
    assert sentencepiece(**said).backend.encode("the").tokens == ["t", "he"]
    assert sentencepiece().special == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_control_token_is_never_put_together_from_text() -> None:
    pieces = {"<": -30.0, "s>": -31.0, "<0x4": -1.0, "1>": -2.0}
    tokens = sentencepiece(**{
        "tokenizer.ggml.tokens": [*PIECES, *pieces],
        "tokenizer.ggml.scores": [*PIECES.values(), *pieces.values()],
        "tokenizer.ggml.token_type": [*TYPES, *[1] * len(pieces)],
    }).backend  # fmt: skip
    assert "<0x41>" not in tokens.encode("<0x41>").tokens
