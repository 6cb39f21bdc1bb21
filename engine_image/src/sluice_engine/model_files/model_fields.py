"""A model's configuration, field by field: taken out with checks whose one line names file and field.

It knows no family; `hf_config` and `gguf_metadata` say which fields there are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.architecture import Architecture

_MOST_CHARACTERS = 60  # of a value that an error quotes


class ModelFields:
    """The fields of one file, or of the part of it whose names have a prefix."""

    def __init__(self, where: str, data: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self._prefix = prefix
        self._data = data

    def get(self, name: str, default: object = None) -> Any:  # noqa: ANN401  # whatever the file holds
        """A field as it is; `default` where there is none."""
        return self._data.get(self._prefix + name, default)

    def only(self, name: str, accepted: object, *, default: object) -> None:
        """Refuse the model unless a field has this value, or none and `default` is this value.

        Raises:
            ModelUnavailable: as do all that follow.
        """
        value = self.get(name)
        if value is None:
            value = default
        if value != accepted:
            self.unsupported(f"{self._prefix}{name} {_shown(value)}; only {accepted!r} is supported")

    def known(self, names: Collection[str]) -> None:
        """Refuse the model for a field that nobody here reads: it may change what the model computes.

        Null, false and what is empty switch nothing on.
        """
        for name in sorted(self._data):
            value = self._data[name]
            if name.startswith(self._prefix) and name.removeprefix(self._prefix) not in names and value:
                self.unsupported(f"field {name} {_shown(value)}: it may change what the model computes")

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.corrupt(f"{self._prefix}{name} must be a positive whole number, not {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            self.corrupt(f"{self._prefix}{name} must be a positive number, not {_shown(value)}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.corrupt(f"{self._prefix}{name} must be true or false, not {_shown(value)}")
        return value

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            self.corrupt(f"{self._prefix}{name} is missing")
        return value

    def checked(self, shape: Architecture) -> Architecture:
        """The same shape, if it can be one."""
        if shape.num_heads % shape.num_kv_heads:
            self.corrupt(f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} KV heads")
        if shape.head_dim % 2:
            self.corrupt(f"the head dimension {shape.head_dim} is odd; rotary embedding turns pairs")
        return shape

    def corrupt(self, problem: str) -> NoReturn:
        """Refuse the model as damaged."""
        raise ModelUnavailable(f"{self.where}: {problem}", "ModelCorrupt")

    def unsupported(self, problem: str) -> NoReturn:
        """Refuse the model as one that is not computed."""
        raise ModelUnavailable(f"{self.where}: unsupported {problem}", "ModelUnsupported")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
