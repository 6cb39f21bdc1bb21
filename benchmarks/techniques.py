"""What each technique of the engine gives: the demo model's engine against itself, with one thing changed at a time.

Steps: the own kernels and their registers, the types that weights are held in (`step_times.py`). Under load, past the
gate: speculation by prompt lookup, where a text repeats and where it does not; steps in flight; a prefill chunk derived
from the promise against whole prompts; a prefix that is cached. Variants of one comparison are up together and take
turns, and every other round in the other order, so that a slow minute of the machine meets all alike. What counts is
the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prefix_cache
from closed_loop import Row, Texts, counters, medians, one_run, outside_model_percent, words
from demo_pod import demo_service, ready_pod
from report import Bar, Report, arguments
from sluice_operator.bench import prompts
from sluice_operator.bench.clients import Asked, Clients
from sluice_operator.local.pod import LocalPod
from sluice_operator.resource.spec import ServiceSpec
from step_times import CELLS, Variant, measure

PARTS = ("steps", "load", "prefix")
ROUNDS = 3
VARIANTS = (
    Variant("as it comes"),
    Variant("kernels: AVX2", kernels="avx2"),
    Variant("kernels: none", kernels="off"),
    Variant("quantization: None", quantization="None"),
    Variant("quantization: Int8", quantization="Int8"),
    Variant("quantization: Int4", quantization="Int4"),
    Variant("Float32", data_type="Float32"),
    Variant("Float32, quantization: None", data_type="Float32", quantization="None"),
)
QUICK_VARIANTS = (VARIANTS[0], VARIANTS[2])

SPEC: dict[str, dict[str, Any]] = {
    "slo": {"referencePromptTokens": 2048, "interTokenLatency": "150ms"},
    "scheduling": {"maxSequences": 48},
    "cache": {"capacity": "700Mi", "prefixCaching": "Disabled"},
}
BASE = "as it comes"
# What differs from it, by engine.
ENGINES: dict[str, dict[str, Any]] = {
    BASE: {},
    "prompt lookup": {"scheduling": {"speculation": {"method": "PromptLookup"}}},
    "1 step in flight": {"scheduling": {"overlapDepth": 1}},
    "2 steps in flight": {"scheduling": {"overlapDepth": 2}},
    "whole prompts": {"scheduling": {"prefillChunkTokens": 2048}, "slo": {"enforcement": "Observe"}},
}


def service(engine: str) -> ServiceSpec:
    """What this engine serves."""
    return demo_service("load", **{part: {**values, **ENGINES[engine].get(part, {})} for part, values in SPEC.items()})


def repeated(seed: int) -> Iterator[str]:
    """Lists that are to be written once more, as code, tables and quotations are: what prompt lookup is for."""
    rng = random.Random(seed)
    for text in prompts.drawn(seed, 24, 48):
        number = rng.randint(100, 999)
        listed = "\n".join(f"{number + at}. {word}" for at, word in enumerate(text.split()))
        yield f"Repeat this list word for word, to its end:\n{listed}\n\nThe list again:\n{listed[: len(listed) // 4]}"


def long_and_short(seed: int) -> Iterator[str]:
    """Of eight prompts seven short ones, and one of 1,200 words."""
    long = prompts.drawn(seed + 1, 1200, 1200)
    for number, text in enumerate(words(seed)):
        yield next(long) if number % 8 == 7 else text


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind, and the engines that are compared under them."""

    name: str
    engines: tuple[str, ...]
    texts: Texts
    requests: dict[int, int]
    """Requests in all, by clients at once."""
    asked: Asked = field(default_factory=lambda: Asked(model="load", ignore_eos=True))


_SURPRISING = Asked(model="load", ignore_eos=True, max_tokens=96, temperature=1.2)
_REPEATING = Asked(model="load", ignore_eos=True, max_tokens=96)
LOADS = (
    Load("repeating", (BASE, "prompt lookup"), repeated, {1: 6, 16: 48}, _REPEATING),
    Load("not repeating", (BASE, "prompt lookup"), words, {1: 6, 16: 48}, _SURPRISING),
    Load("steps in flight", (BASE, "1 step in flight", "2 steps in flight"), words, {16: 64, 48: 144}),
    Load("long prompts among short ones", (BASE, "whole prompts"), long_and_short, {16: 64}),
)
QUICK_LOADS = tuple(Load(each.name, each.engines, each.texts, {1: 2, 8: 8}, each.asked) for each in LOADS[:2])


async def under_load(loads: Sequence[Load], rounds: int, folder: Path) -> dict[str, dict[str, dict[str, Row]]]:
    """Medians by load, clients and engine."""
    runs: dict[tuple[str, int, str], list[Row]] = {}
    async with contextlib.AsyncExitStack() as up:
        pods: dict[str, LocalPod] = {}
        for name in dict.fromkeys(engine for load in loads for engine in load.engines):
            print(f"  {name}: starting", flush=True)
            # One step table for all that compute the same: what differs is what is compared.
            pods[name] = await up.enter_async_context(ready_pod(service(name), folder / "step-times"))
        for number, load in itertools.product(range(rounds + 1), loads):
            engines = load.engines if number % 2 else load.engines[::-1]
            for (at_once, requests), name in itertools.product(load.requests.items(), engines):
                socket = pods[name].engine_socket
                async with Clients("http://engine", load.asked, uds=socket) as clients:
                    if not number:  # warm-up
                        await one_run(clients, at_once, at_once, seed=1, texts=load.texts)
                        continue
                    before = await counters(socket)
                    row = await one_run(clients, at_once, requests, seed=100 + number, texts=load.texts)
                    after = await counters(socket)
                row["outside_model_percent"] = outside_model_percent(before, after)
                for short, counter in (("drafted", "draft_tokens"), ("accepted", "accepted_draft_tokens")):
                    full = f"sluice_engine_{counter}_total"
                    row[f"{short}_tokens"] = after[full] - before[full]
                print(f"  {load.name}, {at_once} clients, {name}: {row}", flush=True)
                runs.setdefault((load.name, at_once, name), []).append(row)
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for (kind, at_once, name), rows in runs.items():
        found.setdefault(kind, {}).setdefault(str(at_once), {})[name] = medians(rows)
    return found


async def steps(variants: Sequence[Variant], rounds: int, folder: Path) -> dict[str, Any]:
    """Milliseconds of each cell by variant, medians."""
    measured = await measure(variants, CELLS, rounds, folder)
    return {
        variant.name: {"runs on": found.description}
        | {cell: round(statistics.median(times) / 1000, 2) for cell, times in found.samples_us.items()}
        for variant, found in zip(variants, measured, strict=True)
    }


def step_bars(found: dict[str, Any]) -> list[Bar]:
    """What is on by default has to be worth it."""
    own = found[VARIANTS[0].name]
    return [
        Bar(f"{cell}: {name}, of as it comes", found[name][cell] / own[cell], "×", 0.97, "higher")
        for name in ("kernels: none", "quantization: None", "Float32")
        if name in found
        for cell in ("decode 1", "decode 16", "prefill 512")
    ]


def load_bars(found: dict[str, dict[str, dict[str, Row]]]) -> list[Bar]:
    """Speculation may gain or switch itself off; the derived chunk keeps gaps; the engine waits for no host."""
    bars = []
    for kind, least in (("repeating", 1.0), ("not repeating", 0.97)):
        for at_once, rows in found.get(kind, {}).items():
            ratio = rows["prompt lookup"]["output_tokens_per_s"] / rows[BASE]["output_tokens_per_s"]
            bars.append(Bar(f"prompt lookup at {at_once}, {kind}, of the output without", ratio, "×", least, "higher"))
    if (most := found.get("steps in flight", {}).get("48")) is not None:
        share = most[BASE]["outside_model_percent"]
        bars.append(Bar("share of step time outside the model at 48 clients", share, "%", 5.0, "lower"))
    for rows in found.get("long prompts among short ones", {}).values():
        bars.append(Bar("gaps with the derived chunk, p99", rows[BASE]["itl_p99_ms"], "ms", 150.0, "lower"))
        ratio = rows["whole prompts"]["itl_p99_ms"] / rows[BASE]["itl_p99_ms"]
        bars.append(Bar("gaps with whole prompts, p99, of those", ratio, "×", 1.0, "higher"))
    bars.append(Bar("requests that failed", _failures(found), "", 0, "lower"))
    return bars


def _failures(found: dict[str, dict[str, dict[str, Row]]]) -> float:
    return sum(row["failures"] for kind in found.values() for rows in kind.values() for row in rows.values())


async def prefix(rounds: int) -> dict[str, Any]:
    """TTFT of a 1,000-token prompt, ms, cold and with all but its last tokens cached."""
    seen = await prefix_cache.measure(rounds)
    return {name: round(1000 * statistics.median(ttft_s for ttft_s, _ in rows), 1) for name, rows in seen.items()}


def main() -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=PARTS, action="append", help="a part; several may be named")

    args = arguments(__doc__ or "", options)
    wanted, rounds = args.only or PARTS, 1 if args.quick else ROUNDS
    report = Report("techniques")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "steps" in wanted:
            found = asyncio.run(steps(QUICK_VARIANTS if args.quick else VARIANTS, rounds, folder))
            report.data["steps_ms"] = found
            report.bars += step_bars(found)
        if "load" in wanted:
            loaded = asyncio.run(under_load(QUICK_LOADS if args.quick else LOADS, rounds, folder))
            report.data["load"] = loaded
            report.bars += load_bars(loaded)
        if "prefix" in wanted:
            report.data["prefix_ttft_ms"] = asyncio.run(prefix(3 if args.quick else prefix_cache.ROUNDS))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
