"""The bytes that each token adds to a text, read off a tokenizer's own decoder.

Two families cover the supported models: byte-level BPE (GPT-2's printable alphabet for bytes) and SentencePiece-like
tokenizers (`▁` for a space, `<0x0A>` for a byte). Tokens as bytes make decoding a concatenation, the same at any cut.
"""

from __future__ import annotations

import json
import re

import tokenizers

from sluice_engine.errors import ModelUnavailable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """Token id → bytes; special tokens add none.

    Raises:
        ModelUnavailable: the tokenizer decodes in a way that is not concatenation.
    """
    description = json.loads(backend.to_str())
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    table = [b""] * size
    decoder = description.get("decoder") or {}
    kinds = _kinds(decoder)
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        for token, token_id in vocabulary.items():
            table[token_id] = _from_alphabet(token, alphabet)
    elif kinds and set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        falls_back = "ByteFallback" in kinds
        for token, token_id in vocabulary.items():
            byte = _BYTE_TOKEN.fullmatch(token) if falls_back else None
            table[token_id] = bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
    else:
        found = " + ".join(kinds) or "none"
        raise ModelUnavailable(f"its tokenizer's decoder ({found}) is not supported", "ModelUnsupported")
    for added in description.get("added_tokens", []):
        # An added token is written as it stands, whatever alphabet the vocabulary uses.
        table[added["id"]] = b"" if added["special"] else added["content"].encode()
    return tuple(table)


def _kinds(decoder: dict[str, object]) -> list[str]:
    parts = decoder.get("decoders")
    if isinstance(parts, list):
        return [kind for part in parts for kind in _kinds(part)]
    return [str(decoder["type"])] if "type" in decoder else []


def _byte_alphabet() -> dict[str, int]:
    """Character → byte: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _from_alphabet(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:  # not written in the alphabet: a token added by hand
        return token.encode()
