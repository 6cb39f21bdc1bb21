"""What a soaked pod is held against: growth from idle to idle and by its slope, what is left, and what was answered."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from report import Bar
from sluice_engine.core.state import EngineState
from soak_clients import Tally
from soak_process import Held, slope

PROGRAMS = ("gate", "engine")
SAMPLE_EVERY_S = 5.0
# A process that has just begun still fills what it keeps: below this many minutes nothing is said of growth.
LEAST_MINUTES = 10.0
# Of some 1,300 MiB of engine and 60 of gate, in a few thousand calls: ten kilobytes left behind by each call of the one
# or half a kilobyte by each of the other are more.
MOST_GROWTH_PERCENT = 2.0
MIB = 2**20


@dataclass(slots=True)
class Soaked:
    """All that was seen of one pod."""

    minutes: float
    tally: Tally = field(default_factory=Tally)
    times_s: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """How many had ended at each of these times."""
    samples: dict[str, list[Held]] = field(default_factory=lambda: {program: [] for program in PROGRAMS})
    idle: list[dict[str, Held]] = field(default_factory=list)
    """After the warm-up, and at the end."""
    left: dict[str, float] = field(default_factory=dict)
    """What must be 0 at the end."""
    figures: dict[str, float] = field(default_factory=dict)
    """Both programs' metrics without labels, at the end."""


def judged(seen: Soaked, engine: EngineState) -> tuple[list[Bar], dict[str, Any]]:
    """Bars and data."""
    growth, data = _growth(seen)
    data |= {
        "minutes": seen.minutes,
        "left": seen.left,
        "outcomes": dict(sorted(seen.tally.outcomes.items())),
        "statuses": {str(status): count for status, count in sorted(seen.tally.statuses.items())},
        "problems": seen.tally.problems,
        "counters": {name: value for name, value in seen.figures.items() if name.endswith("_total")},
    }
    if seen.minutes < LEAST_MINUTES:
        print(f"  growth is judged from {LEAST_MINUTES:g} minutes on")
        growth = []
    return growth + _kept(seen) + _happened(seen.tally, engine, seen.figures), data


def _growth(seen: Soaked) -> tuple[list[Bar], dict[str, Any]]:
    bars = []
    before, after = seen.idle
    data: dict[str, Any] = {"idle_before": {}, "idle_after": {}, "slopes": {}, "per_minute": {}}
    data["calls_per_minute"] = seen.calls[:: round(60 / SAMPLE_EVERY_S)]
    hours = (seen.times_s[-1] - seen.times_s[0]) / 3600
    for program in PROGRAMS:
        samples, first, last = seen.samples[program], before[program], after[program]
        data["idle_before"][program], data["idle_after"][program] = asdict(first), asdict(last)
        data["per_minute"][program] = _per_minute(samples)
        for name, field_name in (("RSS", "rss_bytes"), ("anonymous memory", "anonymous_bytes")):
            values = [getattr(one, field_name) for one in samples]
            found, middle = slope(seen.times_s, values), statistics.median(values)
            data["slopes"][f"{program} {name}"] = {
                "MiB_per_hour": round(found.per_hour / MIB, 2), "low": round(found.low / MIB, 2),
                "high": round(found.high / MIB, 2), "median_MiB": round(middle / MIB, 1),
            }  # fmt: skip
            by_slope = 100 * found.per_hour * hours / middle
            idle = 100 * (getattr(last, field_name) / getattr(first, field_name) - 1)
            bars += [
                Bar(f"{program}: growth of {name} under load", by_slope, "%", MOST_GROWTH_PERCENT, "lower"),
                Bar(f"{program}: growth of {name} from idle to idle", idle, "%", MOST_GROWTH_PERCENT, "lower"),
            ]
        more = Counter(last.descriptors)
        more.subtract(first.descriptors)
        print(f"  {program}: descriptors before {first.descriptors}, after {last.descriptors}")
        bars += [
            Bar(f"{program}: descriptors more than before, by kind", sum(map(abs, (+more).values())), "", 0, "lower"),
            Bar(f"{program}: threads more than before", last.threads - first.threads, "", 0, "lower"),
        ]
    return bars, data


def _kept(seen: Soaked) -> list[Bar]:
    """What has to be 0."""
    figures, statuses = seen.figures, seen.tally.statuses
    faults = sum(figures[f"engine_{name}_total"] for name in ("scheduler_faults", "failed_steps"))
    twice = figures["gate_double_closes_total"] + figures["gate_leases_expired_total"]
    errors = sum(count for status, count in statuses.items() if status >= 500 and status != 504)
    return [
        *(Bar(f"at the end: {name}", value, "", 0, "lower") for name, value in seen.left.items()),
        Bar("answers of 500 and above, without missed deadlines", errors, "", 0, "lower"),
        Bar("answers that were not as they have to be", seen.tally.num_problems, "", 0, "lower"),
        Bar("faults and failed steps of the engine", faults, "", 0, "lower"),
        Bar("closed twice, or by the lease", twice, "", 0, "lower"),
    ]


def _happened(tally: Tally, engine: EngineState, figures: dict[str, float]) -> list[Bar]:
    """That there was what the load is for."""
    assert engine.grammars is not None
    assert engine.prefix is not None
    assert engine.host is not None
    counts = {
        "preemptions": engine.preemptions_total,
        "requests kept on the host": engine.host.swaps_total,
        "guesses that came true": figures["engine_accepted_draft_tokens_total"],
        "grammars compiled": engine.grammars.compiled_total,
        "requests that found their beginning computed": engine.prefix.hits_total,
        "adapters loaded and unloaded": tally.outcomes["adapter: unload done"],
        "clients that left": tally.outcomes["left"],
        "refusals for load": tally.statuses[429],
    }
    return [Bar(f"seen: {name}", value, "", 1, "higher") for name, value in counts.items()]


def _per_minute(samples: list[Held]) -> list[dict[str, float]]:
    step = round(60 / SAMPLE_EVERY_S)
    return [
        {
            "rss_MiB": round(statistics.median(one.rss_bytes for one in part) / MIB, 1),
            "pss_MiB": round(statistics.median(one.pss_bytes for one in part) / MIB, 1),
            "anonymous_MiB": round(statistics.median(one.anonymous_bytes for one in part) / MIB, 1),
            "descriptors": statistics.median(one.num_descriptors for one in part),
            "threads": statistics.median(one.threads for one in part),
        }
        for part in (samples[at : at + step] for at in range(0, len(samples), step))
    ]
