"""`sluice top`: one frame says what the pod says, and the command ends as it should."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from recorded_scene import chunk, recorded, running, share, state, step
from sluice_engine import codec
from sluice_engine.core.state import DerivedLimits, LoadingProgress
from sluice_operator.cli import main
from sluice_operator.records.frame import frame
from sluice_operator.records.steps import Step
from sluice_sidecar.telemetry.state import GateState, Measured

SLUICE = str(Path(sys.executable).with_name("sluice"))


def shown(of: GateState, last: Step | None = None, *, most: int = 10, width: int = 140, note: str = "") -> str:
    console = Console(file=StringIO(), width=width)
    console.print(frame(of, last, most_requests=most, width=width, note=note))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def last_step() -> Step:
    document = step(
        7,
        share("req-a/0", 120),
        chunk("req-b/0", 0, 64, slot=1),
        waiting_reasons={"no_free_slots": 2},
        real_us=92_000,
    )
    return recorded(document).steps[0]


def test_a_frame_has_promise_door_batch_kv_step_budgets_and_requests() -> None:
    of = state(
        running("req-b", computed=64), running("req-a", computed=120), running("req-w", computed=0, status="waiting")
    )

    text = shown(of, last_step())

    for words in (
        "tiny  ready  step 7",
        "first token 800 ms of 2.00 s, gaps 90 ms of 150 ms, at 99 %",
        "by 0 of 9 requests that ended in five minutes",
        "open; 2 inside, 0 at it, 12 let in so far",
        "kv_peak 1, slots 3",
        "2 of 4 run, 1 waiting with 0 tokens to prefill",
        "40 of 100 blocks, ceiling 95 %, predicted peak 70",
        "7: 1 decode, 64 prefill tokens; took 92 ms, predicted 100 ms",
        "65 of 165 tokens, 64 of 114 prefill tokens beside them",
        "2 held by no_free_slots",
        "0 in all, 0 a minute",
    ):
        assert words in text
    assert [line.split() for line in text.splitlines()[-5:]] == [
        ["running"],
        ["req-b", "100", "64", "0", "50", "4", "0"],
        ["req-a", "100", "120", "20", "50", "8", "0"],
        ["waiting"],
        ["req-w", "100", "0", "0", "50", "0", "0"],
    ]


def busy() -> GateState:
    """A pod whose numbers are long."""
    requests = (
        replace(running(f"req-90a8b9972bd9ef42bbead7c{n}", computed=64), prompt_tokens=101_501, max_tokens=50_000)
        for n in range(3)
    )
    of = state(*requests, running("req-" + "w" * 40, status="waiting"))
    assert of.engine is not None
    return replace(of, engine=replace(of.engine, step=1_234_567, step_running_us=19_000))


def test_a_frame_fits_80_columns_without_a_line_that_wraps_and_uses_more_where_there_are_more() -> None:
    narrow, wide = (shown(busy(), last_step(), width=width).splitlines() for width in (80, 140))

    assert max(len(line.rstrip()) for line in narrow) <= 80
    assert len(narrow) == len(wide), "no line was broken in two"
    assert " req-90a8b9972bd9ef42bbead7c0 " in "\n".join(narrow), "`sluice explain` asks for the whole id"
    assert "…" in next(line for line in narrow if "req-www" in line)
    assert ("█" * 9 + "░" * 3 in narrow[5], "█" * 18 + "░" * 6 in wide[5]) == (True, True)


def test_where_no_request_ended_nothing_is_said_to_be_good() -> None:
    text = shown(state(measured=Measured(time_to_first_token_us=800_000)))

    assert "first token 800 ms of 2.00 s, gaps – of 150 ms" in text
    assert "kept       –, no request ended in five minutes" in text


@pytest.mark.parametrize(
    ("of", "words"),
    [
        pytest.param(state(engine=None), "the engine does not answer", id="no-engine"),
        pytest.param(
            state(admission=replace(state().admission, open=False, reason="kv_peak")), "shut: kv_peak", id="a-shut-door"
        ),
        pytest.param(state(measured=Measured(), promise=None), "first token –, gaps – ", id="idle"),
        pytest.param(state(api_keys=0), "shut: no API key is in force; 2 inside", id="no-keys"),
        pytest.param(state(draining=True), "draining", id="draining"),
        pytest.param(state(freshness="stale"), "the engine's state is stale", id="stale"),
    ],
)
def test_a_frame_says_what_is_out_of_order(of: GateState, words: str) -> None:
    assert words in shown(of)


def test_a_start_and_a_promise_that_cannot_be_kept_are_told() -> None:
    engine = state().engine
    assert engine is not None
    loading = replace(engine, phase="loading", loading=LoadingProgress(stage="warmup"), pool=None, derived=None)
    infeasible = replace(engine, derived=DerivedLimits(feasible=False, reason="too slow a machine"), hung=True)

    assert "loading the model (warming up)" in shown(state(engine=loading))
    text = shown(state(engine=infeasible))
    assert "too slow a machine" in text
    assert "a step hangs" in text


def test_a_small_screen_shows_the_first_requests_and_counts_the_rest() -> None:
    text = shown(state(*(running(f"req-{n}") for n in range(9))), most=3, note="no answer")

    assert "… and 6 more" in text
    assert "req-3" not in text
    assert text.rstrip().endswith("no answer")


@asynccontextmanager
async def a_pod() -> AsyncIterator[tuple[str, web.AppRunner]]:
    app = web.Application()

    async def say_state(_: web.Request) -> web.Response:
        return web.Response(text=codec.to_json(state(running("req-a"))), content_type="application/json")

    async def say_steps(request: web.Request) -> web.Response:
        assert request.query["last"] == "1"
        return web.json_response({"steps": [step(7, share("req-a/0", 120))]})

    app.add_routes([web.get("/state", say_state), web.get("/steps", say_steps)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}", runner
    finally:
        await runner.cleanup()


async def test_one_frame_or_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    async with a_pod() as (url, _):
        assert await asyncio.to_thread(main.run, ["top", url, "--once"]) == 0
        assert "tiny  ready  step 7" in capsys.readouterr().out

        assert await asyncio.to_thread(main.run, ["top", url, "--once", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert document["step"]["number"] == 7
    assert document["state"]["engine"]["requests"][0]["id"] == "req-a"


async def test_the_end_of_the_pod_is_one_line_and_exit_code_1() -> None:
    async with a_pod() as (url, runner):
        command = await _started("top", url, "--json", "--every", "0.1")
        assert command.stdout is not None
        assert json.loads(await command.stdout.readline())["step"]["number"] == 7
        await runner.cleanup()
        _, err = await command.communicate()

    assert command.returncode == 1
    assert err.decode() == f"sluice: {url} has gone\n"


async def test_ctrl_c_ends_it_and_gives_the_screen_back() -> None:
    async with a_pod() as (url, _):
        ours, theirs = pty.openpty()
        command = await asyncio.create_subprocess_exec(
            SLUICE,
            "top",
            url,
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        seen = b""
        while b"ready" not in seen:
            seen += await asyncio.to_thread(os.read, ours, 65536)
        command.send_signal(signal.SIGINT)
        _, err = await command.communicate()
        seen += await asyncio.to_thread(os.read, ours, 65536)
        os.close(ours)

    assert (command.returncode, err) == (0, b"")
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1, (
        "the alternate screen was taken and given back"
    )


async def _started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        SLUICE,
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["http://127.0.0.1:1", "--once"], "does not answer: Connection refused", id="nobody-there"),
        pytest.param(["pod:9090", "--once"], "is no URL of a gate's admin port", id="no-scheme"),
        pytest.param(["http://127.0.0.1:1"], "standard output is no terminal: --once", id="no-terminal"),
        pytest.param(["http://127.0.0.1:1", "--once", "--every", "0"], "--every", id="no-time-between"),
        pytest.param(["http://127.0.0.1:1", "--once", "--every", "nan"], "--every", id="a-time-that-is-no-number"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main.run(["top", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
