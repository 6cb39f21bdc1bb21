"""What the operator asks of the API server: list, watch, apply, delete, events and the Lease, on plain dictionaries.

The only file that does. Owns the field manager and what the watches brought. Knows nothing of what the objects mean;
what it may do to which kind is in `kinds.py`, and how a request is made in `connection.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from sluice_engine import codec
from sluice_operator.cluster.connection import Connection, told_by
from sluice_operator.cluster.kinds import KINDS, SERVICE_KIND
from sluice_operator.cluster.seen import Place, Seen, place_of
from sluice_operator.errors import ApiRefused, LeaseLost
from sluice_operator.plan import Key, Observed, key
from sluice_operator.rendering.labels import FIELD_MANAGER, MANAGED_BY
from sluice_operator.rendering.pod_template import Object
from sluice_operator.status.changes import Told

_MANAGED_SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
# The server ends a watch after 240 s. It sends a bookmark each minute, so a stream that is silent for 90 s is dead,
# however alive its connection looks.
_WATCH_SECONDS = 240
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=_WATCH_SECONDS + 30, sock_connect=10, sock_read=90)
# Of the pods whose status says too little, so many are asked after.
_MOST_EXPLAINED = 3
# Until then the watches of all kinds have begun; if not, the look is tried again.
_SYNCED_WITHIN_S = 30.0
# No object is of the first version of all: an application that names it can only make one.
_NO_VERSION = "1"
_CONFLICT = 409


class Kube:
    """The API server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seen = Seen()
        self.may_act: Callable[[], bool] = lambda: True
        """Asked before each write to what belongs to services: a process that lost its Lease writes nothing more."""

    async def serves(self, kind: str) -> bool:
        """Whether the API server has the kind's definition now."""
        found = KINDS[kind]
        page = await self._connection.get(found.prefix)
        return page is not None and any(one.get("name") == found.plural for one in page.get("resources") or ())

    async def list_services(self, namespaces: Sequence[str]) -> list[Object]:
        """All InferenceServices in these namespaces; none named: in all."""
        listed: list[Object] = []
        for namespace in namespaces or ("",):
            async for page in self._connection.pages(_path(SERVICE_KIND, namespace)):
                for item in page["items"]:
                    item["metadata"].pop("managedFields", None)
                    listed.append(_with_kind(SERVICE_KIND, page, item))
        return listed

    async def observe(self, namespace: str, name: str, kinds: Sequence[str]) -> Observed:
        """Everything that belongs to one service, of these kinds; as the watches brought it, no request is made."""
        async with asyncio.timeout(_SYNCED_WITHIN_S):
            return await self._seen.observe(namespace, name, kinds)

    async def read(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object, or None: by a list, so that it takes no right that the watches do not need anyway."""
        page = await self._connection.call("GET", _path(kind, namespace), [("fieldSelector", f"metadata.name={name}")])
        return next((_with_kind(kind, page, item) for item in page["items"]), None)

    async def apply(self, item: Object) -> Object:
        """Apply an object server-side; returns it as the server has it then.

        Raises:
            ApiRefused: the server found it invalid, or it may not be written.
        """
        metadata = item["metadata"]
        after = await self._patch(_path(item["kind"], metadata["namespace"], metadata["name"]), item)
        self._seen.put(after)
        return after

    async def create(self, item: Object) -> Object | None:
        """Apply an object that nobody is known to have made; None, and nothing is changed, where its name is taken.

        Raises:
            ApiRefused: the server found it invalid, or it may not be written.
        """
        try:
            return await self.apply({**item, "metadata": {**item["metadata"], "resourceVersion": _NO_VERSION}})
        except ApiRefused as refused:
            if refused.status != _CONFLICT:
                raise
        return None

    async def apply_status(self, body: Object, status: Mapping[str, Any]) -> None:
        """Apply the status of an InferenceService, unless it is another one by that name by now."""
        metadata = body["metadata"]
        item = {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "status": status,
        }
        path = _path(SERVICE_KIND, metadata["namespace"], metadata["name"])
        await self._patch(f"{path}/status", item)

    async def delete(self, found: Key, namespace: str) -> None:
        """Delete an object; one that is gone already is fine. That it is gone, the watch tells."""
        kind, name = found
        self._check_lease()
        try:
            await self._connection.call("DELETE", _path(kind, namespace, name))
        except ApiRefused as refused:
            if not refused.is_not_found:
                raise

    async def pod_events(self, namespace: str, uids: Mapping[str, str]) -> dict[str, list[Object]]:
        """The events about the first few of these pods (name → uid): those of a template tell the same."""
        found = {}
        for name, uid in itertools.islice(uids.items(), _MOST_EXPLAINED):
            query = [("fieldSelector", f"involvedObject.kind=Pod,involvedObject.name={name},involvedObject.uid={uid}")]
            page = await self._connection.call("GET", f"/api/v1/namespaces/{namespace}/events", query)
            found[name] = list(page["items"])
        return found

    async def post_event(self, body: Object, told: Told) -> None:
        """Tell those who `kubectl describe` the resource what changed; what was told before is counted up."""
        metadata = body["metadata"]
        series = codec.digest([metadata["uid"], told.kind, told.reason, told.first])
        name = f"{metadata['name']}.{series}"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": body["apiVersion"],
                "kind": body["kind"],
                **{key: metadata[key] for key in ("name", "namespace", "uid")},
            },
            "type": told.kind,
            "reason": told.reason,
            "message": told.message[:1024],
            "source": {"component": "sluice-operator"},
            "firstTimestamp": told.first,
            "lastTimestamp": told.last,
            "count": told.count,
        }
        await self._patch(f"/api/v1/namespaces/{metadata['namespace']}/events/{name}", event)

    async def read_lease(self, namespace: str, name: str) -> Object | None:
        """A Lease, or None."""
        return await self._connection.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")

    async def write_lease(self, lease: Object) -> Object:
        """Create a Lease, or replace it where it is still of the version that this one names."""
        metadata = lease["metadata"]
        path = f"/apis/coordination.k8s.io/v1/namespaces/{metadata['namespace']}/leases"
        if "resourceVersion" in metadata:
            return await self._connection.call("PUT", f"{path}/{metadata['name']}", body=lease)
        return await self._connection.call("POST", path, body=lease)

    async def list_children(self, kind: str, namespace: str) -> str:
        """See all objects of a kind that this operator manages; returns the version to watch from."""
        listed: list[tuple[Place, Key]] = []
        version = ""
        async for page in self._connection.pages(_path(kind, namespace), [("labelSelector", _MANAGED_SELECTOR)]):
            for item in page["items"]:
                whole = _with_kind(kind, page, item)
                self._seen.put(whole)
                if place := place_of(whole):
                    listed.append((place, key(whole)))
            version = page["metadata"]["resourceVersion"]
        self._seen.replace(kind, namespace, listed, version)
        return version

    async def watch_children(self, kind: str, namespace: str, since: str) -> AsyncIterator[tuple[str, list[Place]]]:
        """Of each event after the version `since`, bookmarks included: its version, and to which services it is news.

        Until the server ends the stream. What came of our own writes is no news.

        Raises:
            WatchExpired: `since` is too old.
        """
        query = [
            ("labelSelector", _MANAGED_SELECTOR),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", since),
            ("timeoutSeconds", str(_WATCH_SECONDS)),
        ]
        response = await self._connection.send("GET", _path(kind, namespace), query, timeout=_WATCH_TIMEOUT)
        try:
            async for line in response.content:
                event = json.loads(line)
                change, item = event["type"], event["object"]
                if change == "ERROR":
                    raise told_by(item, line)
                concerned: list[Place] = []
                if change != "BOOKMARK":
                    concerned = (self._seen.remove if change == "DELETED" else self._seen.put)(item)
                yield item["metadata"]["resourceVersion"], concerned
        finally:
            response.close()

    def _check_lease(self) -> None:
        if not self.may_act():
            raise LeaseLost("another operator may act by now")

    async def _patch(self, path: str, item: Object) -> Object:
        self._check_lease()
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        return await self._connection.call("PATCH", path, query, item)


def _path(kind: str, namespace: str, name: str = "") -> str:
    found = KINDS[kind]
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{found.prefix}{scope}/{found.plural}" + (f"/{name}" if name else "")


def _with_kind(kind: str, page: Object, item: Object) -> Object:
    # Items of a list come without their kind.
    return {"apiVersion": page["apiVersion"], "kind": kind, **item}
