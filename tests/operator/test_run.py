"""`sluice run` where something is in the way: a port, a cache folder, a signal, a program that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import operator_scene as scene
from sluice_operator.cli import main
from sluice_operator.errors import PodFailed
from sluice_operator.local.pod import LocalPod

DEMO = str(scene.EXAMPLES / "demo-cpu.yaml")


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use_is_one_plain_line(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main.run(["run", option, str(port), DEMO])

    err = capsys.readouterr().err
    assert code == 2
    assert err == f"sluice: port {port} on 127.0.0.1 is in use: choose another with {option}\n"


def test_one_port_cannot_serve_both_doors(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    code = main.run(["run", "--port", port, "--admin-port", port, DEMO])

    assert code == 2
    assert "choose another with --admin-port" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["a-file/step-times", "/proc/nope"])
async def test_a_cache_folder_that_cannot_be_made_does_not_stop_a_start(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a-file").write_text("")

    async with LocalPod(scene.example("demo-cpu"), cache_dir=tmp_path / folder) as pod:
        assert pod.pid("engine")
        await pod.stop(drain=False)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["engine", "gate"])
async def test_a_program_that_is_killed_is_told_by_its_signal(tmp_path: Path, program: str) -> None:
    async with LocalPod(scene.example("demo-cpu"), cache_dir=tmp_path) as pod:
        os.kill(pod.pid(program), signal.SIGKILL)
        with pytest.raises(PodFailed) as caught:
            await pod.wait_failed()
        await pod.stop(drain=False)

    assert str(caught.value) == f"the {program} was killed by signal 9 (SIGKILL)"


@pytest.mark.slow
async def test_the_last_words_of_a_program_are_no_json(tmp_path: Path) -> None:
    async with LocalPod(scene.example("demo-cpu"), cache_dir=tmp_path) as pod:
        async with asyncio.timeout(60):
            while "listening" not in pod.log_path("gate").read_text():  # noqa: ASYNC110  # another process's
                await asyncio.sleep(0.05)
        os.kill(pod.pid("gate"), signal.SIGTERM)
        with pytest.raises(PodFailed) as caught:
            await pod.wait_failed()
        await pod.stop(drain=False)

    assert str(caught.value) == "the gate ended (exit code 0): terminating"


@asynccontextmanager
async def starting(cache: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, once it has started both programs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from sluice_operator.cli.main import main; main()",
        "run",
        DEMO,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            told: list[bytes] = []
            while not told or not told[-1].endswith(b": starting\n"):
                told.append(await process.stderr.readline())
                assert told[-1], b"".join(told)
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_while_it_starts_ends_it_with_exit_code_1(tmp_path: Path, number: signal.Signals) -> None:
    async with starting(tmp_path) as process:
        process.send_signal(number)
        _, rest = await process.communicate()

    assert process.returncode == 1
    assert rest.decode().endswith("stopped before it was ready\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there does a kernel tell children that their parent died")
async def test_a_command_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    async with starting(tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()  # noqa: ASYNC240
        process.kill()
        await process.wait()
        while any(map(is_running, children)):  # noqa: ASYNC110  # another process's end
            await asyncio.sleep(0.05)

    assert len(children) == 2


def is_running(pid: str) -> bool:
    """Not ended, nor only waiting for somebody to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
