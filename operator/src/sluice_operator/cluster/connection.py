"""The connection to the API server: requests on plain dictionaries, and what its refusals mean.

Owns sending and the translation of errors. Knows no kind of object, and of credentials only where they come from
(`credentials.py`). Next: `kube.py`, which asks.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration

from sluice_operator.cluster import credentials
from sluice_operator.errors import ApiRefused, NamespaceEnds
from sluice_operator.rendering.pod_template import Object

_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=10)
# So many objects a page: a thousand services in one text would need the memory of all of them at once.
_PAGE = 100
_GONE = 410
_UNPROCESSABLE = 422
_NOT_TYPED = "failed to create typed patch object"

Query = Sequence[tuple[str, str]]


class WatchExpired(Exception):  # not an error: the caller lists again
    """The server no longer knows the point from which to go on."""


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[Connection]:
    """A connection to the cluster; closed on leaving."""
    configuration = await credentials.configuration()
    settle_environment(configuration)
    async with ApiClient(configuration) as client:
        yield Connection(client)


def settle_environment(configuration: Configuration) -> None:
    """Read the environment's proxies once: the session would do it, and look for a netrc, with each request."""
    configuration.client_session_kwargs = {"trust_env": False}
    there = urllib.parse.urlsplit(configuration.host)
    if configuration.proxy is None and not urllib.request.proxy_bypass(there.hostname or ""):
        configuration.proxy = urllib.request.getproxies().get(there.scheme)


class Connection:
    """Requests to one API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self.count: Callable[[str], None] = lambda _: None
        """Told of each request's method."""

    async def call(self, method: str, path: str, query: Query = (), body: object | None = None) -> Object:
        """One request's answer.

        Raises:
            ApiRefused: the server said no, in its own words.
        """
        response = await self.send(method, path, query, body)
        try:
            result: Object = json.loads(await response.read())
        finally:
            response.release()
        return result

    async def get(self, path: str) -> Object | None:
        """What is at a path; None where nothing is."""
        try:
            return await self.call("GET", path)
        except ApiRefused as refused:
            if refused.is_not_found:
                return None
            raise

    async def pages(self, path: str, query: Query = ()) -> AsyncIterator[Object]:
        """A list, page by page; all of them are of one version."""
        more = ""
        while True:
            page = await self.call(
                "GET", path, [*query, ("limit", str(_PAGE)), *([("continue", more)] if more else [])]
            )
            yield page
            if not (more := page.get("metadata", {}).get("continue") or ""):
                return

    async def send(  # the parts of a request
        self,
        method: str,
        path: str,
        query: Query = (),
        body: object | None = None,
        *,
        timeout: aiohttp.ClientTimeout = _REQUEST_TIMEOUT,  # noqa: ASYNC109  # aiohttp's own type
    ) -> aiohttp.ClientResponse:
        """The answer's beginning; whoever asks reads it and releases it.

        Raises:
            ApiRefused: the server said no, in its own words.
            WatchExpired: it does not know the version any more from which it was to go on.
        """
        self.count(method)
        headers = {"Accept": "application/json"}
        if method == "PATCH":
            # With its parameter, the client sends the text as it is.
            headers["Content-Type"], body = "application/apply-patch+yaml; charset=utf-8", as_yaml(body)
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
            told = refusal(response.status, content)
            wanted = response.headers.get("Retry-After", "")
            told.retry_after_s = float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0
            raise told
        return response


def told_by(event: Object, line: bytes) -> Exception:
    """What an event of the type ERROR in a watch means."""
    code = event.get("code", 500)
    return WatchExpired() if code == _GONE else refusal(code, line)


def as_yaml(item: object) -> str:
    """An object as JSON that is YAML as well, which is how the server reads what is applied.

    YAML knows no pair of escapes for one character, as JSON writes an emoji; and it takes these for line breaks, or not
    at all, where they are not escaped.
    """
    text = json.dumps(item, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def refusal(status: int, content: bytes) -> ApiRefused:
    """A refusal in the server's own words."""
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
