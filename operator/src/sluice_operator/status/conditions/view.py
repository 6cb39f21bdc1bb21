"""One look at a situation: who serves, who is of the current revision, and what stands in the way. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice_engine import codec
from sluice_operator.observed import obeyed, pods, refusals
from sluice_operator.observed.failures import Failure, failure
from sluice_operator.observed.loading import progress
from sluice_operator.observed.moments import seconds_between
from sluice_operator.observed.pods import PodView
from sluice_operator.rendering import rollout
from sluice_operator.status.figures import PodState
from sluice_operator.status.situation import Situation

# A scheduler that is well decides within a second, and within seconds beside a thousand other pods.
_UNDECIDED_S = 30.0
# So long after it ended again, a pod that serves counts as sick.
_RELAPSE_S = 600.0


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """One condition of a status; empty when it has none."""
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


class View:
    """What all conditions are made of, found once."""

    def __init__(self, situation: Situation, previous: Mapping[str, Any], now: str) -> None:
        self.now = now
        self.spec, self.problem, self.kinds = situation.spec, situation.problem, situation.kinds
        observed = situation.observed
        self.deployment = next((one for one in observed.owned.values() if one["kind"] == "Deployment"), None)
        self.scaled = next((one for one in observed.owned.values() if one["kind"] == "ScaledObject"), None)
        self.leaving = pods.leaving(observed)
        seen, refused = pods.views(observed, situation.events), refusals.of_pods(observed, self.deployment)
        # What a pod waits for is still held by one of ours that drains: nothing is wrong.
        self.waits_for_drain = bool(self.leaving) and (
            any(_waits_for_room(pod) for pod in seen) or (refused is not None and refused.reason == "QuotaExceeded")
        )
        if self.waits_for_drain:
            seen = tuple(replace(pod, failure=None) if _waits_for_room(pod) else pod for pod in seen)
            refused = None
        self.pods = tuple(self._if_undecided(pod) for pod in seen)
        self.settled = pods.rollout_is_observed(self.deployment)
        self.current = [pod for pod in self.pods if pod.is_current and self.settled]
        self.ended = [pod for pod in pods.ended(observed) if pod.is_current and self.settled]
        self.old = [pod for pod in self.pods if pod not in self.current]
        self.ready = [pod for pod in self.pods if pod.is_ready]
        self.ready_current = [pod for pod in self.current if pod.is_ready]
        self.states = [PodState(pod=pod, gate=gate) for pod in self.pods if (gate := situation.gates.get(pod.name))]
        self.runtime = situation.runtime
        given = situation.runtime.live_hash if situation.runtime else ""
        self.live_hash = given or (codec.digest(self.spec.live) if self.spec else "")
        is_news = (
            previous.get("observedGeneration") != situation.generation
            or condition(previous, "Progressing").get("reason") == obeyed.PENDING
        )
        states = {state.pod.name: state for state in self.states}
        self.pending = obeyed.pending(self.ready_current, states, self.live_hash, is_news=is_news)
        # The promise is judged by the newest pods that have measured; the old ones are on their way out. Of those, by
        # pods that have it already: what the others derived follows from the one before.
        measured = [state for state in self.states if state.engine and state.engine.derived]
        newest = [state for state in measured if state.pod in self.current] or measured
        self.judged = [state for state in newest if obeyed.obeys(state, self.live_hash)] or newest
        self.wanted = self.spec.replicas if self.spec else 0
        self.failure = self.problem or refused or self._pod_failure() or self._relapse()

    def _if_undecided(self, pod: PodView) -> PodView:
        """The pod with its failure, where the scheduler has been silent for too long."""
        if not pod.is_undecided or not _UNDECIDED_S <= seconds_between(pod.created_at, self.now) < math.inf:
            return pod
        return replace(pod, failure=refusals.of_a_silent_scheduler(pod.claims, pod.name))

    def _relapse(self) -> Failure | None:
        """A pod that serves, ended a while ago, and not for the first time."""
        since = _RELAPSE_S
        found = (pod.relapse for pod in self.pods if pod.relapse and seconds_between(pod.relapsed_at, self.now) < since)
        return next(found, None)

    def _pod_failure(self) -> Failure | None:
        for state in self.states:
            engine = state.engine
            if engine and engine.hung:
                text = f"a step has run for {engine.step_running_us // 1_000_000} s"
                return failure("EngineHung", text, state.pod.name)
        if refused := next((found for state in self.states if (found := obeyed.refusal(state))), None):
            return refused
        # An older pod's trouble may be what the user just mended: it counts until there is a pod that has the change.
        blamed = self.current or self.old
        if found := next((pod.failure for pod in blamed if pod.failure), None):
            return found
        for state in self.states:
            if state.pod in blamed and state.engine and state.engine.phase == "failed":
                return failure("EngineFailed", state.engine.failure or "the engine failed", state.pod.name)
        # Pods that are gone explain what is missing; once nothing is, they are history.
        return next((pod.failure for pod in self.ended if pod.failure), None) if not self.is_complete else None

    @property
    def is_complete(self) -> bool:
        """Whether every wanted replica is of the current revision and takes requests."""
        return self.settled and len(self.ready_current) >= self.wanted

    @property
    def of_wanted(self) -> str:
        """How many of the wanted replicas serve."""
        return f"{len(self.ready_current)} of {self.wanted}"

    def waiting_for(self) -> tuple[str, str]:
        """Why not all replicas of the current revision serve yet."""
        count = f"{self.of_wanted} replicas of the current revision serve"
        if self.failure:
            where = f" on pod {self.failure.pod}" if self.failure.pod else ""
            return self.failure.reason, f"{count}; {self.failure.reason}{where}: {self.failure.message}"
        if not self.settled:
            return "Applying", "The current revision is being handed to its Deployment."
        if loading := self.loading():
            return "ModelLoading", f"{count}; {loading}."
        if self.waits_for_drain:
            text = f"{count}; pods on their way out end their streams first ({self.leaving}){self._in_place()}."
            return "WaitingForDrain", text
        if any(pod.is_ready for pod in self.old):
            return "RollingOut", f"{count}; {len(self.old)} of an older one still do{self._in_place()}."
        return self._starting(count)

    def _starting(self, count: str) -> tuple[str, str]:
        if drained := next((state.pod.name for state in self.states if _is_drained(state)), None):
            return "Drained", f"{count}; pod {drained} was drained by hand: delete it, and another takes its place."
        return "PodsStarting", f"{count}; pods are starting."

    def _in_place(self) -> str:
        """That Auto gave up waiting for room, while it rolls on."""
        if self.spec is None or self.spec.strategy != rollout.AUTO or rollout.goes(self.deployment) != rollout.IN_PLACE:
            return ""
        return "; in place, since there was no room for a pod beside them"

    def loading(self) -> str:
        """What a loading pod says, one of the current revision where there is one."""
        for state in sorted(self.states, key=lambda state: state.pod in self.old):
            engine = state.engine
            if engine and engine.phase == "loading":
                elapsed_s = seconds_between(state.pod.engine_began_at, self.now)
                return f"pod {state.pod.name} is loading the model{progress(engine.loading, elapsed_s)}"
        return ""


def _is_drained(state: PodState) -> bool:
    """Whether a pod that nobody deletes lets nobody in any more and has nobody inside: after `kubectl sluice drain`."""
    return state.gate.draining and not state.pod.is_ready and not state.gate.admission.ledger_requests


def _waits_for_room(pod: PodView) -> bool:
    return pod.failure is not None and pod.failure.reason == "Unschedulable"
