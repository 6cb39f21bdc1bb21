"""Whether a status is true: what it says of its pods, held twice a second against the pods themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.service.space import LABEL, Space

EVERY_S = 0.5
ANSWERED_WITHIN_S = 2.0

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a service and its pods."""

    at_s: float
    lie: str | None
    """What the status says and is not so; None: it is true."""
    is_settled: bool = False
    """All replicas that are wanted serve, and the status says so."""


def judge(service: Object, pods: list[Object], at_s: float) -> Sight:
    """The status of a service as these pods of it make it."""
    wanted, generation = service["spec"]["replicas"], service["metadata"]["generation"]
    status = service["status"]
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    serving = sum(_says(pod["status"], "Ready") for pod in staying)
    claims = {
        "observedGeneration": (status["observedGeneration"], generation),
        "replicas": (status["replicas"], len(staying)),
        "readyReplicas": (status["readyReplicas"], serving),
        "Ready": (_says(status, "Ready"), serving == wanted == len(staying)),
        "Available": (_says(status, "Available"), serving > 0),
    }
    lies = [f"{what} is {told}, and it should be {found}" for what, (told, found) in claims.items() if told != found]
    return Sight(at_s, "; ".join(lies) or None, is_settled=not lies and _says(status, "Ready"))


def _says(status: Object, condition: str) -> bool:
    return any(one["type"] == condition and one["status"] == "True" for one in status.get("conditions", ()))


@dataclass(slots=True)
class Truth:
    """What was seen of one service, as often as the API server answered."""

    space: Space
    name: str
    seen: list[Sight] = field(default_factory=list)
    _looked: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """It is looked at meanwhile."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def settled(self, since_s: float, within_s: float) -> float:
        """Wait until the status is true and all replicas serve; when that was first so after `since_s`.

        Raises:
            AssertionError: with what is not so.
        """
        deadline = time.monotonic() + within_s
        while not (self.seen and self.seen[-1].is_settled and self.seen[-1].at_s >= since_s):
            assert time.monotonic() < deadline, f"not settled in {within_s:.0f} s: {self.seen[-1:]}"
            self._looked.clear()
            await self._looked.wait()
        return self.seen[-1].at_s

    def untrue_until(self, since_s: float) -> float:
        """When the last lie after `since_s` was over, as far as was seen; `since_s` where there was none."""
        last = since_s
        for earlier, later in zip(self.seen, self.seen[1:], strict=False):
            if earlier.lie and later.at_s > since_s:
                last = later.at_s
        return last

    def longest_lie(self, since_s: float) -> tuple[float, str]:
        """For how long the status was untrue without a pause, and what it said then."""
        longest, said, began = 0.0, "", None
        for sight in self.seen:
            if sight.at_s < since_s or not sight.lie:
                began = None
                continue
            began = sight.at_s if began is None else began
            if sight.at_s - began >= longest:
                longest, said = sight.at_s - began, sight.lie
        return longest, said

    async def _watch(self) -> None:
        kubeconfig = json.loads((self.space.node.run / "kubeconfig").read_text())
        server, token = kubeconfig["clusters"][0]["cluster"], kubeconfig["users"][0]["user"]["token"]
        trusted = ssl.create_default_context(cafile=server["certificate-authority"])
        async with aiohttp.ClientSession(
            server["server"],
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=trusted),
            timeout=aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S),
        ) as session:
            while True:
                # Who does not answer says nothing untrue.
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    self.seen.append(await self._look(session))
                self._looked.set()
                await asyncio.sleep(EVERY_S)

    async def _look(self, session: aiohttp.ClientSession) -> Sight:
        began_s, namespace = time.monotonic(), f"namespaces/{self.space.name}"
        pods = await _get(session, f"/api/v1/{namespace}/pods?labelSelector={LABEL}={self.name}")
        service = await _get(session, f"/apis/sluice.dev/v1alpha1/{namespace}/inferenceservices/{self.name}")
        return judge(service, pods["items"], began_s)


async def _get(session: aiohttp.ClientSession, path: str) -> Object:
    async with session.get(path) as answer:
        answer.raise_for_status()
        found: Object = await answer.json()
        return found
