"""Measures another engine once, before its door opens: a few requests to the idle engine, and their times.

Owns the questions. Their text begins with a number that no earlier start used, so that nothing of it is cached.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable

import aiohttp

from sluice_sidecar.engines.connection import OK, EngineConnection
from sluice_sidecar.engines.learned import Calibration
from sluice_sidecar.errors import EngineUnreachable

SHORT_WORDS = 16
LONG_WORDS = 400
OUTPUT_TOKENS = 16
# The first compiles and allocates; of the others the faster one is the engine's own time.
ROUNDS = 3
# Of some hundred tokens no engine is silent for so long; its door stays shut until it has answered.
SILENCE_S = 120.0
# A word and its space are at most this many tokens, so that the long prompt fits for certain.
_TOKENS_PER_WORD = 2
_WORDS = ("river", "stone", "under", "light", "seven", "paper", "morning", "garden", "windows", "rain", "and", "tower")
_TEXT = re.compile(rb'"text":\s*"[^"]')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')


async def calibrate(
    connection: EngineConnection, model: str, clock: Callable[[], int], context_tokens: int
) -> Calibration:
    """The times of an idle engine.

    Raises:
        EngineUnreachable: it gave no stream of tokens.
    """
    words = max(SHORT_WORDS, min(LONG_WORDS, context_tokens // (2 * _TOKENS_PER_WORD)))
    short, long = [], []
    for number in range(ROUNDS):
        short.append(await _ask(connection, model, clock, SHORT_WORDS, f"{clock()} {number}"))
        long.append(await _ask(connection, model, clock, words, f"{number} {clock()}"))
    short_tokens, short_us, gap_us = min(short[1:], key=lambda times: times[1])
    long_tokens, long_us, _ = min(long[1:], key=lambda times: times[1])
    gap_us = min(gap_us, *(times[2] for times in short[1:]))
    return Calibration(
        short_tokens=short_tokens, short_us=short_us, long_tokens=long_tokens, long_us=long_us, gap_us=gap_us
    )


async def _ask(
    connection: EngineConnection, model: str, clock: Callable[[], int], words: int, start: str
) -> tuple[int, int, int]:
    """(prompt tokens, µs to the first token, µs between two)."""
    text = f"{start} " + " ".join(_WORDS[index % len(_WORDS)] for index in range(words))
    body = {
        "model": model, "prompt": text, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    asked_us = clock()
    first_us = last_us = 0
    tokens, tail = 0, b""
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(SILENCE_S),
            connection.request("POST", "/v1/completions", headers=headers, body=json.dumps(body).encode()) as answer,
        ):
            if answer.status != OK:
                raise EngineUnreachable(f"it answered a first question with status {answer.status}", refused=False)
            while chunk := await answer.content.readany():
                if found := len(_TEXT.findall(chunk)):
                    tokens += found
                    last_us = clock()
                    first_us = first_us or last_us
                tail = (tail + chunk)[-2048:]
    except TimeoutError as error:
        raise EngineUnreachable("it did not answer a first question in time", refused=False) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise EngineUnreachable(str(error), refused=False) from error
    if not tokens:
        raise EngineUnreachable("it answered a first question without text", refused=False)
    usage = _PROMPT_TOKENS.findall(tail)
    prompt_tokens = int(usage[-1]) if usage else words
    return prompt_tokens, first_us - asked_us, max(1, (last_us - first_us) // max(1, tokens - 1))
