"""`/steps` is one JSON document, made in pieces that hold up nobody."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.serving import Served, served
from sluice_engine.codec import encode
from sluice_engine.serving import steps_page as module
from sluice_engine.serving.steps_page import steps_page


async def _busy(engine: Served) -> None:
    body = {"model": "tiny", "prompt": "endless", "max_tokens": 30}
    answers = await asyncio.gather(*(engine.post("/v1/completions", body) for _ in range(6)))
    assert [status for status, _ in answers] == [200] * 6
    await engine.idle()


@pytest.mark.parametrize("shares", [1, 7, 100_000], ids=["a step a piece", "a few steps", "all in one"])
async def test_the_pieces_make_the_records_whatever_their_size(monkeypatch: pytest.MonkeyPatch, shares: int) -> None:
    monkeypatch.setattr(module, "PIECE_SHARES", shares)
    monkeypatch.setattr(module, "PIECE_REQUESTS", 2)
    async with served(max_sequences=4) as engine:
        await _busy(engine)
        pieces = list(steps_page(engine.service, 4096))
        loaded = engine.service.engine
        assert loaded is not None
        loop = loaded.loop

        document = json.loads(b"".join(pieces))
        assert document["steps"] == json.loads(json.dumps([encode(record) for record in loop.trace.last(4096)]))
        assert document["requests"] == [encode(request) for request in loop.ended]
        assert len(document["steps"]) > 30
        assert (len(pieces) > len(document["steps"])) == (shares == 1)


async def test_only_requests_that_ended_since_the_first_step_are_among_them() -> None:
    async with served(max_sequences=2) as engine:
        await _busy(engine)
        (last,) = json.loads(b"".join(steps_page(engine.service, 1)))["steps"]
        document = json.loads(b"".join(steps_page(engine.service, 1)))

    assert all(request["ended_step"] >= last["step"] for request in document["requests"])
    assert 0 < len(document["requests"]) < 6


async def test_before_there_is_an_engine_there_are_no_steps() -> None:
    async with served() as engine:
        engine.service.engine = None
        assert json.loads(b"".join(steps_page(engine.service, 9))) == {"steps": [], "requests": []}
