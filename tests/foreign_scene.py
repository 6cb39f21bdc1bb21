"""Services of other engines, as many as it takes to have every flag once: for tests and for the engines' own parsers.

It lies outside `tests/operator/` as `operator_scene` does.
"""

from __future__ import annotations

import copy
from typing import Any

import operator_scene as scene
from sluice_operator.rendering.foreign.runtime import command
from sluice_operator.resource.spec import ServiceSpec

IMAGE = "registry.example.com/engine:1"
HUB = {"source": {"huggingFace": {"repository": "acme/llama", "revision": "v1.0"}}}

_BOTH: list[dict[str, Any]] = [
    {},
    {"model": {**HUB, "servedName": "llama 3 $(HOME)", "dataType": "BFloat16", "maxLengthTokens": 8192}},
    {"model": {"source": {"persistentVolumeClaim": {"claimName": "m", "path": "x"}}, "dataType": "Float16"}},
    {"scheduling": {"prefillChunkTokens": 2048, "maxSequences": 64, "policy": "Priority"}},
    {"scheduling": {"overlapDepth": 0, "preemption": {"victim": "Last", "resume": "Recompute"}}},
    {"scheduling": {"overlapDepth": 1}, "cache": {"blockTokens": 32, "memoryPercent": 50, "prefixCaching": "Disabled"}},
    {"model": {"source": {"image": {"path": "/m"}}, "dataType": "Float32"}, "accelerator": {"count": 2}},
]
SPECS: dict[str, list[dict[str, Any]]] = {
    "VLLM": [
        *_BOTH,
        {"scheduling": {"tokenBudget": 4096, "maxSequences": 8, "maxPrefillTokensPerRequest": 512}},
        {"accelerator": {"count": 0}, "cache": {"capacity": "4Gi"}},
    ],
    "SGLang": [*_BOTH],
}


def foreign(runtime: str, changes: dict[str, Any] | None = None) -> ServiceSpec:
    """The spec of a service whose engine is another one."""
    return scene.spec({**copy.deepcopy(changes or {}), "runtime": {"type": runtime, "image": IMAGE}})


def commands() -> dict[str, list[list[str]]]:
    """What each engine's argument parser gets to see."""
    begin = {"VLLM": 2, "SGLang": 3}  # the program itself
    return {name: [command(foreign(name, one))[begin[name] :] for one in SPECS[name]] for name in SPECS}
