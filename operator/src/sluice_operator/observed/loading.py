"""How far an engine's start is, in words. Pure."""

from __future__ import annotations

import math

from sluice_engine.core.state import EngineState, LoadingProgress

_WORDS = {
    "download": "downloading",
    "weights": "weights",
    "warmup": "warming up",
    "step_table": "measuring step times",
    "done": "done",
}
_SHARES = {"download": "downloaded", "weights": "of the weights"}
# Below this share, the start of the program itself is most of the time that has passed.
_LEAST_PERCENT = 10
_GB = 1_000_000_000


def progress(loading: LoadingProgress | None, elapsed_s: float = math.inf) -> str:
    """What a start is at, as the end of a sentence; empty when nothing is known.

    Where it is known how long the engine has run (`elapsed_s`), with a guess of how long the weights still take.
    """
    if loading is None:
        return ""
    if loading.percent is None:
        return f" ({_WORDS[loading.stage]})"
    # In tens: a change of this text is a line on a terminal, and a write to the API server.
    tens = loading.percent // 10 * 10
    share = f"{tens} % {_SHARES[loading.stage]}" if loading.stage in _SHARES else f"{_WORDS[loading.stage]}: {tens} %"
    total = loading.bytes_total
    if not total:
        return f" ({share})"
    size = f": {_size(total * tens // 100, total)} of {_size(total, total)}" if total >= _GB // 100 else ""
    return f" ({share}{size}{_rest(loading, elapsed_s)})"


def _rest(loading: LoadingProgress, elapsed_s: float) -> str:
    """How long the weights still take if they go on as they went, in steps that grow with it."""
    done, total = loading.bytes_done, loading.bytes_total
    if not math.isfinite(elapsed_s) or elapsed_s <= 0 or 100 * done < _LEAST_PERCENT * total or done >= total:
        return ""
    rest_s = elapsed_s * (total - done) / done
    if rest_s < 45:
        return f", about {max(10, round(rest_s / 10) * 10)} s to go"
    return f", about {max(1, round(rest_s / 60))} min to go"


def _size(count: int, total: int) -> str:
    """Bytes, in the unit that suits the total."""
    return f"{count / _GB:.1f} GB" if total >= _GB else f"{count / 1_000_000:.0f} MB"


def loading_text(engine: EngineState) -> str:
    """How far an engine's start is, for people."""
    return f"loading the model{progress(engine.loading)}" if engine.phase == "loading" else str(engine.phase)
