"""`python -m sluice_operator`: connects the parts and runs until SIGTERM. Decides nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import sys
import time

import aiohttp
import kopf
from aiohttp import web
from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry, ProcessCollector

from sluice_operator import config, handlers, kube, watches
from sluice_operator.config import Settings
from sluice_operator.errors import ApiRefused, InvalidSettings, OperatorError
from sluice_operator.gates import GateClient
from sluice_operator.health import Health, application
from sluice_operator.kinds import CHILD_KINDS, OPTIONAL_KINDS, SERVICE_KIND
from sluice_operator.logs import setup_logging
from sluice_operator.metrics import HeartbeatCollector, Metrics
from sluice_operator.reconcile import Reconciler

log = logging.getLogger("sluice_operator")

_CRD_RETRY_S = 5.0


def main() -> int:
    """Exit 0 after SIGTERM, 1 when the cluster cannot be reached, 2 for bad settings."""
    try:
        settings = config.from_environment(os.environ)
    except InvalidSettings as error:
        print(f"sluice-operator: {error}", file=sys.stderr)  # noqa: T201  # one line for a person
        return 2
    setup_logging(settings.log_level)
    try:
        asyncio.run(run(settings))
    except (OperatorError, ConfigException, OSError) as error:
        print(f"sluice-operator: {error}", file=sys.stderr)  # noqa: T201  # one line for a person
        return 1
    return 0


async def run(settings: Settings) -> None:
    """Serve health and metrics, then follow the cluster."""
    prometheus = CollectorRegistry()
    ProcessCollector(registry=prometheus)
    metrics, health = Metrics(prometheus), Health(time.monotonic)
    prometheus.register(HeartbeatCollector(health.ages))
    metrics.leader.set(1)
    runner = web.AppRunner(application(health, prometheus), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, None, settings.metrics_port)
    await site.start()
    log.info("listening", extra={"addresses": runner.addresses})
    try:
        async with kube.connect() as cluster, aiohttp.ClientSession() as session:
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
    finally:
        await runner.cleanup()


async def _follow(
    cluster: kube.Kube, reconciler: Reconciler, settings: Settings, *, health: Health, metrics: Metrics
) -> None:
    for kind in OPTIONAL_KINDS:
        reconciler.discovered(kind, is_served=await cluster.serves(kind))
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
        done, _ = await asyncio.wait([operator, *ours], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (operator, *ours):
            task.cancel()
        await asyncio.gather(operator, *ours, return_exceptions=True)
        await reconciler.close()


async def _crd(cluster: kube.Kube) -> None:
    """Wait for the CRD: kopf, which may not list CRDs, looks for it once, at its start."""
    while not await cluster.serves(SERVICE_KIND):
        log.warning("the CRD inferenceservices.sluice.dev is not installed; waiting for it")
        await asyncio.sleep(_CRD_RETRY_S)


async def _resync(
    cluster: kube.Kube, reconciler: Reconciler, settings: Settings, *, health: Health, metrics: Metrics
) -> None:
    """Look at everything again now and then: whatever an event was lost for heals."""
    # Two that fail are too many. The watch of the services is judged here, since kopf does not tell of its bookmarks:
    # a list must hold nothing that the watch did not bring.
    health.expect("resync", 2 * settings.resync_s + 60)
    health.expect("watch InferenceService", 3 * settings.resync_s + 60)
    while True:
        try:
            reconciler.resync(await cluster.list_services(settings.namespaces))
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            log.warning("resync failed", extra={"error": str(error) or type(error).__name__})
            await asyncio.sleep(10)
            continue
        if not reconciler.is_watch_suspect:
            health.beat("watch InferenceService")
        health.beat("resync")
        health.is_synced = True
        metrics.last_resync.set(time.time())
        await asyncio.sleep(settings.resync_s)


def _timestamp() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
