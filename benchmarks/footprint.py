"""What one engine takes of a machine: resident memory beside weights and KV cache, and the time of a warm start.

The demo model, data type `Auto`, 512 MiB of KV cache, after a closed loop of eight clients. Pages of the libraries for
CUDA, which the package index's torch brings along and maps whether there is a card or not, are counted apart: the build
of torch for CPUs has none of them. Weights are counted in a process of their own, as the tensors that hold them.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo_pod import demo_service, ready_pod
from report import Bar, Report, arguments
from sluice_operator.bench import prompts
from sluice_operator.bench.answers import Answer
from sluice_operator.bench.clients import Asked, Clients

MODEL, CACHE_MIB = "footprint", 512
SERVICE = demo_service(MODEL, cache={"capacity": f"{CACHE_MIB}Mi"})
MAX_BESIDE_MIB, MAX_WARM_START_S = 600.0, 15.0
WARM_STARTS = 3
_FOR_CUDA = re.compile(r"lib(torch_cuda|c10_cuda|cu|nv|nccl)")
_COUNT_WEIGHTS = "--count-weights"


def resident_mib(pid: int) -> dict[str, float]:
    """Resident memory of a process, MiB: all of it, and of that what belongs to libraries for CUDA."""
    pages, name = {"all": 0, "cuda": 0}, ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            name = Path(fields[5]).name if len(fields) > 5 else ""
        elif fields[0] == "Rss:":
            pages["all"] += int(fields[1])
            pages["cuda"] += int(fields[1]) if _FOR_CUDA.match(name) else 0
    return {key: round(kib / 1024, 1) for key, kib in pages.items()}


def count_weights() -> None:
    """Print the bytes of all tensors that a loaded model holds, in every form in which it holds them."""
    # In a process of its own, which does nothing else.
    import torch  # noqa: PLC0415

    from sluice_engine.compute.loading import Opened  # noqa: PLC0415
    from sluice_engine.config import EngineConfig, ModelConfig, ModelSource  # noqa: PLC0415
    from sluice_engine.model_files.shard import Shard  # noqa: PLC0415

    config = EngineConfig(model=ModelConfig(source=ModelSource(demo="smollm2-135m"), served_name=MODEL))
    loaded = Opened.of(config, Shard()).load(lambda _: None)
    gc.collect()
    held = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            # A packed tensor has no storage that can be asked.
            packed = tensor.layout != torch.strided
            key = id(tensor) if packed else tensor.untyped_storage().data_ptr()
            held[key] = tensor.numel() * tensor.element_size() if packed else tensor.untyped_storage().nbytes()
    print(json.dumps(sum(held.values())))
    del loaded  # held until here


async def start(cache: Path) -> tuple[float, dict[str, float]]:
    """Seconds from the start of both programs to the first token through the gate; the engine's memory after a load."""
    began = time.monotonic()
    async with ready_pod(SERVICE, cache) as pod:
        ready = time.monotonic() - began
        async with Clients(pod.url, Asked(model=MODEL)) as clients:
            seen: list[Answer] = []
            await clients.closed_loop(iter(["One sentence on light, please."]), 1, seen)
            await clients.closed_loop(itertools.islice(prompts.drawn(7, 32, 256), 32), 8, seen)
        failed = [answer.code for answer in seen if not answer.is_whole]
        if failed or seen[0].ttft_us is None:
            raise SystemExit(f"{len(failed)} of {len(seen)} requests failed: {failed[:3]}")
        for line in pod.log_path("engine").read_text(encoding="utf-8").splitlines():
            if "step table" in line:
                print(f"  {line}", flush=True)
        return ready + seen[0].ttft_us / 1e6, resident_mib(pod.pid("engine"))


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("footprint")
    counted = subprocess.run([sys.executable, __file__, _COUNT_WEIGHTS], check=True, capture_output=True, text=True)
    weights_mib = json.loads(counted.stdout) / 2**20
    with tempfile.TemporaryDirectory() as cache:
        cold_s, _ = asyncio.run(start(Path(cache)))
        warm = [asyncio.run(start(Path(cache))) for _ in range(1 if args.quick else WARM_STARTS)]
    resident = max((memory for _, memory in warm), key=lambda memory: memory["all"])
    beside_mib = resident["all"] - weights_mib - CACHE_MIB
    report.data = {
        "cold_start_s": round(cold_s, 1),
        "warm_starts_s": [round(seconds, 1) for seconds, _ in warm],
        "resident_mib": resident,
        "weights_mib": round(weights_mib, 1),
        "cache_mib": CACHE_MIB,
        "beside_mib": round(beside_mib, 1),
    }
    report.bars = [
        Bar(
            "resident beside weights and cache, without CUDA",
            beside_mib - resident["cuda"],
            "MiB",
            MAX_BESIDE_MIB,
            "lower",
        ),
        Bar(
            "warm start to the first token",
            statistics.median(seconds for seconds, _ in warm),
            "s",
            MAX_WARM_START_S,
            "lower",
        ),
    ]
    print(json.dumps(report.data))
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:] == [_COUNT_WEIGHTS]:
        count_weights()
    else:
        sys.exit(main())
