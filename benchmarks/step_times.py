"""Times of the same steps by engines that differ in one thing, each in a process of its own, asked in turn.

A process is one variant, because kernels and threads are chosen once. All are loaded first; then each measures its
steps while the others sleep, round by round, so that a slow minute of the machine meets all alike. As a program it is
one variant: it reads lines of cells and answers with times, and ends when nobody is left who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice_engine import codec
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.config import CacheConfig, DataType, EngineConfig, ModelConfig, ModelSource, Quantization

Cell = tuple[int, int, int, int]
"""Decodes, prefill tokens, context tokens of the decodes, start of the chunk: what `TorchRunner.measure` takes."""

_CONTEXT = 256
CELLS: dict[str, Cell] = {
    **{f"decode {n}": (n, 0, n * _CONTEXT, 0) for n in (1, 4, 16, 48)},
    "prefill 512": (0, 512, 0, 0),
    "prefill 512 at 3,000": (0, 512, 0, 3000),
}
# A step of few decodes takes some ms; one of prefill is long enough to be measured once a round.
_TIMES_IN_A_ROUND = {"decode 1": 9, "decode 4": 9, "decode 16": 5, "decode 48": 3}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute the demo model."""

    name: str
    kernels: str = "on"
    """SLUICE_KERNELS."""
    data_type: DataType = "Auto"
    quantization: Quantization = "Auto"

    def config(self) -> EngineConfig:
        """Its engine."""
        source = ModelSource(demo="smollm2-135m")
        model = ModelConfig(
            source=source, served_name="steps", data_type=self.data_type, quantization=self.quantization
        )
        return EngineConfig(model=model, cache=CacheConfig(capacity_bytes=400 << 20))


@dataclass(slots=True)
class Measured:
    """What a variant gave."""

    description: str
    """Which kernels and which type it runs with, in the engine's own words."""
    samples_us: dict[str, list[int]] = field(default_factory=dict)
    """By cell."""


async def measure(variants: Sequence[Variant], cells: Mapping[str, Cell], rounds: int, folder: Path) -> list[Measured]:
    """Every cell by every variant, in `rounds`."""
    async with contextlib.AsyncExitStack() as up:
        processes, measured = [], []
        for variant in variants:  # one after the other: loading takes both cores
            process = await up.enter_async_context(_process(variant, folder))
            measured.append(Measured(json.loads(await _line(process, variant))))
            print(f"  {variant.name}: {measured[-1].description}", flush=True)
            processes.append(process)
        asked = [name for name in cells for _ in range(_TIMES_IN_A_ROUND.get(name, 1))]
        for number in range(rounds + 1):
            for variant, process, found in zip(variants, processes, measured, strict=True):
                times = await _ask(process, variant, [cells[name] for name in asked])
                if not number:
                    continue  # the first use of a shape pays for its kernels
                for name, took_us in zip(asked, times, strict=True):
                    found.samples_us.setdefault(name, []).append(took_us)
            print(f"  steps: round {number} of {rounds}", flush=True)
    return measured


@contextlib.asynccontextmanager
async def _process(variant: Variant, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / "variant.json"
    path.write_text(codec.to_json(variant.config()), encoding="utf-8")
    environment = os.environ | {"SLUICE_KERNELS": variant.kernels}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(path), stdin=pipe, stdout=pipe, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()  # it holds nothing but memory
        await process.wait()


async def _ask(process: asyncio.subprocess.Process, variant: Variant, cells: list[Cell]) -> list[int]:
    assert process.stdin is not None, "a process without a pipe"
    process.stdin.write(json.dumps(cells).encode() + b"\n")
    answer: list[int] = json.loads(await _line(process, variant))
    return answer


async def _line(process: asyncio.subprocess.Process, variant: Variant) -> bytes:
    assert process.stdout is not None, "a process without a pipe"
    line = await process.stdout.readline()
    if not line:
        raise SystemExit(f"{variant.name}: its engine ended with status {await process.wait()}")
    return line


def serve(path: Path) -> None:
    """Be one variant until standard input ends."""
    runner = assemble_runner(codec.from_json(EngineConfig, path.read_text(encoding="utf-8"), path.name), lambda _: None)
    print(json.dumps(runner.description), flush=True)
    for line in sys.stdin:
        print(json.dumps([runner.measure(*cell) for cell in json.loads(line)]), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
