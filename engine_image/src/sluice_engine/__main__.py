"""`python -m sluice_engine --config FILE`: reads the two files, binds the socket, starts the engine, and ends well.

Exit status: 0 after SIGTERM or SIGINT; 2 for a bad option or configuration; 1 when the model cannot be loaded, the
socket cannot be bound, or the engine fails. Each bad end is one line, `CODE: message`, on standard error and in the
termination message that Kubernetes shows.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from sluice_engine import native_settings
from sluice_engine.codec import digest, from_json
from sluice_engine.config import EngineConfig
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import InvalidConfig, SocketUnavailable
from sluice_engine.live_config import LiveConfig
from sluice_engine.live_file import LiveFile, live_file
from sluice_engine.logs import log_to_stderr
from sluice_engine.serving.live_state import Identity
from sluice_engine.serving.metrics import register
from sluice_engine.serving.publication import LoadedEngine
from sluice_engine.serving.server import EngineServer, Sources
from sluice_engine.serving.service import ENGINE_THREAD, EngineService
from sluice_engine.serving.socket_file import bound_with_mode, claim

log = logging.getLogger("sluice_engine")

# The gate has drained before SIGTERM comes; what is left gets its error event within this.
SHUTDOWN_S = 2.0
KEEP_EVERY_S = 60.0
# Twice what the gate lets through: a header is refused there, in its words.
MAX_HEADER_BYTES = 32_768


class Parser(argparse.ArgumentParser):
    """Options whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with 2."""
        self.exit(2, f"sluice_engine: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """The process's exit status."""
    parser = Parser(prog="python -m sluice_engine", description="Sluice's engine: serves one model on a Unix socket.")
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="engine.json")
    options = parser.parse_args(argv)
    log_to_stderr()
    native_settings.apply(os.environ)
    try:
        config = from_json(EngineConfig, _read(options.config), options.config.name)
        file = live_file(config.live_path)
        live = file.load()
    except InvalidConfig as error:
        print(f"InvalidConfig: {error}", file=sys.stderr)  # noqa: T201  # the last words, for a person
        return 2
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        failure = runner.run(_serve(config, live, file))
    if failure is None:
        return 0
    stuck = _outlives(SHUTDOWN_S)
    code, message = failure
    last_words = f"{code}: {message}"
    print(last_words, file=sys.stderr)  # noqa: T201  # likewise
    try:
        Path(config.termination_message_path).write_text(last_words + "\n", encoding="utf-8")
    except OSError as error:
        log.info("termination message not written", extra={"error": str(error)})
    status = 2 if code == "InvalidConfig" else 1
    if stuck:
        logging.shutdown()
        os._exit(status)  # the interpreter's own way out would wait, too
    return status


def _outlives(limit_s: float) -> bool:
    """Whether the engine's thread still runs then: it may wait for a rank that has ended. It says nothing after."""
    for thread in threading.enumerate():
        if thread.name == ENGINE_THREAD:
            thread.join(limit_s)
            return thread.is_alive()
    return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(str(path), f"cannot be read: {error.strerror}") from error


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # an optional wheel: half the time of each socket operation
    except ImportError:
        return None
    return uvloop.Loop  # type: ignore[no-any-return]  # the stubs are skipped


async def _serve(config: EngineConfig, live: LiveConfig, file: LiveFile) -> tuple[str, str] | None:
    """Serve until a signal or a failure; the failure's code and sentence."""
    path = Path(config.socket_path)
    try:
        claim(path)
    except SocketUnavailable as error:
        return error.code, str(error)
    identity = Identity(
        boot_id=secrets.token_hex(8),
        served_name=config.model.served_name,
        engine_config_hash=digest(config),
        live_config_hash=digest(live),
    )
    service = _service(config, live)
    registry = CollectorRegistry()
    register(registry, service, identity, version("sluice-engine"), file)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    sources = Sources(
        wall_clock_s=lambda: int(time.time()),
        draw_seed=lambda: secrets.randbits(63),
        new_request_id=lambda: f"req-{secrets.token_hex(16)}",
    )
    app = EngineServer(service, identity, registry, sources, file, config.adapters).app()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )
    await runner.setup()
    try:
        with bound_with_mode():
            await web.UnixSite(runner, str(path)).start()
    except OSError as error:
        await runner.cleanup()
        return "SocketUnavailable", f"{path}: {error.strerror}"
    log.info("engine starting", extra={"socket": str(path), "model": identity.served_name, "boot_id": identity.boot_id})
    service.start()
    beside = [
        asyncio.create_task(_keep_now_and_then(service), name="keeping step times"),
        asyncio.create_task(file.follow(service.configure), name=f"following {file.name}"),
    ]
    for task in beside:
        task.add_done_callback(tell_of_a_broken)
    await _signal_or_end(service)
    failure = service.failure
    service.close()
    for task in beside:
        task.cancel()
    await runner.cleanup()
    _remove(path)
    if service.thread_alive():
        await asyncio.wait({asyncio.ensure_future(service.ended())}, timeout=SHUTDOWN_S)
    _keep(service)
    if failure is None and service.thread_alive():
        log.warning("step in flight cut off" if service.engine is not None else "start cut off")
        logging.shutdown()
        os._exit(0)  # the interpreter's own way out would wait for the step
    log.info("engine ended")
    return failure


def tell_of_a_broken(task: asyncio.Task[None]) -> None:
    """Log the fault that ended a task beside the engine; the streams run on."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task beside the engine ended", extra={"task": task.get_name()}, exc_info=error)


async def _keep_now_and_then(service: EngineService) -> None:
    """Keep what was learned of step times also where this process ends without warning."""
    while True:
        await asyncio.sleep(KEEP_EVERY_S)
        await asyncio.to_thread(_keep, service)


def _keep(service: EngineService) -> None:
    if service.engine is not None:
        service.engine.keep()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _service(config: EngineConfig, live: LiveConfig) -> EngineService:
    def clock() -> int:
        return time.monotonic_ns() // 1000

    def load(progress: Callable[[LoadingProgress], None]) -> LoadedEngine:
        from sluice_engine.start import load_engine  # noqa: PLC0415  # seconds of torch: the server answers meanwhile

        return load_engine(config, live, clock, progress, service.lose)

    service = EngineService(load, clock)
    return service


async def _signal_or_end(service: EngineService) -> None:
    """Return at SIGTERM, at SIGINT, or when the engine's thread is done."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    tasks = {asyncio.ensure_future(signalled.wait()), asyncio.ensure_future(service.ended())}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
