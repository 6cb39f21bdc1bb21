"""Text to token ids and back, for the model at hand: from a Hugging Face directory, or from a GGUF file's metadata.

It knows files and the `tokenizers` library, and nothing of requests. Reading order: `load_tokenizer`, `Tokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.gguf_header import read_metadata
from sluice_engine.model_files.sources import resolve
from sluice_engine.text.chat_template import ChatTemplate
from sluice_engine.text.detokenizer import IncrementalDecoder
from sluice_engine.text.gguf_tokenizer import read_gguf_tokenizer
from sluice_engine.text.spelled import spelled_pattern
from sluice_engine.text.token_bytes import token_bytes
from sluice_engine.text.tool_format import ToolFormat, ToolTemplate, tool_format

NO_TOOLS = "this model has no chat template, and so does not know tools"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One model's tokenizer; safe to use from several threads at once."""

    backend: tokenizers.Tokenizer
    eos_ids: frozenset[int]
    """Tokens with which the model ends its turn."""
    chat_template: ChatTemplate | None
    """None for a model that was never taught to chat."""
    token_bytes: tuple[bytes, ...]
    """Token id → the bytes that it adds to the text; none for special tokens."""
    tools: ToolTemplate | str = NO_TOOLS
    """How the model is told of tools and calls them, or in a sentence why it cannot."""
    spelled_specials: re.Pattern[str] | None = None
    """Finds special tokens that are written out in a text."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`; `add_special` adds what the model expects at its start (a chat template does so itself).

        A special token spelled out in the text is that token: chat templates work by it.
        """
        # The batch call leaves the interpreter to other threads meanwhile, the single one does not. The fast one keeps
        # no note of where each token stood, which nobody asks for here.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
        return encoding.ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of a text that was cut: no token reaches over a cut."""
        encodings = self.backend.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def written(self, token_ids: Sequence[int]) -> str:
        """As `decode`, with special tokens as they are written."""
        table = self.token_bytes
        spelled = (table[token_id] or (self.backend.id_to_token(token_id) or "").encode() for token_id in token_ids)
        return b"".join(spelled).decode("utf-8", "replace")

    def shown(self, token_id: int) -> tuple[str, bytes | None]:
        """A token for a person, and the bytes that it adds to a text; a special one shows as its name, without any."""
        if token_id < len(self.token_bytes) and (added := self.token_bytes[token_id]):
            return added.decode("utf-8", "replace"), added
        # A model may have more tokens than its tokenizer knows.
        return self.backend.id_to_token(token_id) or f"<{token_id}>", None

    def decoder(
        self, stop: Sequence[str] = (), *, min_tokens: int = 0, spelled: Mapping[int, bytes] = MappingProxyType({})
    ) -> IncrementalDecoder:
        """A decoder for one choice's output; no stop string ends one that was to have more tokens.

        `spelled`: special tokens that are told all the same, and how.
        """
        return IncrementalDecoder(self.token_bytes, stop, min_tokens=min_tokens, spelled=spelled)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that came with the weights.

    Raises:
        ModelUnavailable: a file is missing or damaged, or of a kind that is not supported.
    """
    path = resolve(source)
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    parts = read_gguf_tokenizer(path, metadata)
    default, for_tools = (
        ChatTemplate(source, parts.special) if isinstance(source, str) else None
        for source in (metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_template.tool_use"))
    )
    return put_together(parts.backend, parts.eos_ids, default, for_tools)


def _from_directory(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        raise ModelUnavailable(f"{path} has no tokenizer.json", "ModelMissing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ModelUnavailable(f"{path / 'tokenizer.json'} cannot be read: {_line(error)}") from error
    backend.no_truncation()
    backend.no_padding()
    options = _read_json(path / "tokenizer_config.json")
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(options.get(name))) is not None
    }
    # What ends a turn is said in three places; the first that speaks is the one that `generate` obeys.
    for document in (_read_json(path / "generation_config.json"), _read_json(path / "config.json")):
        if (eos_ids := _ids(document.get("eos_token_id"))) is not None:
            break
    else:
        eos_ids = _ids(backend.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    sources = _templates(path, options)
    default, for_tools = (
        ChatTemplate(source, special) if isinstance(source, str) else None
        for source in (sources.get("default"), sources.get("tool_use"))
    )
    return put_together(backend, eos_ids or frozenset(), default, for_tools)


def put_together(
    backend: tokenizers.Tokenizer,
    eos_ids: frozenset[int],
    template: ChatTemplate | None,
    for_tools: ChatTemplate | None,
) -> Tokenizer:
    """With what templates and vocabulary tell of tools; a template of its own for them goes before the other."""
    table = token_bytes(backend)
    source = for_tools or template
    tools: ToolTemplate | str = NO_TOOLS
    if source is not None:
        form = tool_format(source)
        tools = form if isinstance(form, str) else ToolTemplate(source, form, _special_ids(backend, form, table))
    added = backend.get_added_tokens_decoder().values()
    pattern = spelled_pattern(token.content for token in added if token.special)
    return Tokenizer(backend, eos_ids, template, table, tools, pattern)


def _special_ids(backend: tokenizers.Tokenizer, form: ToolFormat, table: Sequence[bytes]) -> dict[str, int]:
    """Which markers of a format are special tokens."""
    ids = {marker: backend.token_to_id(marker) for marker in form.markers}
    return {marker: token_id for marker, token_id in ids.items() if token_id is not None and not table[token_id]}


def _templates(path: Path, options: Mapping[str, object]) -> dict[str, object]:
    """The sources of all templates, by name; the files beside go before what the configuration says."""
    found = options.get("chat_template")
    if isinstance(found, list):  # [{"name", "template"}]
        sources = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
    else:
        sources = {"default": found}
    files = {"default": path / "chat_template.jinja", "tool_use": path / "additional_chat_templates" / "tool_use.jinja"}
    for name, file in files.items():
        if file.is_file():
            try:
                sources[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelUnavailable(f"{file} cannot be read: {_line(error)}") from error
    return sources


def _ids(value: object) -> frozenset[int] | None:
    """A token id or a list of them, as configurations write it."""
    if isinstance(value, int):
        return frozenset({value})
    if isinstance(value, list) and value:
        return frozenset(int(each) for each in value)
    return None


def _token_text(value: object) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {_line(error)}") from error
    if not isinstance(document, dict):
        raise ModelUnavailable(f"{path} does not hold a JSON object")
    return document


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
