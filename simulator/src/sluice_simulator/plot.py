"""Pictures as PNG: a run over time, or the goodput curve of a sweep. Matplotlib is imported only when asked."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from sluice_simulator import sweep
from sluice_simulator.errors import InvalidInput
from sluice_simulator.report import Json


def require() -> None:
    """See that pictures can be drawn at all, before a long run.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("--plot", "", "needs matplotlib: install sluice-simulator[plot]")


def png(found: Json) -> bytes:
    """The picture of a report or a sweep."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # only when asked for
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 7 if "timeline" in found else 5), layout="constrained")
    FigureCanvasAgg(figure)
    if "timeline" in found:
        _run(figure, found)
    else:
        _curve(figure, found)
    buffer = io.BytesIO()
    # No version of the library in the file: equal runs give equal bytes.
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


def _run(figure: Any, found: Json) -> None:  # noqa: ANN401  # matplotlib's
    timeline = found["timeline"]
    times_s = [index * timeline["slice_s"] for index in range(len(timeline["batch"]))]
    panels = figure.subplots(4, 1, sharex=True)
    rows = (
        ("requests", (("batch", "running"), ("waiting", "waiting in the engine"), ("door", "at the door"))),
        ("KV cache, %", (("kv_percent", "in use"),)),
        ("tokens/s", (("prefill_tokens_per_second", "prefill"), ("decode_tokens_per_second", "decode"))),
        ("requests/s", tuple((f"{one}_per_second", one) for one in ("arrived", "good", "refused"))),
    )  # fmt: skip
    for panel, (unit, lines) in zip(panels, rows, strict=True):
        for key, label in lines:
            panel.plot(times_s, timeline[key], label=label, linewidth=1)
        panel.set_ylabel(unit)
        panel.set_ylim(bottom=0)
        panel.legend(loc="upper right", fontsize="small")
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("s")
    total = found["total"]
    figure.suptitle(
        f"{found['scenario']}: {total['goodput_per_second']:g} good requests/s ({total['good_percent']:.1f} %)"
    )


def _curve(figure: Any, found: Json) -> None:  # noqa: ANN401  # matplotlib's
    first = found["axes"][0]
    panel = figure.subplots()
    for value, runs in sweep.lines_of(found):
        goodput = [run["total"]["goodput_per_second"] for run in runs]
        places = [run["set"][first["key"]] for run in runs]
        if not all(isinstance(place, (int, float)) for place in places):
            places = [str(place) for place in places]
        panel.plot(places, goodput, marker="o", label="good" if value is None else str(value))
    if len(found["axes"]) > 1:
        panel.legend(title=found["axes"][1]["key"])
    panel.set_xlabel(first["key"])
    panel.set_ylabel("good requests/s")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    figure.suptitle(f"{found['scenario']}: goodput")
