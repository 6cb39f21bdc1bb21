"""What the watches brought: the objects of all services, so that a look at one asks the API server nothing.

Owns the newest known version of each object, as compact text: of a kind that is only compared, its metadata. Fed by
lists, watch events and our own writes, in whatever order they come: an older version never replaces a newer one. Knows
nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterable, Sequence

from sluice_operator.cluster.kinds import KINDS, OWNED_KINDS
from sluice_operator.plan import Key, Observed, key
from sluice_operator.rendering.labels import SERVICE_LABEL
from sluice_operator.rendering.pod_template import Object

Place = tuple[str, str]
"""Namespace and service."""

# Who wrote which field: larger than all the rest, and nothing asks for it.
_LEFT_OUT = frozenset({"managedFields"})
# An object of a few kilobytes becomes a quarter of that in a tenth of a millisecond; levels above gain a tenth more.
_LEVEL = 1


class Seen:
    """The objects of every service, by kind and name."""

    def __init__(self) -> None:
        self._services: dict[Place, dict[Key, tuple[int, bytes]]] = {}
        """Version and text; an object that is gone has an empty one, so that a late answer does not bring it back."""
        self._places: dict[tuple[str, Key], Place] = {}
        """Whose an object is, by its namespace: somebody may give it to another service by its label."""
        self._listed: dict[tuple[str, str], asyncio.Event] = {}

    def replace(self, kind: str, namespace: str, listed: Iterable[tuple[Place, Key]], version: str) -> None:
        """Of a kind, a namespace ("": all) held at a version what is `listed`; each of these was put before."""
        there, at = set(listed), _number(version)
        for place, objects in list(self._services.items()):
            if namespace and place[0] != namespace:
                continue
            # What we wrote after the list was made is not gone.
            gone = [one for one, (newest, _) in objects.items() if one[0] == kind and newest <= at]
            for found in gone:
                if (place, found) not in there:
                    self.drop(*place, found)
        self._event(kind, namespace).set()

    def put(self, item: Object) -> list[Place]:
        """An object as it is now, unless that is known: returns whose it is, and whose it was, where it is news."""
        place, found = place_of(item), key(item)
        newest, namespace = _number(item["metadata"]["resourceVersion"]), item["metadata"].get("namespace", "")
        before = self._places.get((namespace, found))
        moved: list[Place] = []
        if before is not None and before != place:
            if self._services[before][found][0] > newest:
                return []
            self.drop(*before, found)
            moved = [before]
        if place is None:
            return moved
        objects = self._services.setdefault(place, {})
        known = objects.get(found)
        if known is not None and known[0] >= newest > 0:
            return moved
        objects[found] = newest, _packed(item)
        self._places[namespace, found] = place
        return [*moved, place]

    def remove(self, item: Object) -> list[Place]:
        """An object that is gone, or no longer ours by its labels; `item` is its last state. Returns whose it was."""
        newest, found = _number(item["metadata"]["resourceVersion"]), key(item)
        place = self._places.get((item["metadata"].get("namespace", ""), found)) or place_of(item)
        if place is None or not (objects := self._services.get(place)):
            return []
        if found in objects and objects[found][0] <= newest:
            if found[0] in OWNED_KINDS:
                objects[found] = newest, b""
            else:  # we never write it, so no answer can come late; a service's pods come and go without an end
                self.drop(*place, found)
        if not any(text for _, text in objects.values()):
            for one in list(objects):
                self.drop(*place, one)
        return [place]

    def drop(self, namespace: str, name: str, found: Key) -> None:
        """Nothing is known of an object of a service any more."""
        objects = self._services.get((namespace, name), {})
        objects.pop(found, None)
        self._places.pop((namespace, found), None)
        if not objects:
            self._services.pop((namespace, name), None)

    async def observe(self, namespace: str, name: str, kinds: Sequence[str]) -> Observed:
        """Everything of these kinds that belongs to one service, once all of them were listed."""
        for kind in kinds:
            if not (self._event(kind, "").is_set() or self._event(kind, namespace).is_set()):
                await self._wait(kind, namespace)
        found: dict[str, list[Object]] = {}
        for (kind, _), (_, text) in self._services.get((namespace, name), {}).items():
            if text and kind in kinds:
                found.setdefault(kind, []).append(json.loads(zlib.decompress(text)))
        owned = {key(item): item for kind in OWNED_KINDS for item in found.get(kind, ())}
        return Observed(owned=owned, replica_sets=found.get("ReplicaSet", ()), pods=found.get("Pod", ()))

    async def _wait(self, kind: str, namespace: str) -> None:
        waiting = [asyncio.create_task(self._event(kind, scope).wait()) for scope in ("", namespace)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def _event(self, kind: str, namespace: str) -> asyncio.Event:
        return self._listed.setdefault((kind, namespace), asyncio.Event())


def place_of(item: Object) -> Place | None:
    """The service that an object says it is of."""
    metadata = item["metadata"]
    name = (metadata.get("labels") or {}).get(SERVICE_LABEL)
    return (metadata.get("namespace", ""), name) if name else None


def _number(version: str) -> int:
    # Versions of one kind are numbers that grow (Kubernetes has promised so since 1.35, and etcd's always did).
    return int(version) if version.isdigit() else 0


def _packed(item: Object) -> bytes:
    metadata = {name: value for name, value in item["metadata"].items() if name not in _LEFT_OUT}
    rest = item if KINDS[item["kind"]].is_read else {"kind": item["kind"]}
    told = {**rest, "metadata": metadata}
    return zlib.compress(json.dumps(told, separators=(",", ":")).encode(), _LEVEL)
