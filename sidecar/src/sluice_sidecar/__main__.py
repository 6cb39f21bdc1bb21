"""`python -m sluice_sidecar --config FILE`: read the files, build the gate, run until told to stop.

Exit status: 0 after SIGTERM, 2 with one line on stderr for a file or an address that cannot be used. Where the line's
first word is a code, `PortInUse: …`, the operator tells it as the reason of the failure.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import json
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from aiohttp import web

from sluice_engine import codec
from sluice_engine.errors import InvalidConfig
from sluice_engine.logs import log_to_stderr
from sluice_sidecar.admin import Admin
from sluice_sidecar.config import GateConfig
from sluice_sidecar.hot_files import HotFiles
from sluice_sidecar.server import Gate
from sluice_sidecar.telemetry.tracing import require_library
from sluice_sidecar.web.listener import GateServer, bind, parser_is_compiled

log = logging.getLogger(__name__)

USAGE_ERROR = 2
_CODES = {errno.EADDRINUSE: "PortInUse", errno.ENOSPC: "DiskFull"}


def clock_us() -> int:
    """Monotonic time in whole microseconds."""
    return time.monotonic_ns() // 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate; returns its exit status."""
    parser = argparse.ArgumentParser(prog="sluice_sidecar", description="Sluice's gate: the pod's only door.")
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="gate.json")
    options = parser.parse_args(arguments)
    try:
        config = codec.from_json(GateConfig, options.config.read_bytes(), "gate.json")
        require_library(config.otlp_endpoint)
        files = HotFiles(config, secrets.token_bytes(32))
        live = files.live.load()
        keys = files.keys.load() if files.keys is not None else None
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            sockets = (
                opened.enter_context(bind(config.host, config.port)),
                opened.enter_context(bind(config.host, config.admin_port)),
            )
            publish_address(config, *sockets)
            opened.pop_all()  # the servers close them from here on
    except (InvalidConfig, OSError) as error:
        code = _CODES.get(error.errno or 0) if isinstance(error, OSError) else None
        sys.stderr.write(f"{code or 'sluice_sidecar'}: {_one_line(error)}\n")
        return USAGE_ERROR
    log_to_stderr()
    if not parser_is_compiled():
        log.warning("aiohttp has no C extension here: HTTP is read by its slower parser")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        draw = random.SystemRandom().randint
        return runner.run(
            serve(lambda: Gate(config, live, clock=clock_us, draw=draw, files=files, keys=keys), *sockets)
        )


async def serve(make_gate: Callable[[], Gate], public: socket.socket, private: socket.socket) -> int:
    """Run both doors until a signal ends them; the gate is made inside the event loop that it runs in."""
    gate = make_gate()
    gate.drain.clear()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()

    async def drain_and_stop() -> None:
        if gate.drain.started or gate.in_flight:
            await gate.drain.start()
        stop.set()

    def terminate() -> None:
        if stopping:
            log.warning("second signal: leaving at once")
            stop.set()
        else:
            log.info("terminating", extra={"in_flight": gate.in_flight})
            stopping.add(loop.create_task(drain_and_stop()))

    loop.add_signal_handler(signal.SIGUSR1, gate.drain.start)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, terminate)
    poller = loop.create_task(gate.engine.run())
    follower = loop.create_task(gate.files.follow(gate))
    user_timeout_ms = gate.config.stall_timeout_us // 1000
    servers = (
        GateServer(gate.handle, user_timeout_ms=user_timeout_ms, door=gate),
        GateServer(Admin(gate).handle, user_timeout_ms=user_timeout_ms),
    )
    runners = [web.ServerRunner(server, shutdown_timeout=0.1) for server in servers]
    for runner, sock in zip(runners, (public, private), strict=True):
        await runner.setup()
        await web.SockSite(runner, sock).start()
    log.info("listening", extra={"port": public.getsockname()[1], "admin_port": private.getsockname()[1]})
    # What has been loaded stays: the collector need not look through it while tokens wait.
    gc.collect()
    gc.freeze()
    # Each poll of the engine brings thousands of objects that are gone by the next: no reason to look for cycles.
    gc.set_threshold(20_000, 10, 10)
    waiter = loop.create_task(stop.wait())
    # One of these that ends is a bug: better a restart by the kubelet than a gate that sees nothing.
    ended, _ = await asyncio.wait({waiter, poller, follower}, return_when=asyncio.FIRST_COMPLETED)
    if waiter not in ended:
        log.error("the poll of the engine or the watch of the files ended", exc_info=ended.pop().exception())
        return 1
    for runner in runners:
        await runner.cleanup()
    for task in (poller, follower, waiter):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await gate.engine.close()
    await gate.tracing.close()
    return 0


def publish_address(config: GateConfig, public: socket.socket, private: socket.socket) -> None:
    """Write `gate-address.json`, whole or not at all: local runs listen on ports that the kernel chose.

    Raises:
        OSError: `run_dir` takes no file.
    """
    host = "127.0.0.1" if config.host in {"::", "0.0.0.0"} else config.host  # noqa: S104  # compared, not bound
    address = {"host": host, "port": public.getsockname()[1], "admin_port": private.getsockname()[1]}
    path = Path(config.run_dir) / "gate-address.json"
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(address))
    scratch.replace(path)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # a faster loop where there is one
    except ImportError:
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
