"""`sluice_engine_*`: series made at scrape time from what the engine's thread published last. It counts nothing itself.

Every name has its line in docs/metrics.md; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sluice_engine.core.state import HostState, LoadingProgress, PrefixState
from sluice_engine.live_file import LiveFile
from sluice_engine.serving.adapters import Adapters
from sluice_engine.serving.answer import ToolCallCounts
from sluice_engine.serving.counters import CountersCopy, HistogramCopy
from sluice_engine.serving.live_state import Identity
from sluice_engine.serving.publication import LoadedEngine, Publication
from sluice_engine.serving.service import EngineService
from sluice_engine.text.grammars import Grammars

PHASES = ("loading", "ready", "draining", "failed")


class EngineCollector(Collector):
    """The engine's series. Absent is a value: before the model is loaded there is no pool to report."""

    def __init__(self, service: EngineService, identity: Identity, version: str, live_file: LiveFile) -> None:
        self._service = service
        self._identity = identity
        self._version = version
        self._live_file = live_file

    def collect(self) -> Iterator[Metric]:
        """All series, from one published copy."""
        service = self._service
        yield _info("build", "Version of the engine.", {"version": self._version})
        yield _info("model", "The served model.", {"name": self._identity.served_name})
        phase = GaugeMetricFamily("sluice_engine_phase", "1 for the phase the engine is in.", labels=["phase"])
        for name in PHASES:
            phase.add_metric([name], float(service.phase == name))
        yield phase
        yield _gauge("hung", "1 while a step has outlived max(10 s, 20 x predicted).", float(service.hung()))
        yield _gauge("step_running_seconds", "How long the step in flight has run.", service.step_running_us() / 1e6)
        yield from _loading(service.progress)
        yield _live_changes(self._live_file)
        if service.engine is not None:
            yield from _limits(service.engine)
        if service.publication is not None:
            yield from _published(service.publication)
            yield from _prefix(service.publication.prefix)
            if service.publication.host is not None:
                yield from _swap(service.publication.host)
            yield from _counted(service.publication.counters)


class GrammarCollector(Collector):
    """Grammars of structured output."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def collect(self) -> Iterator[Metric]:
        """All of its series."""
        state = self._grammars.state()
        yield _gauge("grammar_waiting_requests", "Requests that wait for their grammar.", len(state.waiting))
        grammars = CounterMetricFamily(
            "sluice_engine_grammars", "Grammars asked for, by result (found, compiled, refused).", labels=["result"]
        )
        for result, count in (
            ("found", state.found_total), ("compiled", state.compiled_total), ("refused", state.refused_total)
        ):  # fmt: skip
            grammars.add_metric([result], count)
        yield grammars
        yield _counter("grammar_compile_seconds", "CPU time of compiling grammars.", state.compile_us_total / 1e6)


class ToolCallCollector(Collector):
    """Calls that answers made."""

    def __init__(self, calls: ToolCallCounts) -> None:
        self._calls = calls

    def collect(self) -> Iterator[Metric]:
        """The one of its series."""
        calls = CounterMetricFamily(
            "sluice_engine_tool_calls", "Tool calls of answers that ended, by outcome.", labels=["outcome"]
        )
        calls.add_metric(["complete"], self._calls.complete)
        calls.add_metric(["incomplete"], self._calls.incomplete)
        yield calls


class AdapterCollector(Collector):
    """LoRA adapters. Their names are no labels: they come and go as callers please."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        """All of its series."""
        state = self._adapters.state()
        loaded = GaugeMetricFamily(
            "sluice_engine_adapters", "LoRA adapters in memory, by status (served, retiring).", labels=["status"]
        )
        num_retiring = sum(adapter.retiring for adapter in state)
        loaded.add_metric(["served"], len(state) - num_retiring)
        loaded.add_metric(["retiring"], num_retiring)
        yield loaded
        yield _gauge("adapter_bytes", "Memory of LoRA adapters.", sum(adapter.num_bytes for adapter in state))


def register(
    registry: CollectorRegistry, service: EngineService, identity: Identity, version: str, live_file: LiveFile
) -> None:
    """Add the engine's series to a registry."""
    registry.register(EngineCollector(service, identity, version, live_file))


def _loading(progress: LoadingProgress) -> Iterator[Metric]:
    yield _gauge("loading_bytes", "Bytes of the model downloaded, then loaded, so far.", progress.bytes_done)
    yield _gauge("loading_total_bytes", "Bytes to download, then to load.", progress.bytes_total)


def _live_changes(file: LiveFile) -> Metric:
    text = "Changes of live.json while the engine ran, by what became of them (applied, refused)."
    changes = CounterMetricFamily("sluice_engine_live_config_changes", text, labels=["result"])
    changes.add_metric(["applied"], file.applied_total)
    changes.add_metric(["refused"], file.refused_total)
    return changes


def _limits(engine: LoadedEngine) -> Iterator[Metric]:
    derived = engine.tuning.current.derived
    ranks = GaugeMetricFamily("sluice_engine_rank_bytes", "Weights and KV pool of a rank.", labels=["rank"])
    for rank, num_bytes in enumerate(engine.rank_bytes):
        ranks.add_metric([str(rank)], num_bytes)
    yield ranks
    yield _gauge("slo_feasible", "1 when the promise can be kept by the measured step times.", float(derived.feasible))
    yield _gauge("prefill_chunk_ceiling_tokens", "Most prefill tokens beside decodes.", derived.chunk_ceiling_tokens)
    yield _gauge("token_budget_tokens", "Most tokens of one step.", derived.token_budget)
    yield _gauge("max_sequences", "Most requests that run at once.", derived.max_sequences)
    learned = engine.tuning.learned_steps_total
    yield _counter("learned_steps", "Steps that the step-time table has learned from.", learned)
    tail_ratio = engine.tuning.tail_ratio
    yield _gauge("step_tail_ratio", "Step time that the promise is held against, over the median.", tail_ratio)


def _published(published: Publication) -> Iterator[Metric]:
    pool = published.pool
    requests = GaugeMetricFamily("sluice_engine_requests", "Requests in the engine by status.", labels=["status"])
    requests.add_metric(["running"], published.running_requests)
    requests.add_metric(["waiting"], published.waiting_requests)
    yield requests
    yield _gauge("waiting_tokens", "Tokens of waiting requests still to be computed.", published.waiting_tokens)
    yield _gauge("kv_blocks", "KV blocks of the pool.", pool.total_blocks)
    yield _gauge("kv_free_blocks", "KV blocks that no request holds, cached ones included.", pool.free_blocks)
    yield _gauge("kv_cached_blocks", "Free KV blocks whose content can still be shared.", pool.cached_blocks)
    yield _gauge("kv_block_tokens", "Tokens whose KV one block holds.", pool.block_tokens)
    yield _gauge("kv_fenced_blocks", "Freed KV blocks that wait for a step in flight.", published.fenced_blocks)
    optimistic = published.optimistic_blocks
    yield _gauge("kv_optimistic_blocks", "KV blocks taken for tokens that follow tokens in flight.", optimistic)
    yield _counter("steps", "Steps planned.", published.step)
    yield _counter("stale_results", "Results that came for a request that was gone.", published.stale_results_total)
    yield _counter("scheduler_faults", "Impossible states, each contained to one request.", published.faults_total)
    yield _counter("failed_steps", "Steps that the device failed.", published.failed_steps_total)
    yield _counter("preemptions", "Requests preempted to free KV blocks.", published.preemptions_total)
    by_class = published.class_preemptions_total
    yield _counter("class_preemptions", "Requests preempted to let in one of a higher class.", by_class)
    yield _counter("recomputed_tokens", "Tokens whose KV was dropped by preemption.", published.recomputed_tokens_total)
    accepted = published.accepted_draft_tokens_total
    yield _counter("draft_tokens", "Guessed tokens that were computed.", published.draft_tokens_total)
    yield _counter("accepted_draft_tokens", "Guessed tokens that became output.", accepted)
    yield _gauge("step_predicted_seconds", "Predicted time of the last step.", published.last_predicted_us / 1e6)
    yield _gauge("step_real_seconds", "Real time of the last step.", published.last_real_us / 1e6)
    yield _counter("runner_seconds", "Time in the model's steps.", published.runner_us_total / 1e6)
    overhead_us = published.host_us_total + published.counters.delivery_us
    yield _counter("loop_overhead_seconds", "Time of the loop outside the model.", overhead_us / 1e6)


def _prefix(prefix: PrefixState) -> Iterator[Metric]:
    queried, found = prefix.queried_tokens_total, prefix.hit_tokens_total
    yield _counter("prefix_queried_tokens", "Prompt tokens of requests that entered the batch.", queried)
    yield _counter("prefix_hit_tokens", "Of those, tokens whose KV was there already.", found)
    yield _counter("prefix_hits", "Requests that found a part of their prompt computed.", prefix.hits_total)
    resumed, dropped = prefix.resumed_tokens_total, prefix.dropped_blocks_total
    yield _counter("prefix_resumed_tokens", "Tokens that preempted requests found computed on their return.", resumed)
    yield _counter("prefix_dropped_blocks", "Cached KV blocks that made room for others.", dropped)


def _swap(host: HostState) -> Iterator[Metric]:
    yield _gauge("swap_blocks", "KV blocks that host memory holds for preempted requests.", host.total_blocks)
    yield _gauge("swap_free_blocks", "Of those, blocks that are free.", host.free_blocks)
    yield _counter("swap_requests", "Preempted requests whose KV was kept in host memory.", host.swaps_total)
    yield _counter("swap_out_blocks", "KV blocks copied to host memory.", host.blocks_out_total)
    yield _counter("swap_in_blocks", "KV blocks copied back.", host.blocks_in_total)


def _counted(counters: CountersCopy) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Prompt tokens of requests that got their first token.", counters.prompt_tokens)
    yield _counter("output_tokens", "Tokens sampled for callers.", counters.output_tokens)
    outcomes = CounterMetricFamily("sluice_engine_requests_ended", "Requests ended, by outcome.", labels=["outcome"])
    for outcome, count in counters.outcomes.items():
        outcomes.add_metric([outcome], count)
    yield outcomes
    yield _histogram("step_duration_seconds", "Time of a step on the device.", counters.step)
    yield _histogram("time_to_first_token_seconds", "From arrival in the engine to the first token.", counters.ttft)
    yield _histogram("inter_token_latency_seconds", "Between two tokens of one request.", counters.itl)
    yield _histogram("queue_time_seconds", "From arrival in the engine to the first step.", counters.queue)


def _info(name: str, documentation: str, value: dict[str, str]) -> Metric:
    return InfoMetricFamily(f"sluice_engine_{name}", documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"sluice_engine_{name}", documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"sluice_engine_{name}", documentation, value=value)


def _histogram(name: str, documentation: str, copy: HistogramCopy) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*copy.bounds_us, None), copy.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else f"{bound / 1e6:g}", total))
    return HistogramMetricFamily(f"sluice_engine_{name}", documentation, buckets=buckets, sum_value=copy.sum_us / 1e6)
