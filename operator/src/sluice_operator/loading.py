"""How far an engine's start is, in words. Pure."""

from __future__ import annotations

from sluice_engine.core.state import EngineState, LoadingProgress

_WORDS = {"weights": "weights", "warmup": "warming up", "step_table": "measuring step times", "done": "done"}


def progress(loading: LoadingProgress | None) -> str:
    """What a start is at, as the end of a sentence; empty when nothing is known."""
    if loading is None:
        return ""
    if loading.percent is None:
        return f" ({_WORDS[loading.stage]})"
    # In tens: a change of this text is a line on a terminal, and a write to the API server.
    tens = loading.percent // 10 * 10
    return f" ({tens} % of the weights)" if loading.stage == "weights" else f" ({_WORDS[loading.stage]}: {tens} %)"


def loading_text(engine: EngineState) -> str:
    """How far an engine's start is, for people."""
    return f"loading the model{progress(engine.loading)}" if engine.phase == "loading" else str(engine.phase)
