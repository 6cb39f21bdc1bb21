"""Clients that stream without a pause while something is killed, and what became of every request of theirs."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

PACE_S = 0.25  # the paced engine's, between two tokens
LENGTHS_S = (5.0, 10.0)
SILENCE_S = 30.0
PAUSE_S = 0.5  # as the clients of OpenAI begin, where no answer says when to come back
GIVEN_UP_S = 90.0
BUSY = frozenset({429, 502, 503})  # 502: the engine ended before it answered
MODEL = "paced"


@dataclass(slots=True)
class Load:
    """The clients of one address. Whatever comes short of a whole answer is sent again until one comes."""

    url: str
    lengths_s: tuple[float, float] = LENGTHS_S
    """How long an answer streams, at least and at most."""
    whole: int = 0
    """Answers that came to their end."""
    errors: Counter[str] = field(default_factory=Counter)
    """Streams that ended in an error event, by its code."""
    cut: int = 0
    """Streams whose connection broke: no client takes that for an end."""
    silent: list[str] = field(default_factory=list)
    """Streams that ended as if they were whole, and were not."""
    refused: Counter[int] = field(default_factory=Counter)
    """Refusals by status that say that a retry may go well."""
    unanswered: int = 0
    """Attempts that were not connected, or ended before an answer began."""
    failed: list[str] = field(default_factory=list)
    """Requests that were answered otherwise, or had no whole answer in `GIVEN_UP_S`."""
    longest_wait_s: float = 0.0
    """From a request's first attempt to the beginning of the answer that came whole."""
    longest_gap_s: float = 0.0
    """Between two tokens of an answer that came whole."""
    open_now: int = 0
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def by(self, clients: int) -> AsyncIterator[None]:
        """So many clients stream meanwhile, all from the beginning; in the end each waits for its answer."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._stream_until(over, random.Random(number)))
            while self.open_now < clients and not self.failed:
                self._moved.clear()
                await self._moved.wait()
            yield
            over.set()

    async def _stream_until(self, over: asyncio.Event, lengths: random.Random) -> None:
        while not over.is_set():
            await self._request(int(lengths.uniform(*self.lengths_s) / PACE_S))

    async def _request(self, tokens: int) -> None:
        began, attempt = time.monotonic(), 0
        while True:
            # A connection of its own, so that the node balances it anew.
            timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                pause_s = await self._attempt(session, tokens, attempt, began)
            self._moved.set()
            if pause_s is None:
                return
            if time.monotonic() - began > GIVEN_UP_S:
                self.failed.append(f"no whole answer in {GIVEN_UP_S:.0f} s and {attempt + 1} attempts")
                return
            attempt += 1
            await asyncio.sleep(pause_s)

    async def _attempt(self, session: aiohttp.ClientSession, tokens: int, attempt: int, began: float) -> float | None:
        """One try; how long to wait for the next, None where none is wanted."""
        body = {"model": MODEL, "max_tokens": tokens, "stream": True, "messages": [{"role": "user", "content": "go"}]}
        headers = {"x-stainless-retry-count": str(attempt)}
        try:
            async with session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                if answer.status == 200:
                    waited_s = time.monotonic() - began
                    is_whole = await self._read(answer, tokens)
                    self.longest_wait_s = max(self.longest_wait_s, waited_s) if is_whole else self.longest_wait_s
                    return None if is_whole else PAUSE_S
                if answer.status in BUSY and answer.headers.get("x-should-retry") == "true":
                    self.refused[answer.status] += 1
                    return float(answer.headers.get("Retry-After", PAUSE_S))
                self.failed.append(f"{answer.status}: {(await answer.text())[:200]}")
                return None
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.unanswered += 1
            return PAUSE_S

    async def _read(self, answer: aiohttp.ClientResponse, tokens: int) -> bool:
        """Whether the answer came whole."""
        got, is_done, last, longest_s = 0, False, time.monotonic(), 0.0
        self.open_now += 1
        self._moved.set()
        try:
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                longest_s, last = max(longest_s, now - last), now
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif b'"error"' in line:
                    self.errors[json.loads(line[6:])["error"]["code"]] += 1
                    return False
                elif b'"delta"' in line:
                    got += 1
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.cut += 1
            return False
        finally:
            self.open_now -= 1
        if not is_done or got != tokens:
            self.silent.append(f"a clean end after {got} of {tokens} tokens{', said to be done' if is_done else ''}")
            return False
        self.whole += 1
        self.longest_gap_s = max(self.longest_gap_s, longest_s)
        return True
