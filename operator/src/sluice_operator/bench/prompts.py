"""What the clients ask: prompts of common words by a seed, or those of a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from sluice_operator.errors import InvalidSettings

_VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
_WORDS = _VOCABULARY.split()


def prompt(rng: random.Random, low: int = 32, high: int = 256) -> str:
    """A prompt of `low` to `high` words."""
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(low, high)))


def drawn(seed: int, low: int, high: int) -> Iterator[str]:
    """Prompts without an end, the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311  # words, no secrets
    while True:
        yield prompt(rng, low, high)


def read(path: Path) -> Iterator[str]:
    """The prompts of a file, over and over: a line each, or where the line is a JSON object its `prompt`.

    Raises:
        InvalidSettings: it cannot be read, or holds none. The text names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"--prompts: {path}: {error}") from error
    prompts = [_of_line(line, f"--prompts: {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidSettings(f"--prompts: {path} holds no prompt")
    return itertools.cycle(prompts)


def _of_line(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        text = json.loads(line).get("prompt")
    except (ValueError, RecursionError) as error:
        raise InvalidSettings(f"{where}: {error}") from error
    if not isinstance(text, str) or not text:
        raise InvalidSettings(f"{where}: an object needs a text under `prompt`")
    return text
