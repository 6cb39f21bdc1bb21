"""Several runs of one scenario side by side: one number a run, for each value of one or two keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_simulator.report import Json

SCHEMA = "sluice.dev/sweep/1"


@dataclass(frozen=True, slots=True)
class Axis:
    """A key and the values that it is set to."""

    key: str
    values: Sequence[Any]


def document(axes: Sequence[Axis], runs: Sequence[tuple[dict[str, Any], Json]]) -> Json:
    """All runs, each with the values that were set."""
    return {
        "schema": SCHEMA,
        "scenario": runs[0][1]["scenario"],
        "axes": [{"key": axis.key, "values": list(axis.values)} for axis in axes],
        "runs": [
            {"set": at, **{key: value for key, value in run.items() if key not in {"timeline", "schema", "scenario"}}}
            for at, run in runs
        ],
    }


def lines_of(found: Json) -> Iterator[tuple[Any, list[Json]]]:
    """Runs by the value of the second key, each in order of the first; all under None where only one key is swept."""
    if len(found["axes"]) == 1:
        yield None, found["runs"]
        return
    second = found["axes"][1]
    for value in second["values"]:
        yield value, [run for run in found["runs"] if run["set"][second["key"]] == value]


def text(found: Json) -> list[str]:
    """One row a run."""
    keys = [axis["key"] for axis in found["axes"]]
    header = [*keys, "good/s", "good %", "TTFT p50", "p99", "gap p50", "p99", "refused", "preempted", "busy %"]
    rows = [header]
    for run in found["runs"]:
        total = run["total"]
        ttft, itl = total["ttft_ms"] or {}, total["itl_ms"] or {}
        rows.append([
            *(str(run["set"][key]) for key in keys),
            f"{total['goodput_per_second']:.2f}",
            f"{total['good_percent']:.1f}",
            *(f"{one.get(key, 0):,.0f}" for one in (ttft, itl) for key in ("p50", "p99")),
            f"{sum(total['refusals'].values()):,}",
            f"{run['engine']['preemptions']:,}",
            f"{run['engine']['busy_percent']:.0f}",
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return [
        f"{found['scenario']}: times in ms",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
    ]
