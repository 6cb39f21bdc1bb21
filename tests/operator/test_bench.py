"""`sluice bench`: what clients see of a server, counted as they see it."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sluice_operator.bench import prompts
from sluice_operator.bench.answers import Answer, Promise, figures
from sluice_operator.bench.clients import Asked, Clients, server_url
from sluice_operator.cli import main
from sluice_operator.errors import InvalidSettings

SLUICE = str(Path(sys.executable).with_name("sluice"))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROMISE = Promise(ttft_us=2_000_000, itl_us=150_000)


def whole(*, ttft_us: int = 1_000_000, gaps_us: list[int] | None = None, tokens: int = 3) -> Answer:
    gaps_us = [100_000, 100_000] if gaps_us is None else gaps_us
    return Answer(
        status=200,
        ttft_us=ttft_us,
        gaps_us=gaps_us,
        latency_us=ttft_us + sum(gaps_us),
        prompt_tokens=10,
        output_tokens=tokens,
        is_counted=True,
    )


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        pytest.param(whole(), True, id="within-the-promise"),
        pytest.param(whole(ttft_us=2_000_001), False, id="a-late-first-token"),
        pytest.param(whole(gaps_us=[100_000, 150_001]), False, id="one-wide-gap-of-two"),
        pytest.param(whole(gaps_us=[1_000] * 199 + [900_000]), True, id="one-wide-gap-of-two-hundred"),
        pytest.param(whole(gaps_us=[], tokens=1), True, id="a-single-token-has-no-gap"),
        pytest.param(Answer(status=429, code="kv_peak"), False, id="refused"),
        pytest.param(Answer(status=200, code="stream_cut", ttft_us=1), False, id="cut"),
    ],
)
def test_an_answer_is_good_when_it_kept_the_promise(answer: Answer, *, good: bool) -> None:
    assert PROMISE.kept_by(answer) is good


def test_figures_count_whole_answers_and_say_what_became_of_the_others() -> None:
    refused = Answer(status=429, code="slots", attempts=3)
    cut = Answer(status=200, code="stream_cut", output_tokens=50)

    found = figures([whole(), whole(ttft_us=3_000_000), refused, cut], 2.0, PROMISE)

    assert (found.requests, found.whole, found.attempts, found.good) == (4, 2, 6, 1)
    assert (found.refused, found.failed) == ({"slots": 1}, {"stream_cut": 1})
    assert (found.requests_per_s, found.output_tokens_per_s, found.prompt_tokens_per_s) == (1.0, 3.0, 10.0)
    assert found.ttft_ms is not None
    assert (found.ttft_ms.mean, found.ttft_ms.p50, found.ttft_ms.max) == (2000.0, 1000.0, 3000.0)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == 100.0


def test_figures_of_nothing_are_no_numbers() -> None:
    found = figures([], 0.0)

    assert (found.ttft_ms, found.gap_ms, found.good, found.output_tokens_per_s) == (None, None, None, 0.0)


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, again, other = (list(itertools.islice(prompts.drawn(seed, 3, 5), 20)) for seed in (1, 1, 2))

    assert first == again != other
    assert all(3 <= len(text.split()) <= 5 for text in first)


def test_prompts_of_a_file_come_over_and_over(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('a line\n\n{"prompt": "an object", "tokens": 3}\n', encoding="utf-8")

    assert list(itertools.islice(prompts.read(path), 3)) == ["a line", "an object", "a line"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "holds no prompt", id="empty"),
        pytest.param("good\n{bad", "line 2", id="broken-json"),
        pytest.param('good\n{"prompt": ' + "[" * 100_000, "line 2", id="100,000-levels"),
        pytest.param('{"text": "x"}', "needs a text under `prompt`", id="another-field"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(InvalidSettings, match=words):
        prompts.read(path)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        pytest.param("http://h:8080", "http://h:8080", id="a-host"),
        pytest.param("http://h:8080/v1/", "http://h:8080", id="with-the-version"),
        pytest.param("https://h/team/chat/v1", "https://h/team/chat", id="behind-a-gateway"),
        pytest.param("http://[::1]:80", "http://[::1]:80", id="ipv6"),
    ],
)
def test_a_server_is_named_with_or_without_its_version(given: str, url: str) -> None:
    assert server_url(given) == url


async def stream(request: web.Request, *lines: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for line in lines:
        await response.write(f"data: {line}\n\n".encode())
    return response


def event(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def one(handler: Handler, **asked: Any) -> Answer:
    seen: list[Answer] = []
    async with serving(handler) as url, Clients(url, Asked(model="tiny", **asked)) as clients:
        await clients.ask("hello", seen)
    [answer] = seen
    return answer


async def test_a_stream_is_timed_event_by_event_and_counted_by_its_usage() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await stream(request, event(""), event("a"), event("b"), USAGE, "[DONE]")

    answer = await one(handler, max_tokens=5)
    await one(handler, ignore_eos=True)

    assert answer.is_whole
    assert answer.is_counted
    assert answer.ttft_us is not None
    assert (len(answer.gaps_us), answer.prompt_tokens, answer.output_tokens) == (1, 7, 2)
    assert answer.latency_us >= answer.ttft_us + answer.gaps_us[0]
    assert (bodies[0]["max_tokens"], bodies[0]["stream"], bodies[0]["model"]) == (5, True, "tiny")
    assert ("ignore_eos" in bodies[0], bodies[1]["ignore_eos"]) == (False, True)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param('{"choices": {}, "usage": null}', id="choices-that-are-no-list"),
        pytest.param('{"choices": [7], "usage": [1]}', id="a-choice-that-is-no-object"),
        pytest.param('{"choices": [{"delta": "a"}]}', id="a-delta-that-is-text"),
        pytest.param('{"usage": {"prompt_tokens": "many", "completion_tokens": {}}}', id="counts-that-are-none"),
        pytest.param('{"usage": {"prompt_tokens": 1e999, "completion_tokens": NaN}}', id="counts-beyond-all-numbers"),
        pytest.param("[" * 100_000, id="100,000-levels"),
    ],
)
async def test_a_server_that_tells_no_tokens_is_measured_by_its_events(odd: str) -> None:
    answer = await one(lambda request: stream(request, event("a"), odd, event("b"), event("c"), "[DONE]"))

    assert (answer.is_whole, answer.is_counted) == (True, False)
    assert (answer.prompt_tokens, answer.output_tokens, len(answer.gaps_us)) == (0, 3, 2)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        pytest.param((event("a"),), "stream_cut", id="without-an-end"),
        pytest.param((event("a"), '{"error": {"code": "engine_failed"}}', "[DONE]"), "engine_failed", id="an-error"),
    ],
)
async def test_a_stream_that_broke_is_not_whole(lines: tuple[str, ...], code: str) -> None:
    answer = await one(lambda request: stream(request, *lines))

    assert (answer.is_whole, answer.code, answer.status) == (False, code, 200)


async def test_a_line_without_an_end_is_a_broken_connection() -> None:
    answer = await one(lambda request: stream(request, event("x" * 3_000_000), "[DONE]"))

    assert (answer.is_whole, answer.code) == (False, "connection: LineTooLong")


async def refuse(headers: dict[str, str], times: list[int]) -> web.Response:
    times.append(len(times))
    return web.json_response({"error": {"code": "kv_peak"}}, status=429, headers=headers)


@pytest.mark.parametrize(
    ("headers", "attempts"),
    [
        pytest.param({"Retry-After": "0"}, 3, id="as-often-as-it-was-told-to"),
        pytest.param({"Retry-After": "0", "x-should-retry": "false"}, 1, id="told-not-to"),
        pytest.param({}, 1, id="told-nothing"),
        pytest.param({"Retry-After": "nan"}, 1, id="told-no-time"),
    ],
)
async def test_who_is_refused_comes_back_when_told_to(headers: dict[str, str], attempts: int) -> None:
    times: list[int] = []

    answer = await one(lambda _: refuse(headers, times), retries=2)

    assert (answer.attempts, len(times), answer.code, answer.is_refused) == (attempts, attempts, "kv_peak", True)


SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s"


async def answers_of(*connections: tuple[bytes, ...]) -> tuple[list[str], int]:
    """What became of two requests, one after the other, and how many arrived at a server that answers with these bytes.

    A connection of the server is closed when it has none left for a request that came.
    """
    arrived = 0
    left = iter(connections)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        for reply in (*next(left, ()), b""):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            arrived += 1
            writer.write(reply)
            if not reply.endswith(b"[DONE]\n\n"):
                break
        writer.close()

    seen: list[Answer] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Clients(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Asked(model="x")) as clients:
        for _ in range(2):
            await clients.ask("hello", seen)
    return [answer.code for answer in seen], arrived


@pytest.mark.parametrize(
    ("connections", "codes", "requests"),
    [
        pytest.param(((b"whole",), (b"whole",)), ["", ""], 3, id="a-kept-connection-was-closed"),
        pytest.param(((b"whole",), ()), ["", "connection: ServerDisconnectedError"], 3, id="and-the-next-as-well"),
        pytest.param(((), (b"whole",)), ["connection: ServerDisconnectedError", ""], 2, id="a-new-one-was-closed"),
        pytest.param(((b"whole", b"begun"),), ["", "stream_cut"], 2, id="a-kept-one-after-its-first-bytes"),
    ],
)
async def test_a_kept_connection_that_was_closed_before_any_byte_is_no_failure(
    connections: tuple[tuple[bytes, ...], ...], codes: list[str], requests: int
) -> None:
    events = "".join(f"data: {line}\n\n" for line in (event("a"), USAGE, "[DONE]")).encode()
    replies = {
        b"whole": SSE % (len(events), events),
        b"begun": SSE.replace(b"Content-Length: %d\r\n", b"") % event("a").encode(),
    }

    assert await answers_of(*(tuple(replies[name] for name in names) for names in connections)) == (codes, requests)


async def test_a_closed_loop_has_so_many_at_once_and_no_more() -> None:
    inside, most = 0, 0
    both = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            both.set()
        await both.wait()
        response = await stream(request, event("a"), USAGE, "[DONE]")
        inside -= 1
        return response

    seen: list[Answer] = []
    async with serving(handler) as url, Clients(url, Asked(model="tiny")) as clients:
        await clients.closed_loop(iter(["x"] * 6), 2, seen)

    assert (most, len(seen), all(answer.is_whole for answer in seen)) == (2, 6, True)


async def run(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(SLUICE, "bench", *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_the_command_prints_what_clients_saw_and_how_much_was_good() -> None:
    turn = itertools.count()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.headers["x-team"] == "red" and next(turn) % 5 == 0:
            return web.Response(status=500)
        counts = [USAGE] if request.headers["x-team"] == "blue" else []
        return await stream(request, event("a"), event("b"), *counts, "[DONE]")

    async with serving(handler) as url:
        arguments = (url, "--requests", "5", "--clients", "2", "--ttft", "60s", "--itl", "60s", "--header")
        code, text = await run(*arguments, "X-Team: blue")
        as_json, document = await run(*arguments, "X-Team: blue", "--json")
        one_failed, uncounted = await run(*arguments, "X-Team: red", "--model", "tiny")
        enough, _ = await run(*arguments, "X-Team: red", "--percent", "80")

    assert (code, as_json, one_failed, enough) == (0, 0, 1, 0)
    assert "4 answers came without their tokens' number: an event counts as one" in uncounted
    assert text.startswith("5 of 5 requests answered in")
    assert "good          5 of 5 (100.0 %): first token within 60000 ms, 99 % of its gaps within 60000 ms" in text
    assert json.loads(document)["good"] == 5


async def test_ctrl_c_ends_the_load_and_prints_what_there_is() -> None:
    answered = asyncio.Event()
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked > 1:
            answered.set()
            await asyncio.Event().wait()
        return await stream(request, event("a"), USAGE, "[DONE]")

    async with serving(handler) as url:
        process = await asyncio.create_subprocess_exec(
            SLUICE, "bench", url, "--clients", "1", stdout=asyncio.subprocess.PIPE
        )
        await answered.wait()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()

    assert process.returncode == 0
    assert out.decode().startswith("1 of 1 requests answered")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["localhost:8080"], "no URL of a server", id="no-scheme"),
        pytest.param(["http://h", "--clients", "2", "--rate", "3"], "give one", id="two-loads"),
        pytest.param(["http://h", "--requests", "2", "--seconds", "3"], "give one", id="two-ends"),
        pytest.param(["http://h", "--ttft", "2s"], "both --ttft and --itl", id="half-a-promise"),
        pytest.param(["http://h", "--ttft", "2"], "'2' is no duration", id="a-number-without-a-unit"),
        pytest.param(["http://h", "--itl", "0s"], "no time at all", id="no-time"),
        pytest.param(["http://h", "--prompt-words", "9-3"], "LOW-HIGH", id="a-range-backwards"),
        pytest.param(["http://h", "--header", "nothing"], "NAME: VALUE", id="no-header"),
        pytest.param(["http://h", "--requests", "9" * 20], "10000000", id="more-than-can-be-counted"),
        pytest.param(["http://h", "--rate", "nan"], "nan is no number", id="not-a-number"),
        pytest.param(["http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models", id="nobody-answers"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", *arguments]) == 2

    line = capsys.readouterr().err.strip()
    assert words in line
    assert "\n" not in line
