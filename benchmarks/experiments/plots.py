"""Plots of what the experiments found: the goodput curve, and the recovery after a trigger.

From a report's data alone; whatever of it an experiment left out is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("Agg")
NAMES = {"gate": "with the gate", "no gate": "without"}


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what there is; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if (curve := data.get("steady", {}).get("curve")) is not None:
        written.append(_lines(
            folder / "overload-goodput.png", {NAMES[name]: (curve["rate"], curve[name]) for name in NAMES},
            "offered, requests/s", "good, requests/s",
        ))  # fmt: skip
    for trigger, series in data.get("metastable", {}).items():
        if not isinstance(series, dict) or not all(name in series for name in NAMES):
            continue
        lines = {NAMES[name]: ([10 * at for at in range(len(series[name]))], series[name]) for name in NAMES}
        written.append(_lines(folder / f"overload-{trigger.replace(' ', '-')}.png", lines, "s", "good, % of requests"))
    return written


def _lines(path: Path, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str) -> Path:
    figure = Figure(figsize=(6, 3), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, (xs, ys) in lines.items():
        axes.plot(xs, ys, label=name)
    axes.set(xlabel=x, ylabel=y, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return path
