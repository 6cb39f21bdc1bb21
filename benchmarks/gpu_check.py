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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_weights import ONE_BILLION, SMALL, TINY, Shape, make
from report import Bar, Report
from sluice_engine.calibrate import calibrate
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.paged import NAMES, facts_of, make_backend, prove, reasons_against
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import (
    CacheConfig,
    DataType,
    EngineConfig,
    LiveConfig,
    ModelConfig,
    ModelSource,
    SchedulerConfig,
    SLOConfig,
)
from sluice_engine.core.assemble import assemble
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.step_limits import Capacity, StepLimits
from sluice_engine.core.steptime import ChunkCeiling, PlanningProfile, StepTable
from sluice_engine.executor import ThreadExecutor
from sluice_engine.model_files.weights import open_tensors

BUDGET_S = 420.0
PROMISE_US = 150_000
OUTPUT_TOKENS = 64
PROMPT_TOKENS = (128, 512)
CLIENTS = (1, 4, 16, 64, 256)
# Of log probabilities, against float32 on the CPU: rounding in other orders; eight bits of mantissa, eleven.
LIMITS = {"Float32": 2e-3, "BFloat16": 0.25, "Float16": 0.05}
SERVING = ("aiohttp", "prometheus_client", "tokenizers", "jinja2", "llguidance", "huggingface_hub", "uvloop", "gguf")

Measured = tuple[StepTable, Capacity]


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


def spoken(runner: TorchRunner, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens after each prompt and their log probabilities, all in one batch."""
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=True)
    requests = [Request(str(i), list(p), len(p), params, 0) for i, p in enumerate(prompts)]
    values: dict[str, list[float]] = {request.id: [] for request in requests}
    loop = bare_loop(runner, depth=0)
    for request in requests:
        refusal = loop.add(request)
        assert refusal is None, refusal
    while loop.has_work:
        for emission in loop.step():
            if emission.logprob is not None:
                values[emission.request.id].append(emission.logprob.value)
    runner.close()
    return [(request.tokens[request.num_prompt :], values[request.id]) for request in requests]


def bare_loop(runner: TorchRunner, depth: int) -> EngineLoop:
    """A loop with the planning profile's step times: what comes out does not hang on them."""
    limits = StepLimits(
        max_sequences=16,
        token_budget=512,
        prefill_chunk_tokens=64,
        max_prefill_tokens_per_request=None,
        ceiling=ChunkCeiling(PlanningProfile(), 10_000_000),
        block_tokens=runner.block_tokens,
    )
    pool = BlockPool(runner.num_blocks, runner.block_tokens)
    scheduler = Scheduler(limits, pool, PlanningProfile(), max_length_tokens=runner.max_length_tokens, depth=depth)
    return EngineLoop(scheduler, runner, clock)


def clock() -> int:
    """Monotonic µs."""
    return time.monotonic_ns() // 1000


def live() -> LiveConfig:
    """The promise."""
    return LiveConfig(slo=SLOConfig(time_to_first_token_us=60_000_000, inter_token_latency_us=PROMISE_US))


def step_table(runner: TorchRunner, config: EngineConfig) -> tuple[Measured, dict[str, Any]]:
    """The calibration's table, and what follows from it."""
    measured = calibrate(runner, config, live(), clock)
    table, capacity = measured
    derived = assemble(config, live(), table, capacity).tuning.current.derived
    rows = {
        f"d{d} p{p}": table.predict_us(d, p, 0, 0)
        for d in table.decode_axis
        for p in table.prefill_axis
        if (d or p) and (p in table.prefill_axis[:3] or not d or p == table.prefill_axis[-1])
    }
    return measured, {
        "description": runner.description,
        "step_us": rows,
        "derived": dataclasses.asdict(derived),
        "kv_blocks": runner.num_blocks,
        "host_overhead_us": table.host_overhead_us,
        "largest_prefill_tokens": runner.largest_prefill_tokens,
    }


def under_load(
    check: Check, runner: TorchRunner, config: EngineConfig, measured: Measured, clients: int
) -> dict[str, float]:
    """A closed loop of so many clients in the engine's own loop: no server, no tokenizer."""
    core = assemble(config, live(), *measured)
    executor = ThreadExecutor(runner) if core.scheduler.depth else None
    loop = EngineLoop(core.scheduler, runner, clock, executor=executor, tuning=core.tuning)
    shape = check_shape(check)
    output, total = (8, 2 * clients) if check.quick else (OUTPUT_TOKENS, max(4, 2 * clients))
    coming = requests(total, output, shape)
    gaps: list[int] = []
    waits: list[int] = []
    tokens = 0

    def add() -> None:
        request = next(coming, None)
        if request is not None:
            request.arrival_us = clock()
            refusal = loop.add(request)
            assert refusal is None, refusal

    begun = time.monotonic()
    for _ in range(clients):
        add()
    while loop.has_work:
        for emission in loop.step():
            if emission.token_id is not None:
                tokens += 1
                if emission.gap_us is None:
                    waits.append(clock() - emission.request.arrival_us)
                else:
                    gaps.append(emission.gap_us)
            if emission.outcome is not None:
                assert emission.request.error is None, emission.request.error
                add()
    spent = time.monotonic() - begun
    if executor is not None:
        executor.close()
    outside = loop.host_us_total / max(1, loop.host_us_total + loop.runner_us_total)
    return {
        "output_tokens_per_s": round(tokens / spent, 1),
        "itl_p50_ms": _percentile(gaps, 50) / 1000,
        "itl_p99_ms": _percentile(gaps, 99) / 1000,
        "itl_max_ms": max(gaps, default=0) / 1000,
        "ttft_p50_ms": _percentile(waits, 50) / 1000,
        "outside_the_model": round(outside, 4),
    }


def requests(total: int, output: int, shape: Shape) -> Iterator[Request]:
    """Prompts of even lengths between the two."""
    low, high = PROMPT_TOKENS if shape is ONE_BILLION else (8, 40)
    for number in range(total):
        length = low + (high - low) * (number * 7 % 16) // 16
        tokens = prompt(100 + number, length, shape)
        yield Request(str(number), tokens, length, SamplingParams(max_tokens=output, temperature=0.0), 0)


def prompt(seed: int, length: int, shape: Shape) -> list[int]:
    """Random tokens."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, shape.vocab_size, length).tolist()
    return drawn


def transformers_peer(check: Check) -> dict[str, Any]:
    """Plain transformers over the same weights, greedy, static batches."""
    if importlib.util.find_spec("transformers") is None:
        return {"left out": "transformers is not installed"}
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    shape = check_shape(check)
    dtype = torch.bfloat16 if check.on_gpu else torch.float32
    device = "cuda" if check.on_gpu else "cpu"
    model = AutoModelForCausalLM.from_pretrained(make(shape, check.folder), dtype=dtype).to(device)
    new = 8 if check.quick else OUTPUT_TOKENS
    answers = {}
    for batch in (1, 4) if check.quick else (1, 16, 64):
        ids = torch.tensor([prompt(i, 32 if check.quick else 320, shape) for i in range(batch)], device=device)
        times = []
        for _ in range(2):
            begun = time.monotonic()
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            times.append(time.monotonic() - begun)
        answers[str(batch)] = {"output_tokens_per_s": round(batch * new / min(times), 1)}
    return answers


def vllm_peer(check: Check) -> dict[str, Any]:
    """vLLM over the same weights, all requests at once."""
    if not check.on_gpu or importlib.util.find_spec("vllm") is None:
        return {"left out": "vllm is not installed, or there is no card"}
    vllm = importlib.import_module("vllm")  # it is no dependency: a type checker would not find it
    shape = check_shape(check)
    engine = vllm.LLM(
        str(make(shape, check.folder)), skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_model_len=4096
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS, detokenize=False)
    answers = {}
    for batch in (1, 16, 64, 256):
        given = [{"prompt_token_ids": request.tokens} for request in requests(batch, OUTPUT_TOKENS, shape)]
        begun = time.monotonic()
        engine.generate(given, params, use_tqdm=False)
        answers[str(batch)] = {"output_tokens_per_s": round(batch * OUTPUT_TOKENS / (time.monotonic() - begun), 1)}
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
        return under_load(check, runner, dataclasses.replace(config, scheduling=scheduling), kept[0], clients)

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


def _percentile(values: list[int], percent: int) -> float:
    if len(values) < 2:
        return float(values[0]) if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return "not installed"
    return str(getattr(__import__(name), "__version__", "unknown"))


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
        check.section("transformers", lambda: transformers_peer(check))
        check.section("vllm", lambda: vllm_peer(check))
        check.report.data["left_out"] = check.left_out
        check.report.data["seconds"] = round(time.monotonic() - check.started, 1)
        return check.report.finish()


if __name__ == "__main__":
    sys.exit(main())
