"""Clients that leave: from the end of their connection to the moment at which the real engine holds nothing for them.

In each of five windows: just asked, waiting at the door, before the first token, in the middle of a stream, and while a
whole answer is made. Then under load, where one in five leaves at a random moment; at the end nothing may be left.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from demo_pod import demo_service, ready_pod
from report import Bar, Report, arguments
from sluice_engine import codec
from sluice_engine.core.state import EngineState
from sluice_operator.bench.prompts import prompt
from sluice_operator.local.pod import LocalPod
from sluice_sidecar.telemetry.measure import percentile

SERVICE = demo_service(
    "aborts", scheduling={"maxSequences": 4}, admission={"maxWait": "10s"}, cache={"capacity": "256Mi"}
)
SLOTS = 4
POLL_S = 0.005
PATIENCE_S = 20.0
# A slow machine sees fewer clients instead of a longer run: with the start of the pod, all ends within five minutes.
WINDOW_S, LOAD_S, ANSWER_S = 30.0, 75.0, 30.0


@dataclass(slots=True)
class Scene:
    """The running pod, and what is asked of it."""

    pod: LocalPod
    engine: aiohttp.ClientSession
    rng: random.Random

    async def engine_state(self) -> EngineState:
        async with self.engine.get("http://engine/state") as response:
            return codec.decode(EngineState, await response.json(), "state", ignore_unknown=True)

    async def ask(self, *, words: int = 20, tokens: int = 400, stream: bool = True) -> tuple[
        asyncio.StreamReader, asyncio.StreamWriter
    ]:  # fmt: skip
        """A request on a connection of its own, whose end is ours to choose."""
        host, _, port = self.pod.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        message = {"role": "user", "content": prompt(self.rng, words, words)}
        asked = {"model": "aborts", "messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        body = json.dumps(asked).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def until(self, claim: Callable[[EngineState], bool]) -> float:
        """Wait for a state of the engine's; the seconds it took."""
        started = time.monotonic()
        while not claim(await self.engine_state()):
            if time.monotonic() - started > PATIENCE_S:
                raise TimeoutError("the engine did not come to it")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - started

    async def until_gate(self, name: str, value: float) -> float:
        """Wait for a number of the gate's; the seconds it took."""
        started = time.monotonic()
        while await self.gate_figure(name) != value:
            if time.monotonic() - started > PATIENCE_S:
                raise TimeoutError(f"{name} did not become {value}")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - started

    async def gate_figure(self, name: str) -> float:
        """A number from the gate's metrics."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.pod.admin_url}/metrics") as response:
            found = re.search(rf"^{name} (\S+)$", await response.text(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])


def is_empty(state: EngineState) -> bool:
    return not state.requests and state.pool is not None and state.pool.free_blocks == state.pool.total_blocks


def is_taken(state: EngineState) -> bool:
    return bool(state.requests)


async def just_asked(scene: Scene) -> float:
    """Within five milliseconds: its body, its verdict or its connection to the engine are on their way."""
    _, writer = await scene.ask()
    await asyncio.sleep(scene.rng.uniform(0, 0.005))
    writer.transport.abort()
    await asyncio.sleep(0.02)  # in case it had not reached the engine yet
    return 0.02 + await scene.until(is_empty)


async def at_the_door(scene: Scene) -> float:
    inside = [await scene.ask(tokens=300) for _ in range(SLOTS)]
    await scene.until(lambda state: len(state.requests) == SLOTS)
    _, writer = await scene.ask()
    await scene.until_gate("sluice_gate_waiting_at_door", 1)
    writer.transport.abort()
    took_s = await scene.until_gate("sluice_gate_waiting_at_door", 0)
    for _, other in inside:
        other.transport.abort()
    await scene.until(is_empty)
    return took_s


async def before_the_first_token(scene: Scene) -> float:
    _, writer = await scene.ask(words=400)
    await scene.until(is_taken)
    writer.transport.abort()
    return await scene.until(is_empty)


async def mid_stream(scene: Scene) -> float:
    reader, writer = await scene.ask()
    seen = b""
    while seen.count(b"data: ") < 10:
        seen += await reader.read(65_536)
    writer.transport.abort()
    return await scene.until(is_empty)


async def while_a_whole_answer_is_made(scene: Scene) -> float:
    _, writer = await scene.ask(stream=False)
    await scene.until(lambda state: any(request.output_tokens > 3 for request in state.requests))
    writer.transport.abort()
    return await scene.until(is_empty)


WINDOWS: dict[str, Callable[[Scene], Awaitable[float]]] = {
    "just asked": just_asked,
    "at the door": at_the_door,
    "before the first token": before_the_first_token,
    "mid-stream": mid_stream,
    "while a whole answer is made": while_a_whole_answer_is_made,
}


async def under_load(scene: Scene, requests: int) -> dict[str, float]:
    """A dozen clients for four slots; one request in five is left at a random moment."""
    asked = left = unanswered = 0
    end = time.monotonic() + LOAD_S

    async def client(share: int) -> None:
        nonlocal asked, left, unanswered
        for _ in range(share):
            if time.monotonic() > end:
                return
            asked += 1
            reader, writer = await scene.ask(
                words=scene.rng.randint(5, 300), tokens=40, stream=scene.rng.random() < 0.7
            )
            leaves = scene.rng.random() < 0.2
            left += leaves
            try:
                async with asyncio.timeout(scene.rng.uniform(0, 1.5) if leaves else ANSWER_S):
                    answer = b""
                    while b"[DONE]" not in answer and b'"usage"' not in answer and b'"error"' not in answer:
                        answer += (piece := await reader.read(65_536))
                        if not piece:
                            break
            except TimeoutError:
                unanswered += not leaves
            writer.transport.abort()

    await asyncio.gather(*(client(requests // 12) for _ in range(12)))
    try:
        quiet_s = await scene.until(is_empty) + await scene.until_gate("sluice_gate_in_flight", 0)
    except TimeoutError as error:
        print(f"  under load: {error}", flush=True)
        quiet_s = PATIENCE_S
    state = await scene.engine_state()
    return {
        "requests": asked,
        "left": left,
        "unanswered": unanswered,
        "quiet_after_s": round(quiet_s, 3),
        "ledger_requests": await scene.gate_figure("sluice_gate_ledger_requests"),
        "held_bodies_bytes": await scene.gate_figure("sluice_gate_held_bodies_bytes"),
        "double_closes": await scene.gate_figure("sluice_gate_double_closes_total"),
        "leases_expired": await scene.gate_figure("sluice_gate_leases_expired_total"),
        "engine_requests": len(state.requests),
    }


@asynccontextmanager
async def running_pod() -> AsyncIterator[Scene]:
    async with ready_pod(SERVICE) as pod:
        connector = aiohttp.UnixConnector(path=pod.engine_socket)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as engine:
            yield Scene(pod, engine, random.Random(5))


async def measure(times: int, requests: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    async with running_pod() as scene:
        took: dict[str, list[float]] = {}
        for name, window in WINDOWS.items():
            took[name] = []
            end = time.monotonic() + WINDOW_S
            while len(took[name]) < times and time.monotonic() < end:
                try:
                    took[name].append(await window(scene))
                except TimeoutError as error:
                    print(f"  {name}: {error}", flush=True)
                    took[name].append(PATIENCE_S)
            p50, longest = percentile(took[name], 50), max(took[name])
            print(f"  {name}: {len(took[name])} clients, p50 {p50:.3f} s, longest {longest:.3f} s", flush=True)
        after = await under_load(scene, requests)
        print(f"  under load: {after}", flush=True)
        return took, after


def main() -> int:
    args = arguments(__doc__ or "")
    took, after = asyncio.run(measure(*((4, 48) if args.quick else (40, 360))))
    report = Report("aborts")
    report.data = {
        "windows": {
            name: {"clients": len(values)}
            | {f"p{percent}_s": round(percentile(values, percent), 4) for percent in (50, 99)}
            for name, values in took.items()
        },
        "under_load": after,
    }
    report.bars = [
        Bar(f"end of connection to free, p99, {name}", percentile(values, 99), "s", 1.0, "lower")
        for name, values in took.items()
    ]
    report.bars += [
        Bar("quiet after the last client", after["quiet_after_s"], "s", 1.0, "lower"),
        Bar("stayed and had no answer", after["unanswered"], "", 0, "lower"),
        Bar("left in the ledger", after["ledger_requests"], "", 0, "lower"),
        Bar("left in the engine", after["engine_requests"], "", 0, "lower"),
        Bar("bytes of bodies held", after["held_bodies_bytes"], "", 0, "lower"),
        Bar("closed twice, or by the lease", after["double_closes"] + after["leases_expired"], "", 0, "lower"),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
