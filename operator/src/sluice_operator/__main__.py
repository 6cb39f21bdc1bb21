"""`python -m sluice_operator`: connects the parts and runs until SIGTERM. Decides nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import kopf
from aiohttp import web
from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry, ProcessCollector

from sluice_operator import config, handlers
from sluice_operator.cluster import watches
from sluice_operator.cluster.connection import WatchExpired, connect
from sluice_operator.cluster.gates import GateClient
from sluice_operator.cluster.kinds import CHILD_KINDS, OPTIONAL_KINDS, SERVICE_KIND
from sluice_operator.cluster.kube import Kube
from sluice_operator.cluster.lease import Election
from sluice_operator.config import Settings
from sluice_operator.errors import ApiRefused, InvalidSettings, LeaseLost, OperatorError
from sluice_operator.health import Health, application
from sluice_operator.logs import setup_logging
from sluice_operator.metrics import HeartbeatCollector, Metrics
from sluice_operator.reconcile.reconciler import Reconciler

log = logging.getLogger("sluice_operator")

_CRD_RETRY_S = 5.0
# At most: an API server that is busy for a moment, as after a definition was installed, says so.
_RESYNC_RETRY_S = 10.0
# A candidate that has not read the Lease for so long does not get through to the API server at all.
_LEASE_SILENCE_S = 300.0


def main() -> int:
    """Exit 0 after SIGTERM, 1 when the cluster cannot be reached, 2 for bad settings; a lost Lease starts it anew."""
    try:
        settings = config.from_environment(os.environ)
    except InvalidSettings as error:
        print(f"sluice-operator: {error}", file=sys.stderr)  # noqa: T201  # one line for a person
        return 2
    setup_logging(settings.log_level)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(settings))
    except LeaseLost as error:
        # Anew, but as the same container: a kubelet lets one that ended a few times wait for minutes, and an API server
        # that was away for a while takes the Lease from whoever held it.
        log.warning("starting anew", extra={"error": str(error)})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # our own command line
    except (OperatorError, ConfigException, aiohttp.ClientError, OSError) as error:
        print(f"sluice-operator: {error}", file=sys.stderr)  # noqa: T201  # one line for a person
        return 1
    return 0


async def run(settings: Settings) -> None:
    """Serve health and metrics, wait for the Lease, then follow the cluster until SIGTERM.

    Raises:
        LeaseLost: another operator may act by now.
    """
    prometheus = CollectorRegistry()
    ProcessCollector(registry=prometheus)
    metrics, health = Metrics(prometheus), Health(time.monotonic)
    prometheus.register(HeartbeatCollector(health.ages))
    runner = web.AppRunner(application(health, prometheus), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, None, settings.metrics_port)
    await site.start()
    log.info("listening", extra={"addresses": runner.addresses})
    # Until kopf takes the signal over: a process 1 without a handler would not hear it.
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        async with connect() as connection:
            connection.count = lambda method: metrics.requests.labels(method).inc()
            leading = asyncio.create_task(
                _lead(Kube(connection), settings, health=health, metrics=metrics), name="lead"
            )
            await _first([leading, asyncio.create_task(stopped.wait(), name="stop")])
    finally:
        await runner.cleanup()


async def _lead(cluster: Kube, settings: Settings, *, health: Health, metrics: Metrics) -> None:
    """Follow the cluster while the Lease is ours."""
    if settings.lease is None:
        metrics.leader.set(1)
        await _act(cluster, settings, health=health, metrics=metrics)
        return
    election = Election(cluster, settings.lease, settings.identity, clock=time.monotonic, now=_lease_time)
    health.expect("lease", _LEASE_SILENCE_S)
    election.beat = lambda: health.beat("lease")
    health.is_standby = True
    await election.acquire()
    health.is_standby = False
    metrics.leader.set(1)
    cluster.may_act = election.is_held
    keeping = asyncio.create_task(election.keep(), name="lease")
    try:
        acting = asyncio.create_task(_act(cluster, settings, health=health, metrics=metrics), name="act")
        await _first([keeping, acting])
    finally:
        metrics.leader.set(0)
        await election.release()


async def _act(cluster: Kube, settings: Settings, *, health: Health, metrics: Metrics) -> None:
    async with aiohttp.ClientSession() as session:
        await _crd(cluster)
        reconciler = Reconciler(
            cluster,
            GateClient(session),
            settings,
            metrics,
            clock=time.monotonic,
            wall_clock=time.time,
            now=_timestamp,
        )
        await _follow(cluster, reconciler, settings, health=health, metrics=metrics)


async def _first(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until one of them ends, end the others, and raise what it raised."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _follow(
    cluster: Kube, reconciler: Reconciler, settings: Settings, *, health: Health, metrics: Metrics
) -> None:
    for kind in OPTIONAL_KINDS:
        reconciler.discovered(kind, is_served=await _is_served(cluster, kind))
    ours = [asyncio.create_task(_resync(cluster, reconciler, settings, health=health, metrics=metrics), name="resync")]
    for kind in CHILD_KINDS:
        for namespace in settings.namespaces or ("",):
            following = watches.follow(cluster, kind, namespace, reconciler, health=health, metrics=metrics)
            ours.append(asyncio.create_task(following, name=f"watch {kind}"))
    operator = asyncio.create_task(
        kopf.operator(
            registry=handlers.registry(reconciler),
            settings=handlers.settings(),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        ),
        name="kopf",
    )
    try:
        # None of these ends by itself: one that does takes the process with it, so that the kubelet starts a fresh one.
        await _first([operator, *ours])
    finally:
        await reconciler.close()


async def _crd(cluster: Kube) -> None:
    """Wait for the CRD: kopf, which may not list CRDs, looks for it once, at its start."""
    while not await _is_served(cluster, SERVICE_KIND):
        log.warning("the CRD inferenceservices.sluice.dev is not installed; waiting for it")
        await asyncio.sleep(_CRD_RETRY_S)


async def _is_served(cluster: Kube, kind: str) -> bool:
    """Whether the API server has the kind's definition; asked until it answers: no outage ends the process here."""
    while True:
        try:
            return await cluster.serves(kind)
        except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("discovery failed", extra={"kind": kind, "error": str(error) or type(error).__name__})
            await asyncio.sleep(_CRD_RETRY_S)


async def _resync(
    cluster: Kube, reconciler: Reconciler, settings: Settings, *, health: Health, metrics: Metrics
) -> None:
    """Look at everything again now and then: whatever an event was lost for heals."""
    # Two that fail are too many. The watch of the services is judged here, since kopf does not tell of its bookmarks:
    # a list must hold nothing that the watch did not bring.
    health.expect("resync", 2 * settings.resync_s + 60)
    health.expect("watch InferenceService", 3 * settings.resync_s + 60)
    while True:
        try:
            await reconciler.resync(cluster.list_services(settings.namespaces))
        except (ApiRefused, WatchExpired, aiohttp.ClientError, TimeoutError, OSError) as error:
            wanted_s = error.retry_after_s if isinstance(error, ApiRefused) else 0.0
            retry_s = min(wanted_s or _RESYNC_RETRY_S, _RESYNC_RETRY_S)
            log.warning("resync failed", extra={"error": str(error) or type(error).__name__, "retry_s": retry_s})
            await asyncio.sleep(retry_s)
            continue
        if not reconciler.is_watch_suspect:
            health.beat("watch InferenceService")
        health.beat("resync")
        health.is_synced = True
        metrics.last_resync.set(time.time())
        await asyncio.sleep(settings.resync_s)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # half the time of each socket operation, where there is one
    except ImportError:
        return None
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


def _timestamp() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _lease_time() -> str:
    # A MicroTime: the API server takes it with six digits only.
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


if __name__ == "__main__":
    sys.exit(main())
