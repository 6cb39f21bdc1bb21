"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`. Their words are vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sluice_engine.protocol.body import Fields, parse_object

NAME_RULE = "must be 1 to 128 letters, digits or . _ : / -, the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """An adapter to be served under a name."""

    name: str
    path: str


def parse_load(raw: bytes) -> LoadAdapter:
    """The call in a request body.

    Raises:
        InvalidRequest: with `param` and `code`.
    """
    fields = parse_object(raw)
    name, path = _name(fields), fields.required_text("lora_path")
    if not 1 <= len(path) <= _MAX_PATH or "\0" in path:
        fields.refuse("lora_path", f"must be a path of 1 to {_MAX_PATH} characters")
    if fields.flag("load_inplace"):
        fields.unsupported("load_inplace", value=True)
    fields.text("base_model_name")  # whatever it is: the tensors' shapes say what the adapter is for
    fields.end()
    return LoadAdapter(name, path)


def parse_unload(raw: bytes) -> str:
    """The name in a request body.

    Raises:
        InvalidRequest: with `param` and `code`.
    """
    fields = parse_object(raw)
    name = _name(fields)
    fields.integer("lora_int_id", 0, 2**63 - 1)  # vLLM's own number for it: the name says enough
    fields.end()
    return name


def _name(fields: Fields) -> str:
    name = fields.required_text("lora_name")
    if not _NAME.fullmatch(name):
        fields.refuse("lora_name", NAME_RULE)
    return name
