"""How a service's objects are found, and on what basis a pod's step cost was measured. Pure."""

from __future__ import annotations

from sluice_engine import codec
from sluice_operator.resource.spec import ServiceSpec

SERVICE_LABEL = "sluice.dev/inferenceservice"
MANAGED_BY = {"app.kubernetes.io/managed-by": "sluice-operator"}
FIELD_MANAGER = "sluice"
"""Under which the operator's fields are known to the API server."""
COST_BASIS_ANNOTATION = "sluice.dev/cost-basis"
GENERATION_ANNOTATION = "sluice.dev/generation"
"""On a Deployment: of the resource, when the Deployment was last given its template."""
RENDERING_ANNOTATION = "sluice.dev/rendering"
"""On a Deployment: the ControllerRevision that keeps its template."""


def labels(spec: ServiceSpec) -> dict[str, str]:
    """The labels on everything that belongs to the service."""
    return {
        "app.kubernetes.io/name": "sluice",
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/component": "engine",
        **MANAGED_BY,
        SERVICE_LABEL: spec.name,
    }


def selector(spec: ServiceSpec) -> dict[str, str]:
    """The labels by which the service's pods are found; they never change, since a Deployment's selector cannot."""
    return {SERVICE_LABEL: spec.name}


def cost_basis(spec: ServiceSpec) -> str:
    """A hash of what decides the cost of a step; a cost measured on another basis says nothing about this spec."""
    return codec.digest(spec.cost_basis)
