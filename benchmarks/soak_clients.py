"""The clients of a soaked pod: each asks, is refused, leaves, reads too slowly or changes adapters, by its own seed.

What is answered is looked at: `Tally.problems` holds whatever should not have been. Next: `soak_requests.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from sluice_operator.bench.prompts import prompt
from soak_answers import streamed, whole
from soak_requests import CHAT, MODEL, Asked, drawn, refused, wide

_OK, _BUSY, _EXPIRED = 200, 429, 504
_MOST_PROBLEMS = 50
# Far beyond what anything here takes: a client that waits longer is one that was forgotten.
_PATIENCE_S = 180.0
# A slow reader's own buffer; the gate's stall timeout is 30 s.
_RECEIVE_BYTES, _SILENT_S = 4096, 40.0
_MOST_PAUSE_S = 1.0


@dataclass(slots=True)
class Tally:
    """What became of all calls."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0

    def wrong(self, what: str) -> None:
        """Something that must not be."""
        self.num_problems += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(what)
            print(f"  WRONG: {what}", flush=True)


class SoakClient:
    """One client: a call after the other until its time is up."""

    def __init__(self, url: str, admin_url: str, adapters: list[str], tally: Tally, seed: int) -> None:
        """`adapters`: directories that may be loaded."""
        self._url, self._admin_url = url, admin_url
        self._adapters = adapters
        self._tally = tally
        self._rng = random.Random(seed)
        self._name = f"client-{seed}"
        self._num_loads = 0

    async def run(self, until: float) -> None:
        """Ask until that moment of the monotonic clock, and end what was begun."""
        acts: dict[Callable[[], Awaitable[None]], int] = {
            self._ask: 78, self._leave: 8, self._be_refused: 8, self._look: 4, self._use_adapter: 3,
            self._read_slowly: 1, self._read_nothing: 1,
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            while time.monotonic() < until:
                act = self._rng.choices(list(acts), list(acts.values()))[0]
                try:
                    await act()
                except (aiohttp.ClientError, OSError, ValueError, LookupError, TimeoutError) as error:
                    self._tally.wrong(f"{act.__name__}: {type(error).__name__}: {error}")

    async def _ask(self) -> None:
        await self._answered(drawn(self._rng))

    async def _answered(self, asked: Asked) -> str:
        """One call to its end; its outcome."""
        async with self._session.post(self._url + asked.path, json=asked.body, headers=asked.headers) as response:
            self._tally.statuses[response.status] += 1
            if response.status != _OK:
                return await self._told_no(asked, response)
            if asked.body.get("stream"):
                error, choices, usage = await streamed(response)
            else:
                error, (choices, usage) = "", whole(await response.json())
        if error:
            return self._cut_short(asked, error)
        for problem in asked.problems(choices, usage):
            self._tally.wrong(f"{asked.kind}: {problem}; asked {json.dumps(asked.body)[:600]}")
        self._tally.outcomes[f"{asked.kind}: whole"] += 1
        return "whole"

    async def _told_no(self, asked: Asked, response: aiohttp.ClientResponse) -> str:
        error = json.loads(await response.read())["error"]
        code = str(error["code"])
        self._tally.outcomes[f"{asked.kind}: {response.status} {code}"] += 1
        if response.status == _BUSY:
            wait_s = float(response.headers.get("retry-after-ms", "200")) / 1000
            await asyncio.sleep(min(wait_s, _MOST_PAUSE_S) * self._rng.random())
        elif not (response.status == _EXPIRED and asked.kind == "bounded"):
            self._tally.wrong(f"{asked.kind}: {response.status} {error}; asked {json.dumps(asked.body)[:600]}")
        return code

    def _cut_short(self, asked: Asked, code: str) -> str:
        self._tally.outcomes[f"{asked.kind}: event {code}"] += 1
        if not (code == "deadline_missed" and asked.kind == "bounded"):
            self._tally.wrong(f"{asked.kind}: its stream ended with {code}")
        return code

    async def _leave(self) -> None:
        """Ask, and be gone before the end."""
        asked = drawn(self._rng)
        try:
            async with asyncio.timeout(self._rng.choice((0.01, 0.2, 1.0)) * self._rng.random()):
                async with self._session.post(self._url + asked.path, json=asked.body) as response:
                    self._tally.statuses[response.status] += 1
                    async for _ in response.content:
                        if self._rng.random() < 0.1:
                            break
                    response.close()
        except (TimeoutError, aiohttp.ClientError):
            pass
        self._tally.outcomes["left"] += 1

    async def _be_refused(self) -> None:
        method, path, body, headers, expected = refused(self._rng)
        # The gate answers before it has read a body that it will not take: the rest of it may not be sendable.
        try:
            async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientConnectionError, ConnectionError):
            if expected != 413:
                raise
            self._tally.outcomes["refused: cut while sending"] += 1
            return
        self._tally.statuses[status] += 1
        self._tally.outcomes[f"refused: {status}"] += 1
        if status not in {expected, _BUSY} or not json.loads(answer)["error"]["message"]:
            self._tally.wrong(f"{status} instead of {expected}: {method} {path} {body[:300]!r}: {answer[:300]!r}")

    async def _look(self) -> None:
        """Read every page that there is, and have texts tokenized."""
        text = prompt(self._rng, 5, 300)
        body = {"model": MODEL, "prompt": text}
        async with self._session.post(f"{self._url}/tokenize", json=body) as response:
            self._tally.statuses[response.status] += 1
            tokens = (await response.json()).get("tokens")
        if tokens is not None:
            async with self._session.post(
                f"{self._url}/detokenize", json={"model": MODEL, "tokens": tokens}
            ) as response:
                if response.status == _OK and (await response.json())["prompt"] != text:
                    self._tally.wrong("a text that was tokenized did not come back")
        pages = [f"{self._url}{path}" for path in ("/v1/models", f"/v1/models/{MODEL}", "/openapi.json", "/health")]
        pages += [
            f"{self._admin_url}/{path}" for path in ("metrics", "state", "steps?last=4096", "decisions?last=4096")
        ]
        for page in self._rng.sample(pages, 4):
            async with self._session.get(page) as response:
                self._tally.statuses[response.status] += 1
                await response.read()
                if response.status != _OK:
                    self._tally.wrong(f"{page}: {response.status}")
        self._tally.outcomes["pages"] += 1

    async def _use_adapter(self) -> None:
        """Load one under a name of its own, ask of it, and unload it while it answers."""
        self._num_loads += 1
        name = f"{self._name}-{self._num_loads}"
        status, code = await self._adapter("load", {"lora_name": name, "lora_path": self._rng.choice(self._adapters)})
        if code == "too_many_adapters":
            return
        if status != _OK:
            self._tally.wrong(f"an adapter was not loaded: {status} {code}")
            return
        asked = [drawn(self._rng) for _ in range(2)]
        for one in asked:
            one.body["model"] = name
        await self._answered(asked[0])
        # The last answer may be under way, not begun, or over.
        last = asyncio.create_task(self._answered_or_gone(asked[1]))
        await asyncio.sleep(self._rng.random() * 0.5)
        status, code = await self._adapter("unload", {"lora_name": name})
        await last
        if status != _OK:
            self._tally.wrong(f"an adapter was not unloaded: {status} {code}")

    async def _answered_or_gone(self, asked: Asked) -> None:
        async with self._session.post(self._url + asked.path, json=asked.body) as response:
            self._tally.statuses[response.status] += 1
            body = await response.read()
        self._tally.outcomes[f"adapter: {response.status}"] += 1
        if response.status not in {_OK, 404, _BUSY, _EXPIRED}:
            self._tally.wrong(f"of an adapter: {response.status} {body[:300]!r}")

    async def _adapter(self, act: str, body: dict[str, str]) -> tuple[int, str]:
        async with self._session.post(f"{self._admin_url}/v1/{act}_lora_adapter", json=body) as response:
            answer = await response.read()
        code = "" if response.status == _OK else str(json.loads(answer)["error"]["code"])
        self._tally.outcomes[f"adapter: {act} {code or 'done'}"] += 1
        return response.status, code

    async def _read_slowly(self) -> None:
        """Some kilobytes a second for a while, then the rest at once: an answer has to be whole all the same."""
        await self._wide("read slowly", pause_s=0.02, slow_s=8.0, whole=True)

    async def _read_nothing(self) -> None:
        """Nothing, until the gate has to have cut it: what its buffers took is all that comes."""
        await self._wide("read nothing", pause_s=_SILENT_S, slow_s=_SILENT_S, whole=False)

    async def _wide(self, what: str, *, pause_s: float, slow_s: float, whole: bool) -> None:
        body = json.dumps(wide(self._rng).body).encode()
        host, _, port = self._url.removeprefix("http://").partition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock, limit=_RECEIVE_BYTES)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            slow_until = time.monotonic() + slow_s
            first, last, cut = b"", b"", False
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    while True:
                        if time.monotonic() < slow_until:
                            await asyncio.sleep(pause_s)
                        piece = await reader.read(512 if time.monotonic() < slow_until else 65_536)
                        if not piece:
                            break
                        first, last = first or piece, (last + piece)[-64:]
            except ConnectionError:
                cut = True
            writer.transport.abort()
        status = int(first.split(maxsplit=2)[1]) if first else 0
        self._tally.statuses[status] += 1
        is_whole = b"[DONE]" in last
        self._tally.outcomes[f"{what}: {'whole' if is_whole else 'cut' if status in {0, _OK} else status}"] += 1
        if whole and (cut or (status == _OK and not is_whole)):
            self._tally.wrong(f"{what}: cut after {last!r}")
