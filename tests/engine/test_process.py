"""`python -m sluice_engine` as a process: how it starts, serves a tiny real model, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientPayloadError, ClientSession, UnixConnector

from engine.tiny_adapter import make_adapter
from sluice_engine.__main__ import main, tell_of_a_broken
from sluice_engine.table_file import read_step_table
from tiny_model import make_tiny_llama

LIVE = {"slo": {"time_to_first_token_us": 10_000_000, "inter_token_latency_us": 500_000}}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path holds 107 bytes, and pytest's own folders are longer."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        yield Path(name)


def write_config(folder: Path, **fields: Any) -> Path:
    config: dict[str, Any] = {
        "model": {"source": {"path": str(folder / "model")}, "served_name": "tiny", "data_type": "Float32"},
        "cache": {"capacity_bytes": 8 * 2**20},
        "scheduling": {"max_sequences": 4},
        "socket_path": str(folder / "s"),
        "live_path": str(folder / "live.json"),
        "table_dir": str(folder / "tables"),
        "termination_message_path": str(folder / "last-words"),
        **fields,
    }
    (folder / "live.json").write_text(json.dumps(LIVE))
    path = folder / "engine.json"
    path.write_text(json.dumps(config))
    return path


# ---------------------------------------------------------------------- bad starts, in this process


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        pytest.param("engine.json", None, "engine.json: cannot be read: No such file", id="no configuration"),
        pytest.param("engine.json", b"{", "engine.json: is not JSON", id="malformed"),
        pytest.param("engine.json", b"\xff", "engine.json: is not JSON", id="not text"),
        pytest.param("engine.json", b"[]", "engine.json: must be an object", id="a list"),
        pytest.param(
            "engine.json", b'{"modle": {}}', "engine.json.modle: is not a known field", id="a misspelled field"
        ),
        pytest.param("live.json", None, "live.json: cannot be read: No such file", id="no promise"),
        pytest.param(
            "live.json", b'{"slo": {}}', "live.json.slo.time_to_first_token_us: is missing", id="half a promise"
        ),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes | None, says: str
) -> None:
    config = write_config(folder)
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)

    assert main(["--config", str(config)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert says in lines[0]


def test_a_bad_option_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--config"], ["--config", "x", "--model", "y"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# ---------------------------------------------------------------------- real processes


def start(folder: Path, **fields: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sluice_engine", "--config", str(write_config(folder, **fields))]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@asynccontextmanager
async def running(
    folder: Path, model: Path, **fields: Any
) -> AsyncIterator[tuple[subprocess.Popen[str], ClientSession]]:
    """A process that is ready; it is killed if the test left it running."""
    # The step table is kept beside the model, so that the first start alone measures it.
    source = {"source": {"path": str(model)}, "served_name": "tiny", "data_type": "Float32"}
    process = start(folder, model=source, table_dir=str(model.parent / "tables"), **fields)
    connector = UnixConnector(str(folder / "s"))
    try:
        async with ClientSession("http://engine", connector=connector) as http, asyncio.timeout(120):
            while True:
                assert process.poll() is None, process.communicate()[1]
                try:
                    async with http.get("/health") as response:
                        if response.status == 200:
                            break
                except ClientConnectionError:  # it has not bound its socket yet
                    await asyncio.sleep(0.05)
            yield process, http
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.slow
async def test_what_steps_cost_is_served_and_kept_for_the_next_start(tmp_path: Path, model: Path) -> None:
    tables = model.parent / "tables"
    async with running(tmp_path, model) as (process, http):
        async with http.get("/step-table") as response:
            first = await response.json()
        (kept,) = tables.glob("step-table-*.json")
        assert read_step_table(kept.read_bytes()) == read_step_table(json.dumps(first))
        ceilings = list(first["ceiling_tokens"].values())
        assert ceilings == sorted(ceilings, reverse=True), "more decodes leave less"
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 150, "ignore_eos": True}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
        async with http.get("/step-table") as response:
            learned = await response.json()
        assert learned["table"]["median_us"] != first["table"]["median_us"], "a hundred steps have taught something"
        process.terminate()
        await asyncio.to_thread(process.wait, 30)
        assert read_step_table(kept.read_bytes()) == read_step_table(json.dumps(learned))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        pytest.param({}, 1, "ModelMissing: there is no model at", id="no model"),
        pytest.param(
            {"socket_path": "/nowhere/s"}, 1, "SocketUnavailable: /nowhere/s", id="no directory for the socket"
        ),
        pytest.param({"table_dir": "/proc/x"}, 1, "ModelMissing", id="no place for the step table changes nothing"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line_and_as_last_words(
    folder: Path, fields: dict[str, Any], status: int, says: str
) -> None:
    process = start(folder, **fields)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == status
    assert says in errors.splitlines()[-1]
    assert (folder / "last-words").read_text() == errors.splitlines()[-1] + "\n"
    assert "Traceback" not in errors
    assert not (folder / "s").exists()


@pytest.mark.slow
async def test_adapters_are_served_from_the_start_and_loaded_while_it_runs(folder: Path, model: Path) -> None:
    """The same files under two names say the same, another adapter and the model itself something else."""
    for seed, name in enumerate(("sql", "law"), start=1):
        make_adapter(model, folder / "adapters" / name, seed=seed)
    preloaded = [{"name": "sql", "path": str(folder / "adapters" / "sql")}]
    adapters = {"preloaded": preloaded, "directory": str(folder / "adapters")}
    async with running(folder, model, adapters=adapters) as (_, http):

        async def said(name: str) -> tuple[str, str]:
            body = {"model": name, "prompt": "select", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            async with http.post("/v1/completions", json=body) as response:
                page = await response.json()
            assert response.status == 200, page
            return page["model"], page["choices"][0]["text"]

        for name, path in (("again", "sql"), ("law", str(folder / "adapters" / "law"))):
            async with http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}) as response:
                assert response.status == 200, await response.text()
        told = dict(await asyncio.gather(*(said(name) for name in ("tiny", "sql", "again", "law") * 2)))
        assert told["sql"] == told["again"]
        assert len({told["tiny"], told["sql"], told["law"]}) == 3


@pytest.mark.slow
def test_an_adapter_that_cannot_be_loaded_ends_the_start_in_one_line(folder: Path) -> None:
    model = make_tiny_llama(folder / "model")
    adapter = make_adapter(model, folder / "dora", seed=1, config={"use_dora": True})
    process = start(folder, adapters={"preloaded": [{"name": "sql", "path": str(adapter)}]})
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    last = f"AdapterRefused: adapter sql: {adapter}/adapter_config.json: use_dora is true, which is not supported"
    assert errors.splitlines()[-1] == last
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_model_is_one_line(folder: Path, name: str) -> None:
    path = make_tiny_llama(folder / "model") / name
    path.write_bytes(path.read_bytes()[:100])
    process = start(folder)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("ModelCorrupt: ")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_cache_that_this_machine_does_not_have_is_a_bad_configuration(folder: Path) -> None:
    make_tiny_llama(folder / "model")
    process = start(folder, cache={"capacity_bytes": 2**60})
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("InvalidConfig: cache.capacity_bytes")
    assert "Traceback" not in errors


@pytest.mark.slow
async def test_it_serves_ends_with_0_on_sigterm_and_ends_its_streams_with_an_error(folder: Path, model: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    async with running(folder, model) as (process, http):
        replies = []
        for _ in range(2):
            async with http.post("/v1/chat/completions", json={**chat, "max_tokens": 5, "logprobs": True}) as response:
                replies.append(await response.json())
        endless = {**chat, "stream": True, "ignore_eos": True}
        async with http.post("/v1/chat/completions", json=endless) as response:
            await response.content.readline()
            process.send_signal(signal.SIGTERM)
            text = (await response.content.read()).decode()
        _, errors = process.communicate(timeout=60)

    assert replies[0]["choices"] == replies[1]["choices"]
    assert replies[0]["usage"]["completion_tokens"] >= 1
    assert all(token["logprob"] <= 0 for token in replies[0]["choices"][0]["logprobs"]["content"])
    assert '"code":"engine_not_ready"' in text
    assert "[DONE]" not in text
    assert process.returncode == 0
    assert all(json.loads(line)["message"] for line in errors.splitlines())
    assert not (folder / "s").exists()


@pytest.mark.slow
async def test_a_start_ends_at_once_on_sigterm_and_leaves_nothing(folder: Path) -> None:
    """Cancelled between two steps of its loading, by its own thread: nothing has to be cut off."""
    process = start(folder, model={"source": {"path": str(make_tiny_llama(folder / "model"))}, "served_name": "tiny"})
    connector = UnixConnector(str(folder / "s"))
    try:
        async with ClientSession("http://engine", connector=connector) as http, asyncio.timeout(120):
            while True:
                assert process.poll() is None, process.communicate()[1]
                try:
                    async with http.get("/state") as response:
                        if (await response.json())["loading"]["stage"] == "step_table":
                            break
                except ClientConnectionError:
                    await asyncio.sleep(0.02)
        process.terminate()
        _, errors = await asyncio.to_thread(process.communicate, None, 30)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0
    assert "start cancelled" in errors
    assert "cut off" not in errors
    assert not (folder / "s").exists()


@pytest.mark.slow
async def test_a_second_engine_leaves_the_first_ones_socket_alone(folder: Path, model: Path) -> None:
    async with running(folder, model) as (_, http):
        second = start(folder, model={"source": {"path": str(model)}, "served_name": "tiny"})
        _, errors = second.communicate(timeout=120)
        async with http.get("/health") as response:
            assert response.status == 200

    assert second.returncode == 1
    assert errors.splitlines()[-1].startswith("SocketInUse: ")


@pytest.mark.slow
async def test_after_a_kill_mid_stream_the_client_knows_and_the_next_engine_starts(folder: Path, model: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}
    async with running(folder, model) as (process, http):
        async with http.post("/v1/chat/completions", json=chat) as response:
            await response.content.readline()
            process.kill()
            with pytest.raises((ClientConnectionError, ClientPayloadError)):
                await response.content.read()
        assert (folder / "s").exists()
    async with running(folder, model) as (_, http), http.get("/state") as response:
        assert (await response.json())["phase"] == "ready"


@pytest.mark.slow
def test_everything_but_the_start_imports_without_torch() -> None:
    serving = ("server", "service", "metrics", "intake", "answer", "live_state", "chat_prompt")
    text = ("tokenizer", "grammars", "tool_calls", "tool_grammar")
    modules = [
        "__main__",
        "model_files.sources",
        *(f"serving.{name}" for name in serving),
        *(f"text.{name}" for name in text),
    ]
    code = f"import sys\nfor name in {modules}: __import__('sluice_engine.' + name)\nassert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
async def test_a_changed_promise_is_obeyed_under_a_running_stream_and_a_bad_one_is_refused(
    folder: Path, model: Path
) -> None:
    async def state(http: ClientSession) -> dict[str, Any]:
        async with http.get("/state") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def until(http: ClientSession, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not holds(found := await state(http)):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
        return found

    def swap(content: str) -> None:
        (folder / "next").write_text(content)
        (folder / "next").replace(folder / "live.json")

    async def stream_on(http: ClientSession) -> None:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}
        while not over.is_set():
            async with http.post("/v1/chat/completions", json=chat) as response:
                ended.append((await response.content.read()).decode())

    ended: list[str] = []
    over = asyncio.Event()
    async with running(folder, model) as (_, http), asyncio.TaskGroup() as streams:
        streams.create_task(stream_on(http))
        before = await state(http)
        swap(json.dumps({**LIVE, "scheduling": {"prefill_chunk_tokens": 16}}))
        after = await until(http, lambda now: now["live_config_hash"] != before["live_config_hash"])
        swap('{"slo": {}}')
        bad = await until(http, lambda now: bool(now["live_config_refused"]))
        async with http.get("/metrics") as response:
            page = await response.text()
        over.set()

    assert before["derived"]["chunk_ceiling_tokens"] != 16
    assert after["derived"]["chunk_ceiling_tokens"] == bad["derived"]["chunk_ceiling_tokens"] == 16
    assert "slo.time_to_first_token_us: is missing" in bad["live_config_refused"]
    assert bad["live_config_hash"] == after["live_config_hash"]
    assert bad["boot_id"] == before["boot_id"]
    assert ended
    assert all('"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n") for text in ended)
    for result in ("applied", "refused"):
        assert f'sluice_engine_live_config_changes_total{{result="{result}"}} 1.0' in page


async def test_a_task_beside_the_engine_that_breaks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks() -> None:
        raise RuntimeError("no such thing")

    task = asyncio.create_task(breaks(), name="following live.json")
    task.add_done_callback(tell_of_a_broken)
    await asyncio.wait({task})
    await asyncio.sleep(0)

    (record,) = caplog.records
    assert (record.levelname, record.__dict__["task"]) == ("ERROR", "following live.json")


# ---------------------------------------------------------------------- several ranks


@pytest.mark.slow
async def test_no_rank_outlives_another_and_its_death_is_told(folder: Path, model: Path) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}
    async with running(folder, model, tensor_parallel=2) as (process, http):
        (follower,) = children(process.pid)
        async with http.post("/v1/chat/completions", json=chat) as response:
            await response.content.readline()
            os.kill(follower, signal.SIGKILL)
            text = (await response.content.read()).decode()
        _, errors = await asyncio.to_thread(process.communicate, None, 30)

    words = f"RankFailed: rank 1 of 2 (process {follower}) was killed by SIGKILL"
    assert f"rank 1 of 2 (process {follower}) was killed by SIGKILL" in text
    assert "[DONE]" not in text
    assert process.returncode == 1
    assert errors.splitlines()[-1] == words
    assert (folder / "last-words").read_text() == words + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0)])
async def test_the_other_ranks_end_with_the_first(
    folder: Path, model: Path, number: signal.Signals, status: int
) -> None:
    async with running(folder, model, tensor_parallel=2) as (process, _):
        (follower,) = children(process.pid)
        process.send_signal(number)
        # The pipe of its errors is the other rank's, too: its end is the end of both.
        _, errors = await asyncio.to_thread(process.communicate, None, 30)

    assert process.returncode == status
    assert "Traceback" not in errors
    assert has_ended(follower)


def has_ended(pid: int) -> bool:
    """Also of an orphan that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
