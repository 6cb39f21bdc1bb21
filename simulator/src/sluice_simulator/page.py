"""One HTML page that holds everything and loads nothing: the text, lines as SVG, the document itself as JSON."""

from __future__ import annotations

import html as escape
import json
from collections.abc import Iterator, Sequence

from sluice_simulator import report, sweep
from sluice_simulator.report import Json

_WIDTH, _HEIGHT, _MARGIN = 900, 180, 56
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a7e8c")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
pre { background: #f6f8fa; padding: 1rem; overflow-x: auto; } h2 { margin-top: 2rem; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #57606a; }
"""

Line = tuple[str, Sequence[float]]


def html(found: Json) -> str:
    """The page of a report or a sweep."""
    is_run = "timeline" in found
    title = f"{found['scenario']}: {'simulation' if is_run else 'sweep'}"
    lines = report.text(found) if is_run else sweep.text(found)
    charts = _run_charts(found) if is_run else _sweep_charts(found)
    # "</" would end the script element early, whatever it stands in.
    data = json.dumps(found).replace("</", "<\\/")
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape.escape(title)}</title>',
        f"<style>{_STYLE}</style></head>",
        f"<body><h1>{escape.escape(title)}</h1>",
        f"<pre>{escape.escape(chr(10).join(lines))}</pre>",
        *charts,
        f'<script type="application/json" id="data">{data}</script>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _run_charts(found: Json) -> Iterator[str]:
    timeline = found["timeline"]
    xs = [index * timeline["slice_s"] for index in range(len(timeline["batch"]))]
    for title, names in (
        ("Batch and queue: requests", (("batch", "running"), ("waiting", "waiting"), ("door", "at the door"))),
        ("KV cache in use: %", (("kv_percent", "KV"),)),
        ("Tokens a second", (("prefill_tokens_per_second", "prefill"), ("decode_tokens_per_second", "decode"))),
        (
            "Requests a second",
            (("arrived_per_second", "arrived"), ("good_per_second", "good"), ("refused_per_second", "refused")),
        ),
        ("Preemptions", (("preempted", "preempted"),)),
    ):
        if title != "Preemptions" or any(timeline["preempted"]):
            yield f"<h2>{title}</h2>" + chart(xs, [(label, timeline[key]) for key, label in names], "s")


def _sweep_charts(found: Json) -> Iterator[str]:
    first = found["axes"][0]
    values = first["values"]
    is_numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    xs = [float(value) for value in values] if is_numeric else [float(index) for index in range(len(values))]
    labels = [str(value) for value in values]
    for title, path in (
        ("Goodput: good requests a second", ("goodput_per_second",)),
        ("Good requests: %", ("good_percent",)),
        ("First token, p99: ms", ("ttft_ms", "p99")),
        ("Gap between tokens, p99: ms", ("itl_ms", "p99")),
    ):
        lines: list[Line] = [
            (title.partition(":")[0] if value is None else str(value), [_at(run["total"], path) for run in runs])
            for value, runs in sweep.lines_of(found)
        ]
        yield f"<h2>{title}</h2>" + chart(xs, lines, first["key"], labels)


def _at(total: Json, path: Sequence[str]) -> float:
    found: object = total
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, (int, float)) else 0.0


def chart(xs: Sequence[float], lines: Sequence[Line], x_name: str, labels: Sequence[str] = ()) -> str:
    """Lines over a common axis, as SVG."""
    low, high = xs[0], max(xs[-1], xs[0] + 1e-9)
    most = max((max(ys, default=0.0) for _, ys in lines), default=0.0) or 1.0
    right, bottom = _WIDTH - 8, _HEIGHT - 24

    def x(value: float) -> float:
        return round(_MARGIN + (value - low) / (high - low) * (right - _MARGIN), 1)

    def y(value: float) -> float:
        return round(bottom - value / most * (bottom - 24), 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for share in (0.0, 0.5, 1.0):
        level = y(share * most)
        parts += [
            f'<line x1="{_MARGIN}" x2="{right}" y1="{level}" y2="{level}" stroke="#d0d7de"/>',
            f'<text x="{_MARGIN - 6}" y="{level + 4}" text-anchor="end">{share * most:,.4g}</text>',
        ]
    ticks = (
        list(zip(xs, labels, strict=True))
        if labels
        else [(one, f"{one:,.4g}") for one in (low, (low + high) / 2, high)]
    )
    parts += [
        f'<text x="{x(value)}" y="{_HEIGHT - 8}" text-anchor="middle">{escape.escape(label)}</text>'
        for value, label in ticks
    ]
    parts.append(f'<text x="{right}" y="{_HEIGHT - 8}" text-anchor="end">{escape.escape(x_name)}</text>')
    for index, (label, ys) in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(f"{x(a)},{y(b)}" for a, b in zip(xs, ys, strict=False))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>',
            f'<text x="{_MARGIN + 8 + 130 * index}" y="14" style="fill:{colour}">{escape.escape(label)}</text>',
        ]
    return "".join([*parts, "</svg>"])
