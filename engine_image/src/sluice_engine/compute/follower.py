"""`python -m sluice_engine.compute.follower FD`: a rank beyond the first, started by rank 0 and told everything by it.

It loads its shard, then computes whatever step it is told of, and samples nothing. It ends with rank 0: a thread reads
the pipe, and its end is this process's end, wherever the other thread waits.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sluice_engine.codec import from_json
from sluice_engine.compute.loading import Opened
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import EngineConfig
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import InvalidConfig, ModelUnavailable
from sluice_engine.logs import log_to_stderr
from sluice_engine.model_files.shard import Shard

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """The process's exit status; it may also end at any moment with rank 0."""
    # Who stops the engine tells rank 0, which drains; a terminal, or a whole process group's end, tells all.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    pipe: Connection[Any, Any] = Connection(int(argv[0]))
    rank, config, store = pipe.recv()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, messages), name="pipe", daemon=True).start()
    code, words = "RankFailed", ""
    try:
        read = from_json(EngineConfig, config, "engine.json")
        _follow(read, Shard(rank, read.tensor_parallel), Path(store), pipe, messages)
    except ModelUnavailable as error:
        code, words = error.code, str(error)
    except InvalidConfig as error:
        code, words = "InvalidConfig", str(error)
    except Exception as error:
        log.exception("rank failed", extra={"rank": rank})
        words = f"rank {rank} failed: {type(error).__name__}: {_line(error)}"
    try:
        pipe.send(("failed", code, words))
    except OSError:
        log.info("rank 0 is gone", extra={"rank": rank})
    logging.shutdown()
    os._exit(1)  # no collective's thread is waited for


def _follow(
    config: EngineConfig, shard: Shard, store: Path, pipe: Connection[Any, Any], messages: queue.SimpleQueue[Any]
) -> None:
    opened = Opened.of(config, shard)
    pipe.send(("up",))
    loaded = opened.load(_silently, store)
    pipe.send(("loaded", loaded.free_bytes))
    runner = TorchRunner.of(opened, loaded, messages.get())
    pipe.send(("ready", runner.memory_bytes))
    log.info("rank ready", extra={"rank": shard.rank, "memory_bytes": runner.memory_bytes})
    while True:
        runner.follow(messages.get())


def _read(pipe: Connection[Any, Any], messages: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            messages.put(pipe.recv())
        except (OSError, EOFError):
            os._exit(0)


def _silently(_: LoadingProgress) -> None:
    """Rank 0 tells how far the start is."""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
