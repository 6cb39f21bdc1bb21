"""A closed loop of clients against one server and what it gives, for benchmarks that compare several in turn."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sluice_operator.bench import prompts
from sluice_operator.bench.answers import Answer, Promise, figures
from sluice_operator.bench.clients import Clients

Row = dict[str, float]
"""Figures of one run, by name."""
Texts = Callable[[int], Iterator[str]]
"""Prompts without an end, by a seed."""


def words(seed: int) -> Iterator[str]:
    """Prompts of 32 to 256 words."""
    return prompts.drawn(seed, 32, 256)


async def one_run(
    clients: Clients, at_once: int, requests: int, seed: int, promise: Promise | None = None, texts: Texts = words
) -> Row:
    """`requests` by so many clients, each with its next when the last has ended; times in ms."""
    seen: list[Answer] = []
    started = time.monotonic()
    await clients.closed_loop(itertools.islice(texts(seed), requests), at_once, seen)
    found = figures(seen, time.monotonic() - started, promise)
    row = {
        "output_tokens_per_s": found.output_tokens_per_s,
        "prompt_tokens_per_s": found.prompt_tokens_per_s,
        "requests": float(found.requests),
        "failures": float(found.requests - found.whole),
    }
    if found.good is not None:
        row["gaps_kept_percent"] = round(100 * found.good / max(1, found.requests), 1)
    for name, spread in (("ttft", found.ttft_ms), ("itl", found.gap_ms)):
        if spread is not None:
            row |= {f"{name}_p50_ms": spread.p50, f"{name}_p99_ms": spread.p99, f"{name}_max_ms": spread.max}
    return row


async def counters(socket_path: str) -> dict[str, float]:
    """The engine's metrics by name, those with labels left out."""
    connector = aiohttp.UnixConnector(socket_path)
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://engine/metrics") as answer:
        page = await answer.text()
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if not sample.labels}


def outside_model_percent(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The share of step time outside the model between two looks at an engine's counters."""
    names = "sluice_engine_runner_seconds_total", "sluice_engine_loop_overhead_seconds_total"
    model, beside = (after[name] - before[name] for name in names)
    return 100 * beside / (model + beside)


def medians(rows: Sequence[Row]) -> Row:
    """Of each figure over the rounds."""
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[0]}
