"""What a repository of a hub lists, and which of its files are the model. Pure.

Owns the choice of files and how their content is checked: the hub gives a SHA-256 for large files and git's own SHA-1
for small ones. Knows no network and no disk. Next: `hub_cache.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sluice_engine.errors import ModelUnavailable

# What the tokenizer and the weights' readers look for. Weights are safetensors: the loader reads nothing that is code.
_BESIDE = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map)\.json|chat_template\.jinja"
)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_MOST_NAMES = 5
_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository at one commit."""

    name: str
    """Relative to the repository's root."""
    size_bytes: int
    checksum: str = ""
    """64 hexadecimal digits: SHA-256; 40: git's SHA-1 of the blob; empty: nobody told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubListing:
    """All files of a repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]


class Checksum:
    """Takes a file's bytes as they come and says at the end whether they are the file."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
        if len(file.checksum) == _SHA256_DIGITS:
            self._hash = hashlib.sha256()
        else:
            # What git makes an object's name of: its kind, its size, its bytes. A name and no safeguard.
            self._hash = hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)

    def add(self, content: bytes) -> None:
        """The next bytes."""
        self._hash.update(content)

    @property
    def is_right(self) -> bool:
        """Whether these were the bytes that the hub has; True where it did not say."""
        return not self._file.checksum or self._hash.hexdigest() == self._file.checksum


def model_files(listing: HubListing, file: str, where: str) -> tuple[HubFile, ...]:
    """The files that the engine reads: the one that is named, else a Hugging Face directory's.

    `file` is a GGUF file of the repository, or empty; `where` names repository and revision in messages.

    Raises:
        ModelUnavailable: what is needed is not among them.
    """
    found = {one.name: one for one in listing.files if ".." not in one.name.split("/")}
    ggufs = sorted(name for name in found if name.endswith(".gguf"))
    if file:
        if file not in found:
            raise ModelUnavailable(f"{where} has no file {file}; {_told(ggufs, 'GGUF files')}", "ModelMissing")
        return (found[file],)
    if "config.json" not in found:
        known = f"; {_told(ggufs, 'GGUF files')}: name one as model.source.huggingFace.file" if ggufs else ""
        raise ModelUnavailable(f"{where} has no config.json at its root{known}", "ModelMissing")
    weights = [_SINGLE] if _SINGLE in found else [_INDEX, *sorted(filter(_SHARD.fullmatch, found))]
    if weights[0] not in found:
        raise ModelUnavailable(f"{where} has neither {_SINGLE} nor {_INDEX}", "ModelUnsupported")
    return tuple(found[name] for name in (*sorted(filter(_BESIDE.fullmatch, found)), *weights))


def _told(names: Sequence[str], what: str) -> str:
    if not names:
        return f"it has no {what}"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"its {what} are {', '.join(names[:_MOST_NAMES])}{more}"
