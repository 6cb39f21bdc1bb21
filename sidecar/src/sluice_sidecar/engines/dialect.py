"""What is particular to one engine: the names of its metrics, where its facts stand, what it makes of a priority.

The shape that `vllm`, `sglang` and `llamacpp` have in common; `foreign` is the link that speaks any of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sluice_sidecar.engines.page import Page
from sluice_sidecar.engines.reading import Facts, Reading, Unhealthy

GetJson = Callable[[str], Awaitable[Any]]
PostJson = Callable[[str, dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How one engine behaves."""

    name: str
    families: tuple[str, ...]
    """Families of its page that are read, old names too."""
    required: dict[str, str]
    """Without these fields of a reading nothing can be decided: the field, and the family it comes from."""
    priority_sign: int = 0
    """What its `priority` means: +1 small numbers first, as ours; −1 large ones first; 0 it has none."""
    keep_alive_s: float = 2.0
    """How long an idle connection is kept; its server closes it a little later. 0: one connection a call."""
    health_every_us: int = 1_000_000
    unhealthy: Unhealthy = "silent"
    frozen_after_us: int = 1_000_000
    """How long its numbers may stand still while it works: they are written once in so many steps."""
    default_chunk_tokens: int = 2048
    """Prefill that one step takes where nobody tells."""


class Dialect(Protocol):
    """One engine's way to say things."""

    traits: Traits

    def read(self, page: Page) -> Reading:
        """What a page says."""
        ...

    async def facts(self, get_json: GetJson) -> Facts:
        """What stays.

        Raises:
            EngineUnreachable: no answer.
        """
        ...

    async def count_tokens(self, question: dict[str, Any], post_json: PostJson) -> int | None:
        """The exact length of `messages` or of a `prompt`; None when it cannot tell."""
        ...


def whole(value: object) -> int | None:
    """A whole number from a label or a JSON field; None for anything else, as the word `None`."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value > 0 else None
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and int(value) else None


def first_model(document: object) -> dict[str, Any]:
    """The first entry of `/v1/models`; empty where there is none."""
    data = document.get("data") if isinstance(document, dict) else None
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
