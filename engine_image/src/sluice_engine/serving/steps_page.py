"""`/steps` as JSON in small pieces: thousands of steps make tens of megabytes, and no stream may wait for them.

Owns the form of the document; what a step is stands in `core.trace`. A piece takes a few milliseconds, and between two
of them whoever writes it can give way to the streams and to the engine's own thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from sluice_engine.codec import encode
from sluice_engine.core.trace import StepRecord
from sluice_engine.serving.service import EngineService

# Shares of requests in one piece: about 2 ms of work.
PIECE_SHARES = 1024
# Ended requests in one piece, each about as much as ten shares.
PIECE_REQUESTS = 128


def steps_page(service: EngineService, count: int) -> Iterator[bytes]:
    """The last step records, and the requests that ended since the first of them; oldest first."""
    if service.engine is None:
        yield b'{"steps":[],"requests":[]}'
        return
    loop = service.engine.loop
    ended, since = loop.ended.copy(), 0
    yield b'{"steps":['
    separator, shares = "", 0
    texts: list[str] = []
    for record in loop.trace.each(count):
        since = since or record.step
        texts.append(_json(_step(record)))
        shares += 1 + len(record.scheduled)
        if shares >= PIECE_SHARES:
            yield (separator + ",".join(texts)).encode()
            separator, shares = ",", 0
            texts.clear()
    if texts:
        yield (separator + ",".join(texts)).encode()
    yield b'],"requests":['
    separator = ""
    for some in _in_parts([request for request in ended if request.ended_step >= since], PIECE_REQUESTS):
        yield (separator + ",".join(_json(encode(request)) for request in some)).encode()
        separator = ","
    yield b"]}"


def _step(record: StepRecord) -> dict[str, Any]:
    """As `encode` would have it, at a tenth of its price for each share."""
    document: dict[str, Any] = encode(replace(record, scheduled=()))
    document["scheduled"] = [
        {
            "request_id": share.request_id,
            "slot": share.slot,
            "start": share.start,
            "num_tokens": share.num_tokens,
            "sampled": share.sampled,
            "draft_tokens": share.draft_tokens,
        }
        for share in record.scheduled
    ]
    return document


def _json(document: object) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _in_parts(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))
