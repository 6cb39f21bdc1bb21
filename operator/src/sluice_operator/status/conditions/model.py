"""ModelLoaded and Degraded: how far the pods are, and what stands in the way. Pure."""

from __future__ import annotations

from sluice_operator.status.claim import Claim
from sluice_operator.status.conditions.view import View


def model_loaded(view: View) -> Claim:
    """Every pod has loaded the model."""
    among = view.current or view.old
    if not among:
        return Claim(status="Unknown", reason="NoPods", message="There is no pod that could load it.")
    loading = view.loading()
    if not loading and all(pod.is_ready for pod in among):
        return Claim(status="True", reason="Loaded", message="Every pod has loaded the model.")
    failing = next((pod.failure for pod in among if pod.failure), None)
    if failing:
        return Claim(status="False", reason=failing.reason, message=failing.message)
    if loading:
        return Claim(status="False", reason="ModelLoading", message=f"{loading[0].upper()}{loading[1:]}.")
    states = {state.pod.name: state for state in view.states}
    if all((state := states.get(pod.name)) and state.engine and state.engine.phase == "ready" for pod in among):
        return Claim(status="True", reason="Loaded", message="Every pod has loaded the model.")
    return Claim(status="Unknown", reason="PodsStarting", message="A pod has not said yet how far it is.")


def degraded(view: View) -> Claim:
    """Something stands in the way."""
    if view.failure:
        return Claim(status="True", reason=view.failure.reason, message=view.failure.message)
    return Claim(status="False", reason="AsExpected", message="Nothing stands in the way.")
