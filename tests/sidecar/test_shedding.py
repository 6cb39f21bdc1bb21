"""A storm of refusals: how little is done, for whom, and what it costs those who are inside."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import Script, ScriptedEngine, live_config, ready_state
from sluice_sidecar.admission import Admission
from sluice_sidecar.capacity.cost import ChoiceCost, Cost
from sluice_sidecar.capacity.ledger import Permit
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.web import turnstile as turnstile_module
from sluice_sidecar.web.shedding import CANNED_PER_S, EARLY_PER_S, Effort, Shedding
from sluice_sidecar.web.turnstile import Turnstile

S = 1_000_000
BUSY = Refusal(Reason.SLOTS, "Busy.")


class Storm:
    """A full door, a hand-turned clock, and as many refusals as are asked for."""

    def __init__(self) -> None:
        self.now_us = 100 * S
        self.admission = Admission(
            live_config(max_wait_us=0), stale_after_us=500_000, blind_after_us=5 * S, draw=lambda lo, hi: (lo + hi) // 2
        )
        self.admission.observe(ready_state(), self.now_us, self.now_us)
        self.admission.set_unavailable(None, self.now_us)
        self.shedding = Shedding(self.admission)
        self.permits = [self.enter(f"r{number}") for number in range(4)]

    def enter(self, name: str) -> Permit:
        permit = self.admission.enter(name, Cost((ChoiceCost(64, 64),)), self.now_us, lambda _: None)
        assert isinstance(permit, Permit)
        return permit

    def refuse(self, per_second: int, refusal: Refusal = BUSY) -> None:
        """A second of it, evenly."""
        for _ in range(per_second):
            self.now_us += S // per_second
            self.shedding.refused(refusal, self.now_us)
        self.admission.observe(ready_state(), self.now_us, self.now_us)


@pytest.fixture
def storm() -> Storm:
    return Storm()


@pytest.mark.parametrize(
    ("per_second", "effort"),
    [
        pytest.param(EARLY_PER_S // 2, Effort.FULL, id="a-few"),
        pytest.param(EARLY_PER_S * 2, Effort.EARLY, id="many"),
        pytest.param(CANNED_PER_S * 2, Effort.CANNED, id="a-storm"),
    ],
)
def test_the_more_are_refused_the_less_is_done_for_each(storm: Storm, per_second: int, effort: Effort) -> None:
    storm.refuse(per_second)

    assert storm.shedding.effort(storm.now_us) is effort
    assert (storm.shedding.early(storm.now_us) is not None) is (effort is not Effort.FULL)
    assert (storm.shedding.canned(storm.now_us) is not None) is (effort is Effort.CANNED)


def test_what_is_refused_unread_is_demand_as_what_was_read_before(storm: Storm) -> None:
    assert isinstance(
        storm.admission.enter("fifth", Cost((ChoiceCost(64, 64),)), storm.now_us, lambda _: None), Refusal
    )
    read = storm.admission.demand.tokens_total["shed", "first"]
    storm.refuse(CANNED_PER_S * 2)

    assert storm.shedding.early(storm.now_us) is not None
    assert storm.shedding.canned(storm.now_us) is not None

    assert read > 0
    assert storm.admission.demand.tokens_total["shed", "first"] == 3 * read


def test_a_storm_is_forgotten_within_two_seconds(storm: Storm) -> None:
    storm.refuse(CANNED_PER_S * 2)

    storm.now_us += 2 * S

    assert storm.shedding.effort(storm.now_us) is Effort.FULL


def test_the_rate_does_not_fall_at_the_turn_of_a_second(storm: Storm) -> None:
    storm.refuse(CANNED_PER_S)
    storm.now_us += -storm.now_us % S  # the very start of the next one

    assert storm.shedding.per_second(storm.now_us) == pytest.approx(CANNED_PER_S, rel=0.05)


def test_only_refusals_for_load_make_a_storm(storm: Storm) -> None:
    storm.refuse(CANNED_PER_S * 2, Refusal(Reason.INVALID_JSON, "No."))

    assert storm.shedding.effort(storm.now_us) is Effort.FULL


def test_what_is_told_has_the_reason_that_holds_and_when_to_come_back(storm: Storm) -> None:
    for permit in storm.permits[:3]:
        storm.now_us += S
        permit.completed = True
        permit.close(storm.now_us)
    storm.admission.observe(ready_state(), storm.now_us, storm.now_us)
    storm.permits = [storm.enter(f"again{number}") for number in range(3)]
    storm.refuse(CANNED_PER_S * 2)

    refusal = storm.shedding.canned(storm.now_us)

    assert refusal is not None
    assert refusal.reason is Reason.SLOTS
    assert refusal.retry_after_us is not None
    assert storm.admission.refused_total == {"slots": 1}


def test_a_place_that_becomes_free_ends_it_at_once(storm: Storm) -> None:
    storm.refuse(CANNED_PER_S * 2)
    assert storm.shedding.canned(storm.now_us) is not None

    storm.permits[0].close(storm.now_us)

    assert storm.shedding.canned(storm.now_us) is None
    assert storm.shedding.early(storm.now_us) is None
    storm.enter("the-next")
    assert storm.shedding.canned(storm.now_us) is not None, "and it is shut again with the one who takes it"


def test_the_door_is_looked_at_seldom(storm: Storm, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = storm.admission.closed_by

    def counted(now_us: int) -> Reason | None:
        looks.append(now_us)
        return look(now_us)

    monkeypatch.setattr(storm.admission, "closed_by", counted)
    storm.refuse(CANNED_PER_S * 2)

    for _ in range(2_000):
        storm.now_us += S // 2_000
        assert storm.shedding.canned(storm.now_us) is not None

    assert len(looks) <= 51


def test_without_capacity_each_is_told_so_itself(storm: Storm) -> None:
    storm.refuse(CANNED_PER_S * 2)
    storm.admission.set_unavailable(Reason.ENGINE_DEAD, storm.now_us)
    storm.now_us += S // 10

    assert storm.shedding.canned(storm.now_us) is None


def test_where_nothing_is_refused_for_load_nothing_is_shed(storm: Storm) -> None:
    storm.shedding.enforced = False
    storm.refuse(CANNED_PER_S * 2)

    assert storm.shedding.canned(storm.now_us) is None
    assert storm.shedding.early(storm.now_us) is None


# And over HTTP.

CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "stream": true}'


async def full(gate: RunningGate, engine: ScriptedEngine) -> list[asyncio.Task[int]]:
    """Every slot taken."""
    engine.script = Script(hold_token={1: asyncio.Event()})
    tasks = [asyncio.create_task(status(gate)) for _ in range(4)]
    await until(lambda: len(engine.active) == 4)
    return tasks


async def status(gate: RunningGate) -> int:
    async with gate.post() as response:
        await response.read()
        return int(response.status)


def rage(gate: RunningGate, per_second: int) -> None:
    """As if so many had been refused within the last second."""
    now_us = gate.gate.clock()
    for _ in range(2 * per_second):
        gate.gate.shedding.refused(BUSY, now_us)


async def raw(gate: RunningGate, *pieces: bytes) -> bytes:
    """What comes back on a connection of its own, to its end."""
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def head(length: int, extra: bytes = b"") -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n" % (extra, length)


def parsed(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    top, _, body = answer.partition(b"\r\n\r\n")
    line, *lines = top.decode().split("\r\n")
    return int(line.split()[1]), {k.lower(): v for k, _, v in (x.partition(": ") for x in lines)}, json.loads(body)


async def test_early_the_body_is_not_waited_for(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate:
        tasks = await full(gate, engine)
        rage(gate, EARLY_PER_S)

        code, headers, body = parsed(await raw(gate, head(900)))

        assert (code, headers["x-sluice-reason"], body["error"]["code"]) == (429, "slots", "slots")
        assert headers["connection"] == "close"
        assert headers["x-sluice-request-id"].startswith("req-")
        assert gate.gate.shedding.early_total == 1
        for task in tasks:
            task.cancel()
        await empty(gate.gate)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([head(len(CHAT)) + CHAT], id="all-at-once"),
        pytest.param([head(len(CHAT)), CHAT], id="the-body-later"),
        pytest.param([head(1_000_000) + b"x" * 60_000], id="a-body-that-never-ends"),
        pytest.param([head(0, b"Transfer-Encoding: chunked\r\n")], id="nothing-that-makes-sense"),
    ],
)
async def test_in_a_storm_the_first_bytes_are_answered_and_the_connection_ends(
    engine: ScriptedEngine, socket_dir: Path, pieces: list[bytes]
) -> None:
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate:
        tasks = await full(gate, engine)
        rage(gate, CANNED_PER_S)

        code, headers, body = parsed(await raw(gate, *pieces))

        assert (code, headers["x-sluice-reason"], body["error"]["code"]) == (429, "slots", "slots")
        assert (headers["connection"], headers["cache-control"]) == ("close", "no-store")
        assert (headers["x-should-retry"], headers["x-envoy-ratelimited"]) == ("true", "true")
        assert gate.gate.shedding.canned_total == 1
        assert gate.gate.admission.refused_total["slots"] == 1
        for task in tasks:
            task.cancel()
        await empty(gate.gate)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        pytest.param([b"GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"], b"200 OK", id="a-probe"),
        pytest.param([b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"], b"200 OK", id="the-models"),
        pytest.param([b"GARBAGE\r\n\r\n"], b"400 Bad Request", id="no-http"),
    ],
)
async def test_in_a_storm_the_others_are_heard_as_ever(
    engine: ScriptedEngine, socket_dir: Path, pieces: list[bytes], says: bytes
) -> None:
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate:
        tasks = await full(gate, engine)
        rage(gate, CANNED_PER_S)

        answer = await raw(gate, *pieces)

        assert says in answer.split(b"\r\n")[0]
        assert gate.gate.shedding.canned_total == 0
        for task in tasks:
            task.cancel()
        await empty(gate.gate)


async def test_a_trusted_peer_is_always_heard_since_its_callers_have_classes(
    engine: ScriptedEngine, socket_dir: Path
) -> None:
    live = live_config(max_wait_us=0)
    async with running_gate(engine, socket_dir, live=live, trusted_peers=("127.0.0.0/8",)) as gate:
        tasks = await full(gate, engine)
        rage(gate, CANNED_PER_S)

        code, headers, _ = parsed(await raw(gate, head(len(CHAT)) + CHAT))

        assert (code, "x-sluice-request-id" in headers) == (429, True)
        assert (gate.gate.shedding.canned_total, gate.gate.shedding.early_total) == (0, 0)
        for task in tasks:
            task.cancel()
        await empty(gate.gate)


async def test_in_a_storm_an_open_door_lets_in(engine: ScriptedEngine, socket_dir: Path) -> None:
    async with running_gate(engine, socket_dir, live=live_config(max_wait_us=0)) as gate:
        rage(gate, CANNED_PER_S)

        assert b"[DONE]" in await raw(gate, head(len(CHAT), b"Connection: close\r\n") + CHAT)
        await empty(gate.gate)


class Wire(asyncio.Transport):
    """A transport that remembers what was done to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 5)})
        self.done: list[object] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.done.append(bytes(data).split(b" ")[1])

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.done.append(protocol)

    def write_eof(self) -> None:
        self.done.append("eof")

    def close(self) -> None:
        self.done.append("closed")


class Heard(asyncio.Protocol):
    """Who hears those that have to be heard."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize(
    ("pieces", "told", "done", "heard"),
    [
        pytest.param([head(2) + b"{}"], BUSY, [b"429", "closed"], b"", id="whole"),
        pytest.param([head(2), b"{}"], BUSY, [b"429", "eof"], b"", id="its-body-is-still-coming"),
        pytest.param([head(2)[:30], head(2)[30:] + b"{}"], BUSY, None, head(2)[:30], id="its-head-comes-in-part"),
        pytest.param([head(2) + b"{}"], None, None, head(2) + b"{}", id="it-has-to-be-heard"),
    ],
)
async def test_a_connection_in_a_storm(
    pieces: list[bytes], told: Refusal | None, done: list[object] | None, heard: bytes
) -> None:
    wire, ear, peers = Wire(), Heard(), []

    def refuse(peer: str | None) -> Refusal | None:
        peers.append(peer)
        return told

    turnstile = Turnstile(refuse, lambda: ear, asyncio.get_running_loop())
    turnstile.connection_made(wire)
    for piece in pieces[: 1 if done is None else None]:
        turnstile.data_received(piece)

    assert wire.done == ([ear] if done is None else done)
    assert ear.data == heard
    assert set(peers) <= {"10.0.0.1"}
    turnstile.connection_lost(None)


async def test_a_connection_that_says_nothing_in_a_storm_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile_module, "SILENCE_S", 0.01)
    wire = Wire()
    turnstile = Turnstile(lambda _: BUSY, Heard, asyncio.get_running_loop())

    turnstile.connection_made(wire)

    await until(lambda: wire.done == ["closed"])
    turnstile.connection_lost(None)
