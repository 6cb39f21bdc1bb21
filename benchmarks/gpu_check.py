"""What one card computes with this engine: correctness, the step table, speed under load, graphs, overlap, peers.

Nothing is needed but torch, NumPy and safetensors; weights are made from a seed. It stops asking for more after seven
minutes, and the document says what was left out. `--device cpu --quick` shows that the script itself works.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_load import OUTPUT_TOKENS, Measured, prompt, requests, spoken, step_table, under_load
from gpu_peers import transformers_peer, vllm_peer
from gpu_weights import ONE_BILLION, SMALL, TINY, Shape, make
from report import Bar, Report
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.paged import NAMES, facts_of, make_backend, prove, reasons_against
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import CacheConfig, DataType, EngineConfig, ModelConfig, ModelSource, SchedulerConfig
from sluice_engine.model_files.weights import open_tensors

BUDGET_S = 420.0
CLIENTS = (1, 4, 16, 64, 256)
# Of log probabilities, against float32 on the CPU: rounding in other orders; eight bits of mantissa, eleven.
LIMITS = {"Float32": 2e-3, "BFloat16": 0.25, "Float16": 0.05}
SERVING = ("aiohttp", "prometheus_client", "tokenizers", "jinja2", "llguidance", "huggingface_hub", "uvloop", "gguf")


class Check:
    """One run of the script."""

    def __init__(self, device: str, *, quick: bool, folder: Path) -> None:
        self.on_gpu = device == "cuda"
        self.quick = quick
        self.folder = folder
        self.report = Report("gpu_check")
        self.started = time.monotonic()
        self.left_out: list[str] = []
        self.data_type: DataType = "Auto" if self.on_gpu else "Float32"

    def section(self, name: str, run: Callable[[], Any]) -> None:
        """Run a part, if there is time; a part that fails is a failed bar, and the next one runs."""
        if time.monotonic() - self.started > BUDGET_S:
            self.left_out.append(name)
            return
        begun = time.monotonic()
        try:
            self.report.data[name] = run()
        except Exception as error:  # noqa: BLE001  # of a device that was never seen: all of it is worth telling
            self.report.data[name] = {"error": f"{type(error).__name__}: {error}"}
            self.report.bars.append(Bar(f"{name} fails", 1, "failures", 0, "lower"))
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        print(f"  {name}: {time.monotonic() - begun:.1f} s: {json.dumps(self.report.data[name])[:400]}", flush=True)

    def config(self, shape: Shape, data_type: DataType, *, gpu: bool, depth: int | None = None) -> EngineConfig:
        """An engine over the model of this shape."""
        capacity = None if gpu else (64 << 20 if self.quick else 1 << 30)
        return EngineConfig(
            model=ModelConfig(
                source=ModelSource(path=str(make(shape, self.folder))), served_name="check", data_type=data_type
            ),
            cache=CacheConfig(capacity_bytes=capacity, prefix_caching="Disabled"),
            scheduling=SchedulerConfig(max_sequences=CLIENTS[-1] if gpu else 16, overlap_depth=depth),
            accelerator_count=int(gpu),
            table_dir=str(self.folder / "tables"),
        )

    def load(self, config: EngineConfig) -> TorchRunner:
        """A runner."""
        return assemble_runner(config, lambda _progress: None)


def found(check: Check) -> dict[str, Any]:
    """What is here."""
    here: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": _version("triton"),
        "missing for serving": [name for name in SERVING if importlib.util.find_spec(name) is None],
    }
    if check.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        here |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch's own gap
        }
    return here


def attention(check: Check) -> dict[str, str]:
    """Each backend against the reference, in each type."""
    shape = open_tensors(make(check_shape(check), check.folder)).architecture
    answers: dict[str, str] = {}
    device = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name in (name for name in NAMES if name != "torch"):
            against = reasons_against(name, facts_of(shape, dtype, 16, device))
            words = "; ".join(against)
            if not against:
                try:
                    words = prove(make_backend(name, shape, 16), shape, 16, dtype, device) or "right"
                except Exception as error:  # noqa: BLE001  # of a library on a device it does not know
                    words = f"{type(error).__name__}: {error}"
            answers[f"{name}, {str(dtype).removeprefix('torch.')}"] = words
    return answers


def correctness(check: Check) -> dict[str, Any]:
    """Greedy tokens and their log probabilities, against float32 on the CPU."""
    shape = TINY if check.quick else SMALL
    prompts = [prompt(seed, length, shape) for seed, length in enumerate((1, 7, 16, 17, 100, 300))]
    if check.quick:
        prompts = prompts[:4]
    expected = spoken(check.load(check.config(shape, "Float32", gpu=False)), prompts)
    answers: dict[str, Any] = {}
    for data_type in ("Float32", "BFloat16", "Float16") if check.on_gpu else ("Float32",):
        config = check.config(shape, data_type, gpu=check.on_gpu)
        got = spoken(check.load(config), prompts)
        # After the first token that differs the texts are others: only what stands before it is compared.
        gaps, same, of = [0.0], 0, 0
        for (tokens, values), (others, theirs) in zip(got, expected, strict=True):
            first = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
            same, of = same + first, of + len(tokens)
            gaps += [abs(a - b) for a, b in zip(values[:first], theirs[:first], strict=True)]
        answers[data_type] = {"same tokens": same, "of": of, "largest log probability gap": max(gaps)}
        name = f"log probabilities in {data_type}, off by"
        check.report.bars.append(Bar(name, max(gaps), "", LIMITS[data_type], "lower"))
        if data_type == "Float32":
            check.report.bars.append(Bar("greedy tokens as on the CPU, float32", same / of, "share", 0.95, "higher"))
    return answers


def speed(check: Check) -> None:
    """Everything that shares one loaded model: the table, loads, overlap, graphs."""
    config = check.config(check_shape(check), check.data_type, gpu=check.on_gpu)
    runner = check.load(config)
    kept: list[Measured] = []

    def table() -> dict[str, Any]:
        measured, document = step_table(runner, config)
        kept.append(measured)
        return document

    check.section("step_table", table)
    if not kept:
        return
    levels = (1, 4) if check.quick else CLIENTS if check.on_gpu else CLIENTS[:3]

    def load(depth: int | None, clients: int) -> dict[str, float]:
        scheduling = dataclasses.replace(config.scheduling, overlap_depth=depth)
        output, total = (8, 2 * clients) if check.quick else (OUTPUT_TOKENS, max(4, 2 * clients))
        coming = requests(total, output, check_shape(check))
        return under_load(runner, dataclasses.replace(config, scheduling=scheduling), kept[0], coming, clients)

    check.section("load", lambda: {str(clients): load(None, clients) for clients in levels})
    some = [clients for clients in (1, 16, 64) if clients <= levels[-1]]
    check.section(
        "overlap", lambda: {str(depth): {str(clients): load(depth, clients) for clients in some} for depth in (0, 1, 2)}
    )
    if check.on_gpu:

        def eager() -> dict[str, dict[str, float]]:
            runner.forget_recordings()
            return {str(clients): load(None, clients) for clients in some}

        check.section("graphs_off", eager)
    runner.close()


def check_shape(check: Check) -> Shape:
    """The model whose speed is measured."""
    return TINY if check.quick else ONE_BILLION if check.on_gpu else SMALL


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return "not installed"
    return str(getattr(importlib.import_module(name), "__version__", "unknown"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few requests: does the script work?")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; --device cpu --quick tries the script without one", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        check = Check(args.device, quick=args.quick, folder=Path(folder))
        check.section("found", lambda: found(check))
        if check.on_gpu:
            check.section("attention", lambda: attention(check))
        check.section("correctness", lambda: correctness(check))
        speed(check)
        shape = check_shape(check)
        path = make(shape, check.folder)
        check.section("transformers", lambda: transformers_peer(path, shape, on_gpu=check.on_gpu, quick=check.quick))
        check.section("vllm", lambda: vllm_peer(path, shape, on_gpu=check.on_gpu))
        check.report.data["left_out"] = check.left_out
        check.report.data["seconds"] = round(time.monotonic() - check.started, 1)
        return check.report.finish()


if __name__ == "__main__":
    sys.exit(main())
