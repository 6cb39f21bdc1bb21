"""One pod of a service as two local processes, from the same renderer: for `sluice run`, `make demo` and benchmarks.

Owns the processes, their temporary folder and their end: whatever happens, nothing is left running. The gate starts
first and ends last, as in a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from sluice_engine import codec
from sluice_operator.cluster.gates import GateClient
from sluice_operator.errors import PodFailed
from sluice_operator.local.environment import environment
from sluice_operator.local.last_words import last_words, signal_name
from sluice_operator.local.parent import end_with_parent
from sluice_operator.observed.loading import loading_text
from sluice_operator.rendering.files import Paths, arguments, files
from sluice_operator.rendering.foreign.runtime import command, is_foreign, local_environment
from sluice_operator.resource.spec import ServiceSpec
from sluice_sidecar.telemetry.state import GateState

_LOOK_S = 0.1
# After its drain a program has nothing left to do.
_END_S = 15.0
# A Unix socket's path may have 107 bytes; the longest name below the folder is run/engine.sock.
_LONGEST_FOLDER = 80


class LocalPod:
    """Engine and gate of one service on this machine.

    `async with LocalPod(spec) as pod: await pod.wait_ready()`; then `pod.url` takes requests.
    """

    def __init__(self, spec: ServiceSpec, *, port: int = 0, admin_port: int = 0, cache_dir: Path | None = None) -> None:
        self.spec = spec
        self._port = port
        self._admin_port = admin_port
        self._cache_dir = cache_dir or _user_cache()
        self._folder = Path()
        self._paths = Paths()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._session: aiohttp.ClientSession | None = None
        self._admin_url = ""
        self.url = ""
        """Where requests go, once `wait_ready` has returned."""

    async def __aenter__(self) -> Self:
        """Start both programs.

        Raises:
            PodFailed: this machine has no room for their files, or does not run them.
        """
        try:
            await self._start()
        except OSError as error:
            await self.stop(drain=False)
            raise PodFailed(f"cannot start: {error}") from error
        except BaseException:
            await self.stop(drain=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain and end both programs, or end them at once when the block failed."""
        await self.stop(drain=kind is None)

    @property
    def admin_url(self) -> str:
        """Where the gate answers `/state`, `/steps` and `/metrics`, once `wait_ready` has returned."""
        return self._admin_url

    @property
    def engine_socket(self) -> str:
        """The engine's own socket, past the gate: for measurements."""
        return str(Path(self._paths.run_dir) / "engine.sock")

    def log_path(self, program: str) -> Path:
        """The log of `engine` or `gate`; gone after the end."""
        return self._folder / f"{program}.log"

    def pid(self, program: str) -> int:
        """The process id of `engine` or `gate`."""
        return self._processes[program].pid

    async def state(self) -> GateState | None:
        """What the gate says now, the engine's state within."""
        if not self._session or not self._admin_url:
            return None
        return await GateClient(self._session).state_at(self._admin_url)

    async def wait_ready(self, timeout_s: float = 600.0, progress: Callable[[str], None] = lambda _: None) -> None:
        """Wait until requests are taken; `progress` is told what happens meanwhile.

        Raises:
            PodFailed: a program ended, or it took longer than `timeout_s`.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        said = ""
        while True:
            self._require_running()
            if not self.url:
                self._read_address()
            state = await self.state()
            if state is not None and state.ready:
                return
            text = "starting" if state is None or state.engine is None else loading_text(state.engine)
            if text != said:
                said = text
                progress(text)
            if clock() > deadline:
                raise PodFailed(f"not ready after {timeout_s:.0f} s ({text}); its log: {self._last_line('engine')}")
            await asyncio.sleep(_LOOK_S)

    async def wait_failed(self) -> None:
        """Return never, unless a program ends.

        Raises:
            PodFailed: it did; the text holds its last words.
        """
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        self._require_running()

    async def stop(self, *, drain: bool = True) -> None:
        """End both programs; with `drain`, streams run on until they end or the drain times out."""
        try:
            if drain:
                await self._drain()
            for program in ("engine", "gate"):
                await self._end(program)
        finally:
            left = [process for process in self._processes.values() if process.returncode is None]
            for process in left:  # all of them before anything is waited for, which may be interrupted
                process.kill()
            for process in left:
                await process.wait()
            if self._session:
                await self._session.close()
            if self._folder != Path():
                shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-", dir=_short_temporary_folder()))
        folders = {name: self._folder / name for name in ("run", "config", "live")}
        for folder in folders.values():
            folder.mkdir()
        with contextlib.suppress(OSError):  # then step times are measured anew each time, which the engine's log says
            self._cache_dir.mkdir(parents=True, exist_ok=True)
        self._paths = Paths(
            run_dir=str(folders["run"]),
            config_dir=str(folders["config"]),
            live_dir=str(folders["live"]),
            cache_dir=str(self._cache_dir),
            hub_dir=_hub_cache(),
            termination_log=str(self._folder / "termination-log"),
            engine_port=_free_port(),
        )
        contents = files(self.spec, self._paths)
        # No endpoints have to forget a local gate.
        gate = dataclasses.replace(
            contents.gate, host="127.0.0.1", port=self._port, admin_port=self._admin_port, endpoint_propagation_us=0
        )
        (folders["config"] / "engine.json").write_text(codec.to_json(contents.engine), encoding="utf-8")
        (folders["config"] / "gate.json").write_text(codec.to_json(gate), encoding="utf-8")
        (folders["live"] / "live.json").write_text(codec.to_json(contents.live), encoding="utf-8")
        self._session = aiohttp.ClientSession()
        for program in ("gate", "engine"):
            with self.log_path(program).open("wb") as log:
                self._processes[program] = await asyncio.create_subprocess_exec(
                    *self._command(program),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment(program)},
                    # A Ctrl-C in the terminal is ours alone to answer, by a drain.
                    start_new_session=True,
                    preexec_fn=end_with_parent(),  # one call of the kernel, looked up before the fork
                )

    def _command(self, program: str) -> list[str]:
        if program == "engine" and is_foreign(self.spec):
            return command(self.spec, self._paths.engine_port)
        module = {"gate": "sluice_sidecar", "engine": "sluice_engine"}[program]
        return [sys.executable, "-P", "-m", module, *arguments(program, self._paths)]

    def _environment(self, program: str) -> dict[str, str]:
        if program == "gate":
            return {}
        return {**(local_environment(self.spec) if is_foreign(self.spec) else {}), **environment(self.spec)}

    def _read_address(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            address = json.loads((Path(self._paths.run_dir) / "gate-address.json").read_text(encoding="utf-8"))
            self.url = f"http://127.0.0.1:{address['port']}"
            self._admin_url = f"http://127.0.0.1:{address['admin_port']}"

    def _require_running(self) -> None:
        for program, process in self._processes.items():
            if process.returncode is None:
                continue
            if process.returncode < 0:
                # It had no time for last words.
                raise PodFailed(f"the {program} was killed by {signal_name(-process.returncode)}")
            raise PodFailed(f"the {program} ended (exit code {process.returncode}): {self._last_words(program)}")

    def _last_words(self, program: str) -> str:
        if program == "engine":
            with contextlib.suppress(OSError):
                if text := Path(self._paths.termination_log).read_text(encoding="utf-8").strip():
                    return text
        return self._last_line(program)

    def _last_line(self, program: str) -> str:
        with contextlib.suppress(OSError):
            return last_words(self.log_path(program).read_text(encoding="utf-8", errors="replace"))
        return last_words("")

    async def _drain(self) -> None:
        gate = self._processes.get("gate")
        if gate is None or gate.returncode is not None:
            return
        gate.send_signal(signal.SIGUSR1)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.spec.drain_timeout_us / 1_000_000 + _END_S
        drained = Path(self._paths.run_dir) / "drained"
        while not drained.exists() and gate.returncode is None and clock() < deadline:  # noqa: ASYNC110  # a file's event
            await asyncio.sleep(_LOOK_S)

    async def _end(self, program: str) -> None:
        process = self._processes.get(program)
        if process is None or process.returncode is not None:
            return
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S)


def _free_port() -> int:
    """A port of the loopback that was free a moment ago: another engine cannot be asked which one it took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _user_cache() -> Path:
    """Where measured step times are kept between local runs."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  # fails for no user
    return Path(root) / "sluice" / "step-times"


def _hub_cache() -> str:
    """Where the user's models of a hub are, by the rules of `huggingface_hub`: what is there need not be downloaded."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")  # noqa: PTH111  # fails for no user


def _short_temporary_folder() -> str | None:
    """The usual temporary folder, or /tmp where a socket's path would not fit in it."""
    return None if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108  # mkdtemp makes a folder of ours in it
