"""All that a status is computed from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice_operator.observed import pods
from sluice_operator.observed.failures import Failure
from sluice_operator.plan import Observed
from sluice_operator.resource.spec import ServiceSpec
from sluice_sidecar.telemetry.state import GateState


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The release whose pod template, images and configuration the pods have."""

    version: str
    newer: str = ""
    """The operator's own release, where its pods would be others; empty: they would be the same."""
    waiting: tuple[str, ...] = ()
    """What is set in the spec and `live.json` leaves out, since the programs of this release do not know it."""
    live_hash: str = ""
    """Of the `live.json` that these pods are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is wanted, and what is observed of it now."""

    generation: int
    spec: ServiceSpec | None
    """None: the spec could not be understood; `problem` says why."""
    observed: Observed = field(default_factory=Observed)
    gates: Mapping[str, GateState] = field(default_factory=dict)
    """What the gate of each pod last said, by the pod's name."""
    events: pods.Events = field(default_factory=dict)
    """What the kubelet told of the pods that say too little themselves."""
    problem: Failure | None = None
    """What kept the operator from applying what is wanted."""
    runtime: Runtime | None = None
    """By which rendering the pods run; None: none was chosen."""
    kinds: frozenset[str] = frozenset()
    """The optional kinds whose definition the cluster has."""
