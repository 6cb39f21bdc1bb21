"""vLLM: `vllm serve` and its flags. Pure. The flags are held against its own parser (`make check-engine-flags`)."""

from __future__ import annotations

from collections.abc import Iterator

from sluice_operator.rendering.foreign.honoured import Refusal, block_tokens
from sluice_operator.resource.spec import ServiceSpec

NAME = "vLLM"
KIND = "vllm"
"""What the gate calls it."""
COMMAND = ("vllm", "serve")
# Nobody is told what runs here.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_TYPES = {"Auto": "auto", "Float32": "float32", "BFloat16": "bfloat16", "Float16": "float16"}


def refused(spec: ServiceSpec) -> Iterator[Refusal]:
    """What vLLM alone cannot honour."""
    budget, live = spec.scheduling.token_budget, spec.live.scheduling
    chunk, requests = live.prefill_chunk_tokens, spec.scheduling.max_sequences
    if budget is not None and chunk is not None and budget != chunk:
        problem = "vLLM has one bound for a step's prefill and decodes together: set prefillChunkTokens or tokenBudget"
        yield "spec.scheduling.tokenBudget", problem
    if chunk is not None and requests is not None and chunk < requests:
        problem = f"vLLM counts a step's decodes within it: set at least maxSequences, {requests}"
        yield "spec.scheduling.prefillChunkTokens", problem
    blocks = block_tokens(spec)
    if spec.accelerator_count == 0 and blocks is not None and blocks % 32:
        yield "spec.cache.blockTokens", "vLLM's blocks on a CPU are multiples of 32: set 32, 64 or 128, or leave it out"


def arguments(spec: ServiceSpec, model: str, port: int) -> list[str]:
    """Its arguments; `model` is a path, or the name of a hub's repository."""
    scheduling, cache, live = spec.scheduling, spec.cache, spec.live.scheduling
    step_tokens = scheduling.token_budget or live.prefill_chunk_tokens
    hub = spec.model.source.hub
    flags: dict[str, object] = {
        "--revision": hub.revision if hub is not None else None,
        "--served-model-name": spec.model.served_name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": _TYPES[spec.model.data_type],
        "--max-model-len": spec.model.max_length_tokens,
        # The one bound that it has: on prefill and decodes together, so the sum of prefill stays below it, too.
        "--max-num-batched-tokens": step_tokens,
        "--max-num-seqs": scheduling.max_sequences,
        "--long-prefill-token-threshold": live.max_prefill_tokens_per_request,
        "--scheduling-policy": "priority" if scheduling.policy == "Priority" else "fcfs",
        "--block-size": block_tokens(spec),
        "--kv-cache-memory-bytes": cache.capacity_bytes,
        "--tensor-parallel-size": spec.accelerator_count if spec.accelerator_count > 1 else None,
        "--gpu-memory-utilization": f"{cache.memory_percent / 100:.2f}" if cache.capacity_bytes is None else None,
    }
    switches = ["--enable-prefix-caching" if cache.prefix_caching == "Enabled" else "--no-enable-prefix-caching"]
    if scheduling.overlap_depth is not None:
        switches.append("--async-scheduling" if scheduling.overlap_depth else "--no-async-scheduling")
    return [model, *(f"{name}={value}" for name, value in flags.items() if value is not None), *switches]
