"""The gate before another engine, through sockets: its start, its faults, its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.foreign_server import ForeignServer, page
from sidecar.running import RunningGate, empty, running_gate, until
from sidecar.scripted_engine import live_config
from sluice_engine.live_config import TenantConfig
from sluice_sidecar.capacity import ledger
from sluice_sidecar.capacity.life import Patience
from sluice_sidecar.engines import calibrate, foreign, scrape
from sluice_sidecar.engines.foreign import ForeignEngine

pytestmark = pytest.mark.usefixtures("_short_calibration")


@pytest.fixture
def _short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LONG_WORDS", 40)


@pytest.fixture
async def server() -> AsyncIterator[ForeignServer]:
    async with ForeignServer().running() as server:
        yield server


@asynccontextmanager
async def gate_before(
    server: ForeignServer, tmp_path: Path, *, kind: str = "vllm", ready: bool = True, **changes: Any
) -> AsyncIterator[RunningGate]:
    async with running_gate(None, tmp_path, ready=ready, engine=kind, engine_url=server.url, **changes) as gate:
        yield gate


def link(gate: RunningGate) -> ForeignEngine:
    engine = gate.gate.engine
    assert isinstance(engine, ForeignEngine)
    return engine


async def status(gate: RunningGate, **request: Any) -> int:
    async with gate.post(**request) as response:
        await response.read()
        return int(response.status)


async def probe(gate: RunningGate, path: str) -> tuple[int, str]:
    async with gate.client.get(gate.admin_url + path) as response:
        return response.status, (await response.text()).strip()


# ----------------------------------------------------------------------------------------------------------- its start


async def test_an_engine_is_measured_before_its_door_opens(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate:
        assert len(server.bodies) == 2 * calibrate.ROUNDS
        engine = gate.gate.engine.state
        assert engine is not None
        assert engine.step_cost is not None
        assert engine.step_cost.per_prefill_token_ns > 0
        assert engine.pool is not None
        assert (engine.pool.total_blocks, engine.max_length_tokens) == (64, 512)
        assert await probe(gate, "/engine/startupz") == (200, "ok")

        assert await status(gate) == 200
        await empty(gate.gate)


async def test_what_an_engine_lacks_is_said_by_its_startup_probe(server: ForeignServer, tmp_path: Path) -> None:
    server.values = {"kv_cache_usage_perc": None}
    async with gate_before(server, tmp_path, ready=False) as gate:
        await until(lambda: "lack" in (gate.gate.engine.start_problem() or ""))
        assert await probe(gate, "/engine/startupz") == (503, "loading: its metrics lack vllm:kv_cache_usage_perc")
        assert await status(gate) == 503
        assert (await probe(gate, "/engine/livez"))[0] == 200

        server.values = {}
        await until(lambda: gate.gate.not_ready() is None)


async def test_an_engine_that_loads_is_waited_for(server: ForeignServer, tmp_path: Path) -> None:
    server.health = 503
    async with gate_before(server, tmp_path, ready=False) as gate:
        await until(lambda: "health says 503" in (gate.gate.engine.start_problem() or ""))
        assert gate.gate.not_ready() == "engine_loading"

        server.health = 200
        await until(lambda: gate.gate.not_ready() is None)


async def test_an_engine_that_gives_no_text_is_asked_again_after_a_while_and_says_so(
    server: ForeignServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "MEASURE_AGAIN_US", 3_600_000_000)
    server.status = 404
    async with gate_before(server, tmp_path, ready=False) as gate:
        await until(lambda: "with status 404" in (gate.gate.engine.start_problem() or ""))
        pages = server.pages
        await until(lambda: server.pages > pages + 3)
        assert len(server.bodies) == 1, "not at every poll"
        assert (await probe(gate, "/engine/livez"))[0] == 200

        server.status = 200
        link(gate)._measure_due_us = 0
        await until(lambda: gate.gate.not_ready() is None)


async def test_an_engine_is_not_measured_beside_what_an_earlier_gate_let_in(
    server: ForeignServer, tmp_path: Path
) -> None:
    server.values = {"num_requests_running": 2}
    async with gate_before(server, tmp_path, ready=False) as gate:
        await until(lambda: "has to end first" in (gate.gate.engine.start_problem() or ""))
        assert server.bodies == []

        server.values = {}
        await until(lambda: gate.gate.not_ready() is None)
        assert len(server.bodies) == 2 * calibrate.ROUNDS


async def test_llama_cpp_tells_its_slots_and_no_cache(server: ForeignServer, tmp_path: Path) -> None:
    server.text = page("llama-cpp-b11434")
    async with gate_before(server, tmp_path, kind="llamacpp", engine_kv_tokens=1536) as gate:
        engine = gate.gate.engine.state
        assert engine is not None
        assert engine.pool is not None
        assert engine.derived is not None
        assert (engine.pool.total_blocks, engine.pool.free_blocks, engine.pool.block_tokens) == (1536, 1536, 1)
        assert (engine.derived.max_sequences, engine.max_length_tokens) == (3, 512)


# --------------------------------------------------------------------------------------------------------- its refusals


@pytest.mark.parametrize("refusal", [429, 503])
async def test_its_full_queue_is_load_in_our_words(server: ForeignServer, tmp_path: Path, refusal: int) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.status = refusal
        async with gate.post() as response:
            assert response.status == 429
            assert response.headers["x-sluice-reason"] == "engine_overloaded"
        assert gate.gate.not_ready() is None
        await empty(gate.gate)


@pytest.mark.parametrize("refusal", [400, 404, 422, 500])
async def test_its_other_answers_are_the_clients_to_read(server: ForeignServer, tmp_path: Path, refusal: int) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.status = refusal
        async with gate.post() as response:
            assert response.status == refusal
            assert (await response.json())["error"]["message"] == "full"
        await empty(gate.gate)


@pytest.mark.parametrize(
    ("priorities", "sent"), [pytest.param(False, None, id="without"), pytest.param(True, 5, id="with")]
)
async def test_a_priority_reaches_an_engine_that_was_started_for_it(
    server: ForeignServer, tmp_path: Path, *, priorities: bool, sent: int | None
) -> None:
    async with gate_before(server, tmp_path, engine_priorities=priorities) as gate:
        assert await status(gate, priority=3) == 200
        assert server.bodies[-1].get("priority") == sent


async def test_it_keeps_no_record_of_steps(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate:
        code, text = await probe(gate, "/steps")
        assert code == 404
        assert "vllm keeps no such record" in text


async def test_its_page_stands_beside_the_gates_and_is_read_by_nobody_else(
    server: ForeignServer, tmp_path: Path
) -> None:
    async with gate_before(server, tmp_path, state_interval_us=60_000_000) as gate:
        before = server.pages
        text = [(await probe(gate, "/metrics"))[1] for _ in range(3)][-1]
        assert 'vllm:num_requests_running{engine="0"} 0' in text
        assert "sluice_gate_admitted_total" in text
        assert server.pages == before


# ----------------------------------------------------------------------------------------------------------- its faults


async def becomes(gate: RunningGate, word: str) -> None:
    await until(lambda: gate.gate.admission.room.freshness(gate.gate.clock()) == word)


AGES: dict[str, Any] = {"stale_after_us": 40_000, "blind_after_us": 120_000}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"values": {"kv_cache_usage_perc": None}}, id="a-series-is-missing"),
        pytest.param({"values": {"num_requests_running": None}}, id="the-running-are-missing"),
        pytest.param({"values": {"kv_cache_usage_perc": float("nan")}}, id="a-value-is-no-number"),
        pytest.param({"text": b"vllm:num_requests_running{ x"}, id="the-page-cannot-be-read"),
        pytest.param({"text": b""}, id="the-page-is-empty"),
        pytest.param({"page_status": 500}, id="the-page-is-a-500"),
    ],
)
async def test_a_page_of_no_use_makes_the_gate_blind_but_never_unready(
    server: ForeignServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(scrape, "BACKOFF_US", 10_000)
    async with gate_before(server, tmp_path, **AGES) as gate:
        for name, value in fault.items():
            setattr(server, name, value)
        await becomes(gate, "blind")
        assert gate.gate.not_ready() is None
        assert (await probe(gate, "/engine/livez"))[0] == 200
        assert await status(gate) == 200, "an idle pod takes one"

        server.values, server.text, server.page_status = {}, None, 200
        await becomes(gate, "fresh")


async def test_a_page_that_hangs_is_asked_for_once(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path, **AGES) as gate:
        server.hold_page = asyncio.Event()
        await becomes(gate, "blind")
        before = server.pages
        await asyncio.gather(*(link(gate).poll() for _ in range(3)))
        assert server.pages <= before + 1
        assert gate.gate.not_ready() is None

        server.hold_page.set()
        server.hold_page = None
        await becomes(gate, "fresh")


async def test_numbers_that_stand_still_while_it_works_are_old(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path, **AGES) as gate:
        link(gate).life._patience = Patience(frozen_after_us=50_000)
        server.values = {"num_requests_running": 1}
        await becomes(gate, "blind")

        server.values = {"num_requests_running": 1, "generation_tokens_total": 1}
        await becomes(gate, "fresh")


async def test_zero_with_a_stream_in_it_is_a_fault(
    server: ForeignServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_COUNTED_AFTER_US", 0)
    async with gate_before(server, tmp_path, **AGES) as gate:
        monkeypatch.setattr(link(gate), "_traits", replace(link(gate)._traits, frozen_after_us=0))
        hold = server.hold_token[4] = asyncio.Event()
        task = asyncio.create_task(status(gate))
        await until(lambda: server.in_flight == 1)
        server.values = {"num_requests_running": 0}
        for choice in next(iter(gate.gate.admission.room.ledger.entries.values())).choices:
            choice.output_tokens = max(1, choice.output_tokens)
        await becomes(gate, "blind")

        hold.set()
        assert await task == 200
        await becomes(gate, "fresh")


async def test_a_counter_that_falls_is_a_new_process_and_no_storm_of_preemptions(
    server: ForeignServer, tmp_path: Path
) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.values = {"num_preemptions_total": 5, "prompt_tokens_total": 900}
        await until(lambda: gate.gate.engine.state is not None and gate.gate.engine.state.preemptions_total == 5)
        first = gate.gate.engine.state
        assert first is not None
        server.values = {"num_preemptions_total": 0, "prompt_tokens_total": 7}
        await until(lambda: gate.gate.engine.state is not None and gate.gate.engine.state.boot_id != first.boot_id)
        assert gate.gate.not_ready() is None
        assert gate.gate.admission.room.ceiling.per_minute(gate.gate.clock()) <= 10


async def test_a_dead_engine_is_a_503_at_once_and_a_restarted_one_is_served_again(
    server: ForeignServer, tmp_path: Path
) -> None:
    async with gate_before(server, tmp_path) as gate:
        await server.kill()
        await until(lambda: gate.gate.not_ready() == "engine_dead")
        assert await status(gate) == 503

        await server.start()
        await until(lambda: gate.gate.not_ready() is None)
        assert await status(gate) == 200
        await empty(gate.gate)


async def test_an_engine_whose_core_has_died_is_failed(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.health = 503
        link(gate).poke()
        await until(lambda: gate.gate.not_ready() == "engine_dead")
        assert await probe(gate, "/engine/livez") == (503, "failed: its /health says 503")


async def test_a_client_that_leaves_frees_the_engine(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.hold_token[2] = asyncio.Event()
        async with gate.post() as response:
            await response.content.readany()
            await until(lambda: server.in_flight == 1)
        await until(lambda: server.aborted == 1)
        await empty(gate.gate)


async def test_an_engine_that_knows_no_deadlines_is_rid_of_what_misses_one(
    server: ForeignServer, tmp_path: Path
) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.hold_token[1] = asyncio.Event()
        async with gate.post(headers={"x-sluice-timeout-ms": "300"}) as response:
            text = await response.text()
        assert "deadline_missed" in text
        await until(lambda: server.aborted == 1)
        await empty(gate.gate)


async def test_what_ran_before_the_gate_started_is_counted(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate, aiohttp.ClientSession() as client:
        hold = server.hold_token[1] = asyncio.Event()
        body = {"prompt": "x", "max_tokens": 8, "stream": True}
        async with client.post(f"{server.url}/v1/completions", json=body) as response:
            await response.content.readany()
            await until(lambda: len(gate.gate.admission.room.ledger.strangers) == 1)
            hold.set()
            await response.read()
        await until(lambda: not gate.gate.admission.room.ledger.strangers)


async def test_a_full_queue_is_an_estimate_that_was_wrong(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate:
        bias = gate.gate.admission.room.learned.bias
        before = bias.factor(gate.gate.clock())
        server.status = 503
        assert await status(gate) == 429
        assert bias.factor(gate.gate.clock()) > before


async def test_who_comes_back_after_a_full_queue_is_known_by_its_body(server: ForeignServer, tmp_path: Path) -> None:
    async with gate_before(server, tmp_path) as gate:
        server.status = 503
        assert await status(gate) == 429
        server.status = 200
        assert await status(gate) == 200

        first, second = gate.gate.admission.decisions.last(2)
        assert (first.attempt, second.attempt) == (0, 1)
        assert gate.gate.admission.returning.budget.closed_to("standard", gate.gate.clock())


async def test_a_request_that_no_page_lists_stays_in_the_ledger_until_its_stream_ends(
    server: ForeignServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "UNSEEN_GRACE_US", 0)
    async with gate_before(server, tmp_path) as gate:
        hold = server.hold_token[2] = asyncio.Event()
        task = asyncio.create_task(status(gate))
        await until(lambda: server.in_flight == 1)
        seq = gate.gate.engine.state
        await until(lambda: gate.gate.engine.state is not seq)
        assert [choice.gone for choice in gate.gate.admission.room.ledger.live()] == [False]

        hold.set()
        assert await task == 200
        await empty(gate.gate)


@pytest.mark.parametrize("stream", [True, False])
async def test_how_long_its_answers_are_is_learned_though_it_lists_none(
    server: ForeignServer, tmp_path: Path, *, stream: bool
) -> None:
    async with gate_before(server, tmp_path) as gate:
        assert await status(gate, stream=stream, stream_options={"include_usage": True}) == 200
        await empty(gate.gate)

        outputs = gate.gate.admission.room.pricing.outputs
        assert list(outputs._all._answers) == [(server.tokens, False)]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_answer_used_of_a_quota_is_the_same_whole_and_streamed(
    server: ForeignServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    live = live_config()
    quota = TenantConfig(name="a", tokens_per_second=1_000)
    live = replace(live, admission=replace(live.admission, tenants=(quota,)))
    async with gate_before(server, tmp_path, live=live, trusted_peers=("127.0.0.0/8",)) as gate:
        used: list[int] = []
        monkeypatch.setattr(gate.gate.admission.quotas, "settle", lambda _, tokens: used.append(tokens))
        async with gate.post(headers={"x-sluice-tenant": "a"}, stream=stream) as response:
            await response.read()
        await empty(gate.gate)

        told = len(str(server.bodies[-1]["messages"])) // 5
        assert used == [told + server.tokens], "as its usage says, not as was estimated"


@pytest.mark.parametrize("body", [{"prompt": ["x"] * 129}, {"prompt": ["x", "y"], "n": 65}, {"n": 129}], ids=str)
async def test_more_choices_than_can_be_priced_never_reach_it(
    server: ForeignServer, tmp_path: Path, body: dict[str, Any]
) -> None:
    async with gate_before(server, tmp_path) as gate:
        before = len(server.bodies)
        async with gate.post(path="/v1/completions", **({"prompt": "x"} | body)) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "n")
        assert len(server.bodies) == before


async def test_an_engine_that_falls_silent_while_it_is_measured_is_asked_again(
    server: ForeignServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "SILENCE_S", 0.05)
    monkeypatch.setattr(foreign, "MEASURE_AGAIN_US", 0)
    monkeypatch.setattr(scrape, "BACKOFF_US", 0)
    server.hold_token[0] = asyncio.Event()
    async with gate_before(server, tmp_path, ready=False) as gate:
        await until(lambda: server.aborted > 0)

        # A busy machine may be as slow as an engine that is silent.
        monkeypatch.setattr(calibrate, "SILENCE_S", 30.0)
        server.hold_token.clear()

        await until(lambda: gate.gate.not_ready() is None)
