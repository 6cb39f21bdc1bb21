"""SGLang: `python3 -m sglang.launch_server` and its flags. Pure. Held against its own parser, as vLLM's are."""

from __future__ import annotations

from collections.abc import Iterator

from sluice_operator.rendering.foreign.honoured import Refusal, block_tokens
from sluice_operator.resource.spec import ServiceSpec

NAME = "SGLang"
KIND = "sglang"
"""What the gate calls it."""
COMMAND = ("python3", "-m", "sglang.launch_server")
ENVIRONMENT = {"DO_NOT_TRACK": "1"}
_TYPES = {"Auto": "auto", "Float32": "float32", "BFloat16": "bfloat16", "Float16": "float16"}


def refused(spec: ServiceSpec) -> Iterator[Refusal]:
    """What SGLang alone cannot honour."""
    if spec.accelerator_count == 0:
        yield "spec.accelerator.count", "SGLang is rendered for accelerators: set 1, or choose another runtime.type"
    if spec.scheduling.token_budget is not None:
        yield "spec.scheduling.tokenBudget", "SGLang bounds a step's prefill alone: set prefillChunkTokens"
    if spec.live.scheduling.max_prefill_tokens_per_request is not None:
        problem = "SGLang bounds no single request's prefill: set prefillChunkTokens"
        yield "spec.scheduling.maxPrefillTokensPerRequest", problem
    if spec.cache.capacity_bytes is not None:
        yield "spec.cache.capacity", "SGLang counts its KV cache in tokens: set memoryPercent"


def arguments(spec: ServiceSpec, model: str, port: int) -> list[str]:
    """Its arguments; `model` is a path, or the name of a hub's repository."""
    scheduling, cache = spec.scheduling, spec.cache
    hub = spec.model.source.hub
    flags: dict[str, object] = {
        "--model-path": model,
        "--revision": hub.revision if hub is not None else None,
        "--served-model-name": spec.model.served_name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": _TYPES[spec.model.data_type],
        "--context-length": spec.model.max_length_tokens,
        "--chunked-prefill-size": spec.live.scheduling.prefill_chunk_tokens,
        "--max-running-requests": scheduling.max_sequences,
        "--schedule-policy": "fcfs",
        "--page-size": block_tokens(spec),
        "--tensor-parallel-size": spec.accelerator_count if spec.accelerator_count > 1 else None,
        "--mem-fraction-static": f"{cache.memory_percent / 100:.2f}",
    }
    switches = ["--enable-metrics"]
    if scheduling.policy == "Priority":
        switches.append("--enable-priority-scheduling")
    if cache.prefix_caching == "Disabled":
        switches.append("--disable-radix-cache")
    if scheduling.overlap_depth == 0:
        switches.append("--disable-overlap-schedule")
    return [*(f"{name}={value}" for name, value in flags.items() if value is not None), *switches]
