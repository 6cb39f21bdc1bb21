"""Whether pods obey what changes under them without a restart: the newest `live.json`, and the API keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice_operator.observed.failures import Failure, failure
from sluice_operator.observed.pods import PodView
from sluice_operator.status.figures import PodState

REFUSED = "ConfigRefused"
PENDING = "ConfigPending"


def obeys(state: PodState, live_hash: str) -> bool:
    """Whether gate and engine of a pod say that they obey this `live.json`; who names none reads none."""
    engine = state.engine
    told = {state.gate.live_config_hash, engine.live_config_hash if engine else ""}
    return told <= {"", live_hash}


def pending(serving: Sequence[PodView], states: Mapping[str, PodState], live_hash: str, *, is_news: bool) -> int:
    """How many of the pods that serve do not obey it yet.

    One that does not answer is what it was when it was last heard; where the file is news since then (`is_news`), it is
    not known to have heard of it.
    """
    return sum(not obeys(states[pod.name], live_hash) if pod.name in states else is_news for pod in serving)


def refusal(state: PodState) -> Failure | None:
    """What a pod says of a file that it could not take; None where it took all of them."""
    gate, engine = state.gate, state.engine
    for what, problem in (
        ("the gate refuses live.json", gate.live_config_refused),
        ("the gate refuses the API keys", gate.api_keys_refused),
        ("the engine refuses live.json", engine.live_config_refused if engine else ""),
    ):
        if problem:
            text = f"{what}, and goes by the one before: {problem}"
            return failure(REFUSED, text, state.pod.name)
    return None
