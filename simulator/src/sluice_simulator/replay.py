"""`--from RECORD`: the recorded requests as a load, and how far the simulation of them is off.

Owns the scenario that a record stands for, and the comparison of a run with what was recorded. Next: `retrace.py` for
the plans, `run.py` for the times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice_operator.resource.units import parse_quantity_bytes
from sluice_simulator.errors import InvalidInput
from sluice_simulator.histogram import Histogram
from sluice_simulator.record import Record
from sluice_simulator.recorded import GOOD_ENDS
from sluice_simulator.report import Json

_QUANTILES = (50, 99)


def document_of(record: Record) -> dict[str, Any]:
    """The scenario that a record stands for by itself.

    Raises:
        InvalidInput: it does not hold what that takes.
    """
    missing = [name for name in ("service", "table") if getattr(record, name) is None]
    if record.engine is None or record.engine.pool is None:
        missing.append("state")
    if missing:
        problem = f"holds no {missing[0]}: name a SCENARIO that has it, or have `sluice record` write the file"
        raise InvalidInput(record.file, "", problem)
    assert record.engine is not None  # for the type checker: said above
    assert record.engine.pool is not None
    pool = record.engine.pool
    return {
        "name": Path(record.file).stem,
        "service": record.service,
        "machine": {
            "stepTimes": {"record": str(Path(record.file).resolve())},
            "noisePercent": 0,
            "kvCapacityTokens": pool.total_blocks * pool.block_tokens,
            "maxLengthTokens": record.engine.max_length_tokens,
            **_host(record, pool.block_tokens),
        },
    }


def _host(record: Record, block_tokens: int) -> dict[str, Any]:
    """The host pool and the link that the engine had, as a scenario says them."""
    assert record.engine is not None  # for the type checker: its caller looked
    host = record.engine.host
    if host is None or not host.total_blocks:
        return {}
    cache = (record.service or {}).get("spec", {}).get("cache", {})
    swap_bytes = parse_quantity_bytes(cache.get("hostSwapCapacity", ""), "spec.cache.hostSwapCapacity")
    return {
        # Not what a token takes, but what gives as many blocks again.
        "kvBytesPerToken": swap_bytes // (host.total_blocks * block_tokens),
        "link": {
            "fixedMicroseconds": host.link_fixed_us,
            "outNanosecondsPerBlock": host.link_out_ns_per_block,
            "inNanosecondsPerBlock": host.link_in_ns_per_block,
        },
    }


def with_record(document: dict[str, Any], record: Record) -> dict[str, Any]:
    """A scenario under the record's load: straight into the engine, since only what the gate let in is recorded."""
    arrivals = {"record": {"file": str(Path(record.file).resolve())}}
    kept = {key: value for key, value in document.items() if key not in {"loads", "duration", "warmup"}}
    return {"gate": "Disabled", **kept, "loads": [{"name": "record", "arrivals": arrivals, "retries": {"most": 0}}]}


def measured(record: Record) -> Json:
    """What was recorded, in the words of a report."""
    ended = [one for one in record.requests if one.outcome in GOOD_ENDS and one.first_token_us >= 0]
    ttft, latency = Histogram(), Histogram()
    for one in ended:
        ttft.add(max(0, one.first_token_us - one.arrival_us))
        latency.add(max(0, one.ended_us - one.arrival_us))
    start_us = min(one.queued_us for one in record.requests)
    span_s = max(1, max(one.ended_us for one in record.requests) - start_us) / 1e6
    tokens = sum(one.output_tokens for one in ended)
    return {
        "requests": len(ended),
        **{f"ttft_p{percent}_ms": _ms(ttft.quantile_us(percent)) for percent in _QUANTILES},
        **{f"latency_p{percent}_ms": _ms(latency.quantile_us(percent)) for percent in _QUANTILES},
        "output_tokens_per_second": round(tokens / span_s, 1),
    }


def predicted(found: Json) -> Json:
    """The same figures of a run of it."""
    total = found["total"]
    ttft, latency = total["ttft_ms"] or {}, total["latency_ms"] or {}
    return {
        "requests": total["outcomes"].get("finished", 0),
        **{f"ttft_p{percent}_ms": ttft.get(f"p{percent}", 0.0) for percent in _QUANTILES},
        **{f"latency_p{percent}_ms": latency.get(f"p{percent}", 0.0) for percent in _QUANTILES},
        "output_tokens_per_second": total["output_tokens_per_second"],
    }


def error_percent(real: Json, simulated: Json) -> Json:
    """How far each figure of the simulation is off, in percent of the recorded one."""
    return {key: round(100 * (simulated[key] - value) / value, 1) if value else 0.0 for key, value in real.items()}


def text(compared: Json) -> list[str]:
    """The comparison in lines for a terminal."""
    plans = compared["plans"]
    lines = [f"  {'plans':<14} {plans['same']:,} of {plans['compared']:,} recorded steps planned the same"]
    if plans["difference"]:
        lines.append(f"  {'':<14} {plans['difference']}")
    columns = [name for name in ("recorded", "simulated", "error_percent", "changed") if name in compared]
    rows = [["", *(name.replace("_", " ") for name in columns)]]
    rows += [[key, *(f"{compared[name][key]:,.1f}" for name in columns)] for key in compared["recorded"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"  {row[0]:<{widths[0]}}  {cells}")
    return lines


def _ms(microseconds: int | None) -> float:
    return round((microseconds or 0) / 1000, 3)
