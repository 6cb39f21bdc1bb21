"""A run's numbers as one JSON document, and as sentences for a terminal. Equal runs give equal bytes.

Owns names, units and rounding. `plot` and `page` draw what stands here.
"""

from __future__ import annotations

from typing import Any

from sluice_simulator.histogram import Histogram
from sluice_simulator.run import Finished
from sluice_simulator.scenario import Scenario
from sluice_simulator.tally import LoadTally
from sluice_simulator.timeline import Slice
from sluice_simulator.workload import Replay

Json = dict[str, Any]
SCHEMA = "sluice.dev/simulation/1"
_QUANTILES = (50, 90, 99)


def document(outcome: Finished) -> Json:
    """Everything that a run can be asked."""
    scenario, tally = outcome.scenario, outcome.tally
    slo, window_s = scenario.spec.live.slo, scenario.window_us / 1e6
    total = _total(list(tally.loads.values()))
    span_us = max(1, max(tally.last_end_us, scenario.end_us) - scenario.warmup_us)
    schedulers = [replica.loop.scheduler for replica in outcome.replicas]
    blocks = scenario.machine.capacity.num_blocks
    return {
        "schema": SCHEMA,
        "scenario": scenario.name,
        "seed": scenario.seed,
        "replicas": scenario.spec.replicas,
        "router": scenario.router,
        "gate": "Enabled" if scenario.has_gate else "Disabled",
        "step_times": scenario.machine.times_source,
        "promise": {
            "time_to_first_token_ms": _ms(slo.time_to_first_token_us),
            "inter_token_latency_ms": _ms(slo.inter_token_latency_us),
            "target_percent": slo.target_percent,
            "feasible": outcome.derived.feasible,
            "reason": outcome.derived.reason,
        },
        "derived": {
            "chunk_ceiling_tokens": outcome.derived.chunk_ceiling_tokens,
            "token_budget": outcome.derived.token_budget,
            "max_sequences": outcome.derived.max_sequences,
            "kv_capacity_tokens": outcome.derived.kv_capacity_tokens,
        },
        "window_s": round(window_s, 3),
        "total": _load(total, window_s, span_us / 1e6),
        "loads": {name: _load(load, window_s, span_us / 1e6) for name, load in tally.loads.items()},
        "left_out": _left_out(scenario),
        "engine": {
            "steps": tally.steps,
            "empty_plans": tally.empty_steps,
            "busy_percent": _percent(tally.busy_us, max(1, tally.last_end_us) * len(schedulers)),
            "largest_batch": tally.batch_most,
            "largest_kv_percent": _percent(tally.used_blocks_most, blocks),
            "preemptions": sum(scheduler.preemptions_total for scheduler in schedulers),
            "recomputed_tokens": sum(scheduler.recomputed_tokens_total for scheduler in schedulers),
        },
        "door_wait_ms": _quantiles(tally.door_wait),
        "timeline": _timeline(outcome, blocks),
    }


def _left_out(scenario: Scenario) -> dict[str, int]:
    """By load, requests of its trace that had produced nothing."""
    traces = {load.name: load.source.trace for load in scenario.loads if isinstance(load.source, Replay)}
    return {name: trace.skipped for name, trace in traces.items() if trace.skipped}


def _total(loads: list[LoadTally]) -> LoadTally:
    total = LoadTally()
    for load in loads:
        for name in ("requests", "attempts", "good", "missed_ttft", "missed_itl", "missed_deadline",
                     "prompt_tokens", "output_tokens"):  # fmt: skip
            setattr(total, name, getattr(total, name) + getattr(load, name))
        total.outcomes += load.outcomes
        total.refusals += load.refusals
        for name in ("ttft", "ttft_with_retries", "gaps", "latency"):
            getattr(total, name).merge(getattr(load, name))
    return total


def _load(load: LoadTally, window_s: float, span_s: float) -> Json:
    return {
        "requests": load.requests,
        "requests_per_second": round(load.requests / window_s, 3),
        "attempts": load.attempts,
        "outcomes": dict(sorted(load.outcomes.items())),
        "refusals": dict(sorted(load.refusals.items())),
        "good": load.good,
        "good_percent": _percent(load.good, max(1, load.requests)),
        "goodput_per_second": round(load.good / window_s, 3),
        "missed": {"ttft": load.missed_ttft, "itl": load.missed_itl, "deadline": load.missed_deadline},
        "ttft_ms": _quantiles(load.ttft),
        "ttft_with_retries_ms": _quantiles(load.ttft_with_retries),
        "itl_ms": _quantiles(load.gaps),
        "latency_ms": _quantiles(load.latency),
        "prompt_tokens_per_second": round(load.prompt_tokens / span_s, 1),
        "output_tokens_per_second": round(load.output_tokens / span_s, 1),
    }


def _quantiles(histogram: Histogram) -> Json | None:
    if not histogram.count:
        return None
    found: Json = {f"p{percent}": _ms(histogram.quantile_us(percent) or 0) for percent in _QUANTILES}
    return {**found, "max": _ms(histogram.max_us), "mean": _ms(round(histogram.sum_us / histogram.count))}


def _timeline(outcome: Finished, blocks: int) -> Json:
    timeline = outcome.tally.timeline
    width_us, replicas = timeline.width_us, len(outcome.replicas)
    whole_us, width_s = width_us * replicas, width_us / 1e6

    def column(value: Any) -> list[float]:  # noqa: ANN401  # a function of a slice
        return [round(value(one), 3) for one in timeline.slices]

    def at(one: Slice, name: str) -> float:
        return float(getattr(one, name))

    return {
        "slice_s": round(width_s, 6),
        "batch": column(lambda one: at(one, "running_us") / whole_us),
        "waiting": column(lambda one: at(one, "waiting_us") / whole_us),
        "door": column(lambda one: at(one, "door")),
        "kv_percent": column(lambda one: 100 * at(one, "used_us") / (whole_us * blocks)),
        "prefill_tokens_per_second": column(lambda one: at(one, "prefill_tokens") / width_s),
        "decode_tokens_per_second": column(lambda one: at(one, "decode_tokens") / width_s),
        "arrived_per_second": column(lambda one: at(one, "arrived") / width_s),
        "refused_per_second": column(lambda one: at(one, "refused") / width_s),
        "good_per_second": column(lambda one: at(one, "good") / width_s),
        "preempted": column(lambda one: at(one, "preempted")),
    }


def text(found: Json) -> list[str]:
    """The document in lines for a terminal."""
    promise, derived, engine, total = found["promise"], found["derived"], found["engine"], found["total"]
    pods = "1 replica" if found["replicas"] == 1 else f"{found['replicas']} replicas, {found['router']}"
    offered = f"{total['requests']:,} requests in {found['window_s']:,.0f} s"
    lines = [f"{found['scenario']}: {offered} on {pods}, seed {found['seed']}"]

    def tell(subject: str, words: str) -> None:
        lines.append(f"  {subject:<14} {words}")

    tell(
        "promise",
        f"first token in {promise['time_to_first_token_ms']:,.0f} ms, "
        f"gaps of {promise['inter_token_latency_ms']:,.0f} ms, at {promise['target_percent']:g} %",
    )
    if not promise["feasible"]:
        tell("infeasible", promise["reason"])
    tell("step times", found["step_times"])
    tell(
        "limits",
        f"{derived['max_sequences']:,} requests, {derived['token_budget']:,} tokens a step, chunk of "
        f"{derived['chunk_ceiling_tokens']:,} beside a decode, {derived['kv_capacity_tokens']:,} tokens of KV",
    )
    for name, load in found["loads"].items():
        lines += _load_lines(name, load)
    for name, count in found["left_out"].items():
        tell("left out", f"{count:,} requests of the trace of {name}: they had produced nothing")
    if len(found["loads"]) > 1:
        lines += _load_lines("all", total)
    tell(
        "engine",
        f"{engine['steps']:,} steps, busy {engine['busy_percent']:.0f} %, at most {engine['largest_batch']:,} requests "
        f"and {engine['largest_kv_percent']:.0f} % of the KV cache, {engine['preemptions']:,} preemptions",
    )
    return lines


def _load_lines(name: str, load: Json) -> list[str]:
    goodput = (
        f"{load['goodput_per_second']:,.2f} good requests/s ({load['good_percent']:.1f} % of {load['requests']:,})"
    )
    missed = ", ".join(f"{count:,} missed {what}" for what, count in load["missed"].items() if count)
    lines = [f"  {name:<14} {goodput}{f'; {missed}' if missed else ''}"]
    for what, words in (("ttft_ms", "first token"), ("itl_ms", "gaps"), ("latency_ms", "whole answer")):
        if (one := load[what]) is not None:
            spread = ", ".join(f"{key} {one[key]:,.0f}" for key in ("p50", "p90", "p99", "max"))
            lines.append(f"  {'':<14} {words}: {spread} ms")
    ends = ", ".join(f"{count:,} {outcome}" for outcome, count in load["outcomes"].items())
    tokens = (
        f"{load['prompt_tokens_per_second']:,.0f} prompt and {load['output_tokens_per_second']:,.0f} output tokens/s"
    )
    lines.append(f"  {'':<14} {ends}; {tokens}")
    if load["refusals"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in load["refusals"].items())
        retries = load["attempts"] - load["requests"]
        lines.append(f"  {'':<14} turned away at the door: {reasons}; {retries:,} retries")
    return lines


def _ms(microseconds: int) -> float:
    return round(microseconds / 1000, 3)


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3)
