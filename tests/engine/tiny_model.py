"""A tokenizer of 256 bytes and three special tokens, so that tests can write any output byte by byte."""

from __future__ import annotations

from datetime import UTC, datetime

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from sluice_engine.text.chat_template import ChatTemplate
from sluice_engine.text.token_bytes import _byte_alphabet, token_bytes
from sluice_engine.text.tokenizer import Tokenizer, put_together

START, END, EOS, FIRST_SPECIAL = 256, 257, 258, 259
TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse me' %}{{ raise_exception('no such talk') }}"
    "{% endif %}<start>{{ message.role }}\n{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    backend = _backend()
    template = ChatTemplate(TEMPLATE, {"eos_token": "<eos>"}, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
    return Tokenizer(backend, frozenset({EOS}), template, token_bytes(backend))


def tool_tokenizer(template: str, *special: str) -> Tokenizer:
    """One that knows tools by this template; special tokens beyond its own stand after them, from 259 on."""
    return put_together(_backend(*special), frozenset({EOS}), ChatTemplate(template, {}), None)


def _backend(*special: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(_byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<start>", "<end>", "<eos>", *special)])
    return backend
