"""vLLM: the names of V1 and of its older versions, summed over the engines of a data-parallel server.

Source of names: its `/metrics` page (tests keep one of 0.32) and its documentation; older names from its change log.
"""

from __future__ import annotations

from typing import Any

from prometheus_client.samples import Sample

from sluice_sidecar.engines.dialect import GetJson, PostJson, Traits, first_model, whole
from sluice_sidecar.engines.page import Page
from sluice_sidecar.engines.reading import Facts, Reading

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
# V0 moved the KV of preempted requests to the host and counted them here.
_SWAPPED = ("vllm:num_requests_swapped",)
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = ("vllm:cache_config_info",)
_PREEMPTIONS = ("vllm:num_preemptions",)
_GAP = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_PROMPT = ("vllm:prompt_tokens",)
_OUTPUT = ("vllm:generation_tokens",)
_SLEEP = ("vllm:engine_sleep_state",)
_STARTED = ("process_start_time_seconds",)


class VLLM:
    """vLLM's OpenAI-compatible server."""

    traits = Traits(
        name="vllm",
        families=(
            *_RUNNING, *_WAITING, *_SWAPPED, *_USAGE, *_CACHE, *_PREEMPTIONS, *_GAP, *_PROMPT, *_OUTPUT, *_SLEEP,
            *_STARTED,
        ),
        required={
            "running": _RUNNING[0],
            "waiting": _WAITING[0],
            "kv_tokens": _CACHE[0],
            "kv_used_tokens": _USAGE[0],
        },
        priority_sign=1,
        # `/health` is an error once the engine's process has died, and only then.
        unhealthy="failed",
        # max_num_batched_tokens of its server on a GPU.
        default_chunk_tokens=2048,
    )  # fmt: skip

    def read(self, page: Page) -> Reading:
        """What a page says."""
        tokens, block_tokens = {}, None
        for sample in page.samples(*_CACHE):
            block = whole(sample.labels.get("block_size"))
            blocks = whole(sample.labels.get("num_gpu_blocks"))
            of_blocks = None if block is None or blocks is None else block * blocks
            size = whole(sample.labels.get("kv_cache_size_tokens")) or of_blocks
            if size is not None:
                tokens[_engine(sample)] = size
                block_tokens = block
        usages = page.samples(*_USAGE)
        # Engines may differ in size: a mean of their shares would be nobody's.
        used = None
        if usages and all(_engine(sample) in tokens for sample in usages):
            used = round(sum(sample.value * tokens[_engine(sample)] for sample in usages))
        waiting, swapped = page.count(*_WAITING), page.count(*_SWAPPED)
        awake = [s.value for s in page.samples(*_SLEEP) if s.labels.get("sleep_state") == "awake"]
        return Reading(
            running=page.count(*_RUNNING),
            waiting=waiting if waiting is None or swapped is None else waiting + swapped,
            kv_tokens=sum(tokens.values()) or None,
            kv_used_tokens=used,
            block_tokens=block_tokens,
            preemptions_total=page.count(*_PREEMPTIONS),
            gap_seconds_total=page.total(*(f"{name}_sum" for name in _GAP)),
            gaps_total=page.count(*(f"{name}_count" for name in _GAP)),
            prompt_tokens_total=page.count(*_PROMPT),
            output_tokens_total=page.count(*_OUTPUT),
            started_s=page.total(*_STARTED),
            asleep=bool(awake) and not all(awake),
        )

    async def facts(self, get_json: GetJson) -> Facts:
        """What stays: `/v1/models` has the context length; how many may run at once, it tells nobody."""
        model = first_model(await get_json("/v1/models"))
        return Facts(model=str(model.get("id", "")), context_tokens=whole(model.get("max_model_len")))

    async def count_tokens(self, question: dict[str, Any], post_json: PostJson) -> int | None:
        """By `/tokenize`, which takes messages and prompts."""
        answer = await post_json("/tokenize", question)
        return whole(answer.get("count")) if isinstance(answer, dict) else None


def _engine(sample: Sample) -> str:
    return sample.labels.get("engine", "")
