"""What to send to the API server: desired objects against observed ones, as a plain value.

Owns the decision to apply, to leave alone and to delete. Level-triggered: the same inputs always give the same plan,
and a plan that was carried out is followed by an empty one. Pure. Next: `kube.py` carries it out, `status.py` tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_engine import codec
from sluice_operator.rendering.pod_template import Object

Key = tuple[str, str]
"""Kind and name, within one namespace."""

# Every service has them as long as it exists.
_NEVER_UNUSED = frozenset({"Deployment", "Service", "PodDisruptionBudget"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the cluster holds for one service now, found by label."""

    owned: Mapping[Key, Object] = field(default_factory=dict)
    """Of every kind that `render.objects` may return."""
    replica_sets: Sequence[Object] = ()
    pods: Sequence[Object] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What was last sent for an object, and what it looked like afterwards."""

    digest: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in this order."""

    create: tuple[Object, ...] = ()
    """Not seen yet; a foreign object may still have the name without having our label."""
    update: tuple[Object, ...] = ()
    delete: tuple[Key, ...] = ()
    foreign: tuple[Key, ...] = ()
    """Names that we need and that belong to somebody else; left alone."""
    digests: Mapping[Key, str] = field(default_factory=dict, compare=False)
    """Of all that is desired."""


def key(item: Object) -> Key:
    """The object's kind and name."""
    return item["kind"], item["metadata"]["name"]


def version(item: Object) -> str:
    """Changes when somebody changes what we applied, and, where the API tells the two apart, not with the status."""
    metadata = item["metadata"]
    return f"{metadata['uid']}/{metadata.get('generation') or metadata['resourceVersion']}"


def is_owned(item: Object, uid: str) -> bool:
    """Whether the object is controlled by the resource with this uid."""
    owners = item["metadata"].get("ownerReferences", ())
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def plan(
    desired: Sequence[Object],
    uid: str,
    observed: Observed,
    applied: Mapping[Key, Applied],
    kept: Iterable[Key] = (),
) -> Plan:
    """What makes the cluster hold what is desired of the resource with this uid, and leave those that are `kept`."""
    create, update, foreign = [], [], []
    digests = {key(item): codec.digest(item) for item in desired}
    for item in desired:
        seen = observed.owned.get(key(item))
        if seen is None:
            create.append(item)
        elif not is_owned(seen, uid):
            foreign.append(key(item))
        elif seen["metadata"].get("deletionTimestamp"):
            continue  # it comes back by the event of its end
        elif applied.get(key(item)) != Applied(digest=digests[key(item)], version=version(seen)):
            update.append(item)
    wanted = digests.keys() | set(kept)
    return Plan(
        create=tuple(create),
        update=tuple(update),
        delete=tuple(_unused(wanted, uid, observed)),
        foreign=tuple(foreign),
        digests=digests,
    )


def _unused(wanted: set[Key], uid: str, observed: Observed) -> Iterator[Key]:
    """Of ours, what neither is wanted nor named by a pod that runs or that the Deployment could make again."""
    templates = [*observed.replica_sets, *(item for item in observed.owned.values() if item["kind"] == "Deployment")]
    named = {found for item in templates for found in _named_by(item["spec"]["template"]["spec"])}
    for found, item in observed.owned.items():
        is_unused = found[0] not in _NEVER_UNUSED and found not in wanted | named
        if is_unused and is_owned(item, uid) and not item["metadata"].get("deletionTimestamp"):
            yield found


def _named_by(pod: Mapping[str, Any]) -> Iterator[Key]:
    if account := pod.get("serviceAccountName"):
        yield "ServiceAccount", account
    for volume in pod.get("volumes") or ():
        if source := volume.get("configMap"):
            yield "ConfigMap", source["name"]
