"""How far an engine's start is, in words. Pure."""

from __future__ import annotations

from sluice_engine.core.state import EngineState, LoadingProgress


def progress(loading: LoadingProgress | None) -> str:
    """What a start is at, as the end of a sentence; empty when nothing is known."""
    if loading is None:
        return ""
    if loading.stage == "weights" and loading.bytes_total:
        # In tens: a change of this text is a line on a terminal, and a write to the API server.
        return f" ({10 * (10 * loading.bytes_done // loading.bytes_total)} % of the weights)"
    words = {"weights": "weights", "warmup": "warming up", "step_table": "measuring step times", "done": "done"}
    return f" ({words[loading.stage]})"


def loading_text(engine: EngineState) -> str:
    """How far an engine's start is, for people."""
    return f"loading the model{progress(engine.loading)}" if engine.phase == "loading" else str(engine.phase)
