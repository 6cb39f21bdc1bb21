"""The only file that talks to the API server: list, watch, apply, delete, and post events, on plain dictionaries.

Owns the connection, the field manager and the translation of errors. Knows nothing of what the objects mean.

What it may do to which kind is in `kinds.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient

from sluice_engine import codec
from sluice_operator.cluster import credentials
from sluice_operator.cluster.kinds import KINDS, SERVICE_KIND
from sluice_operator.cluster.seen import Seen
from sluice_operator.errors import ApiRefused, LeaseLost, NamespaceEnds
from sluice_operator.plan import Key, Observed
from sluice_operator.rendering.labels import MANAGED_BY
from sluice_operator.rendering.pod_template import Object
from sluice_operator.status.changes import Told

FIELD_MANAGER = "sluice"

_MANAGED_SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=10)
# The server ends a watch after 240 s. It sends a bookmark each minute, so a stream that is silent for 90 s is dead,
# however alive its connection looks.
_WATCH_SECONDS = 240
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=_WATCH_SECONDS + 30, sock_connect=10, sock_read=90)
# Of the pods whose status says too little, so many are asked after.
_MOST_EXPLAINED = 3
# Until then the watches of all kinds have begun; if not, the look is tried again.
_SYNCED_WITHIN_S = 30.0
_GONE = 410
_UNPROCESSABLE = 422
_NOT_TYPED = "failed to create typed patch object"
_NOT_FOUND = 404


class WatchExpired(Exception):  # not an error: the caller lists again
    """The server no longer knows the point from which to go on."""


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[Kube]:
    """A connection to the cluster; closed on leaving."""
    async with ApiClient(await credentials.configuration()) as client:
        yield Kube(client)


class Kube:
    """The API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._seen = Seen()
        self.may_act: Callable[[], bool] = lambda: True
        """Asked before each write to what belongs to services: a process that lost its Lease writes nothing more."""

    async def serves(self, kind: str) -> bool:
        """Whether the API server has the kind's definition now."""
        found = KINDS[kind]
        page = await self._get(found.prefix)
        return page is not None and any(one.get("name") == found.plural for one in page.get("resources") or ())

    async def list_services(self, namespaces: Sequence[str]) -> list[Object]:
        """All InferenceServices in these namespaces; none named: in all."""
        listed: list[Object] = []
        for namespace in namespaces or ("",):
            page = await self._call("GET", _path(SERVICE_KIND, namespace))
            listed += [_with_kind(SERVICE_KIND, page, item) for item in page["items"]]
        return listed

    async def observe(self, namespace: str, name: str, kinds: Sequence[str]) -> Observed:
        """Everything that belongs to one service, of these kinds; as the watches brought it, no request is made."""
        async with asyncio.timeout(_SYNCED_WITHIN_S):
            return await self._seen.observe(namespace, name, kinds)

    async def read(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object, or None."""
        return await self._get(_path(kind, namespace, name))

    async def apply(self, item: Object) -> Object:
        """Apply an object server-side; returns it as the server has it then.

        Raises:
            ApiRefused: the server found it invalid, or it may not be written.
        """
        metadata = item["metadata"]
        after = await self._patch(_path(item["kind"], metadata["namespace"], metadata["name"]), item)
        self._seen.put(after)
        return after

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
            await self._call("DELETE", _path(kind, namespace, name))
        except ApiRefused as refused:
            if refused.status != _NOT_FOUND:
                raise

    async def pod_events(self, namespace: str, uids: Mapping[str, str]) -> dict[str, list[Object]]:
        """The events about the first few of these pods (name → uid): those of a template tell the same."""
        found = {}
        for name, uid in itertools.islice(uids.items(), _MOST_EXPLAINED):
            query = [("fieldSelector", f"involvedObject.kind=Pod,involvedObject.name={name},involvedObject.uid={uid}")]
            page = await self._call("GET", f"/api/v1/namespaces/{namespace}/events", query)
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
        return await self._get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")

    async def write_lease(self, lease: Object) -> Object:
        """Create a Lease, or replace it where it is still of the version that this one names."""
        metadata = lease["metadata"]
        path = f"/apis/coordination.k8s.io/v1/namespaces/{metadata['namespace']}/leases"
        if "resourceVersion" in metadata:
            return await self._call("PUT", f"{path}/{metadata['name']}", body=lease)
        return await self._call("POST", path, body=lease)

    async def list_children(self, kind: str, namespace: str) -> tuple[list[Object], str]:
        """All objects of a kind that this operator manages, and the version to watch from."""
        page = await self._call("GET", _path(kind, namespace), [("labelSelector", _MANAGED_SELECTOR)])
        items = [_with_kind(kind, page, item) for item in page["items"]]
        self._seen.replace(kind, namespace, items, page["metadata"]["resourceVersion"])
        return items, page["metadata"]["resourceVersion"]

    async def watch_children(self, kind: str, namespace: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        """Events (type and object, bookmarks included) after the version `since`, until the server ends the stream.

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
        response = await self._send("GET", _path(kind, namespace), query, timeout=_WATCH_TIMEOUT)
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == _GONE:
                        raise WatchExpired
                    raise _refused(event["object"].get("code", 500), line)
                if event["type"] == "DELETED":
                    self._seen.remove(event["object"])
                elif event["type"] != "BOOKMARK":
                    self._seen.put(event["object"])
                yield event["type"], event["object"]
        finally:
            response.close()

    def _check_lease(self) -> None:
        if not self.may_act():
            raise LeaseLost("another operator may act by now")

    async def _patch(self, path: str, item: Object) -> Object:
        self._check_lease()
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        return await self._call("PATCH", path, query, item)

    async def _get(self, path: str) -> Object | None:
        """What is at a path; None where nothing is."""
        try:
            return await self._call("GET", path)
        except ApiRefused as refused:
            if refused.status == _NOT_FOUND:
                return None
            raise

    async def _call(
        self, method: str, path: str, query: Sequence[tuple[str, str]] = (), body: object | None = None
    ) -> Object:
        response = await self._send(method, path, query, body, timeout=_REQUEST_TIMEOUT)
        try:
            result: Object = json.loads(await response.read())
        finally:
            response.release()
        return result

    async def _send(  # the parts of a request
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: object | None = None,
        *,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # aiohttp's own type
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if method == "PATCH":
            # With its parameter, the client sends the text as it is.
            headers["Content-Type"], body = "application/apply-patch+yaml; charset=utf-8", _yaml(body)
        request = await self._client.param_serialize(
            method, path, query_params=list(query), header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = await self._client.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 400:
            content = await response.read()
            response.release()
            if response.status == _GONE:
                raise WatchExpired
            refused = _refused(response.status, content)
            wanted = response.headers.get("Retry-After", "")
            refused.retry_after_s = float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0
            raise refused
        return response


def _path(kind: str, namespace: str, name: str = "") -> str:
    found = KINDS[kind]
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{found.prefix}{scope}/{found.plural}" + (f"/{name}" if name else "")


def _yaml(item: object) -> str:
    """An object as JSON that is YAML as well, which is how the server reads what is applied.

    YAML knows no pair of escapes for one character, as JSON writes an emoji; and it takes these for line breaks, or not
    at all, where they are not escaped.
    """
    text = json.dumps(item, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _with_kind(kind: str, page: Object, item: Object) -> Object:
    # Items of a list come without their kind.
    return {"apiVersion": page["apiVersion"], "kind": kind, **item}


def _refused(status: int, content: bytes) -> ApiRefused:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = {}
    answer = answer.get("object", answer)
    message = answer.get("message") or content[:200].decode(errors="replace") or f"HTTP status {status}"
    causes = (answer.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        return NamespaceEnds(status, answer.get("reason", ""), message)
    if message.startswith(_NOT_TYPED):
        # The server calls it an error of its own (500), and yet no repetition helps: the object is not of its type.
        return ApiRefused(_UNPROCESSABLE, "Invalid", message)
    return ApiRefused(status, answer.get("reason", ""), message)
