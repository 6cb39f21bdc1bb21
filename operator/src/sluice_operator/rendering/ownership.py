"""What every object of a service carries: name, labels it is found by, owner. Pure. Next: `render.py`."""

from __future__ import annotations

from sluice_operator.rendering.labels import labels
from sluice_operator.rendering.pod_template import Object
from sluice_operator.resource.spec import ServiceSpec

API_VERSION = "sluice.dev/v1alpha1"
KIND = "InferenceService"


def metadata(spec: ServiceSpec, name: str) -> Object:
    """The metadata of an object that goes with the resource."""
    written: Object = {"name": name}
    if spec.namespace:
        written["namespace"] = spec.namespace
    written["labels"] = labels(spec)
    if spec.uid:
        # No blockOwnerDeletion: it would need rights on the owner's finalizers, and nothing waits for our objects.
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": spec.name, "uid": spec.uid, "controller": True}
        written["ownerReferences"] = [owner]
    return written
