"""The demo model on this machine's CPU, behind its gate: what benchmarks measure and load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sluice_operator.local.pod import LocalPod
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse
from sluice_operator.resource.spec import ServiceSpec

# So wide that nothing is refused for it.
_SLO = {"timeToFirstToken": "60s", "referencePromptTokens": 512, "interTokenLatency": "500ms"}


def demo_service(name: str, slo: Mapping[str, Any] | None = None, **parts: Mapping[str, Any]) -> ServiceSpec:
    """A service of that name: `parts` of its spec, and of its promise what is not as wide as it comes."""
    spec = {
        "model": {"source": {"demo": {"name": "smollm2-135m"}}},
        "slo": {**_SLO, **(slo or {})},
        "accelerator": {"count": 0},
        **parts,
    }
    document = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": spec,
    }
    return parse(manifest.check(document, name))


@asynccontextmanager
async def ready_pod(spec: ServiceSpec, cache_dir: Path | None = None) -> AsyncIterator[LocalPod]:
    """One pod of it that takes requests; on the way there it says how far it is."""
    async with LocalPod(spec, cache_dir=cache_dir) as pod:
        await pod.wait_ready(progress=lambda text: print(f"  {text}", flush=True))
        yield pod
