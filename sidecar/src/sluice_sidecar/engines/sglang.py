"""SGLang: one page for all ranks, of which those of one data-parallel group tell the same.

Source of names: its metrics collector, old and new; `/get_server_info` (now `/server_info`) for what metrics lack.
"""

from __future__ import annotations

from typing import Any

from prometheus_client.samples import Sample

from sluice_sidecar.engines.dialect import GetJson, PostJson, Traits, first_model, whole
from sluice_sidecar.engines.page import Page
from sluice_sidecar.engines.reading import Facts, Reading
from sluice_sidecar.errors import EngineUnreachable

_RUNNING = ("sglang:num_running_reqs",)
_WAITING = ("sglang:num_queue_reqs",)
_GRAMMAR = ("sglang:num_grammar_queue_reqs",)
_PAUSED = ("sglang:num_paused_reqs",)
_TOTAL = ("sglang:max_total_num_tokens",)
_USED = ("sglang:num_used_tokens", "sglang:kv_used_tokens")
_USAGE = ("sglang:token_usage",)
_PAGE_SIZE = ("sglang:page_size",)
_CONTEXT = ("sglang:context_len",)
_RETRACTED = ("sglang:num_retracted_requests",)
_GAP = ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")
_PROMPT = ("sglang:prompt_tokens",)
_OUTPUT = ("sglang:generation_tokens",)
_STARTED = ("process_start_time_seconds",)
_SERVER_INFO = ("/server_info", "/get_server_info")


class SGLang:
    """SGLang's server, started with `--enable-metrics`."""

    traits = Traits(
        name="sglang",
        families=(
            *_RUNNING, *_WAITING, *_GRAMMAR, *_PAUSED, *_TOTAL, *_USED, *_USAGE, *_PAGE_SIZE, *_CONTEXT, *_RETRACTED,
            *_GAP, *_PROMPT, *_OUTPUT, *_STARTED,
        ),
        required={
            "running": _RUNNING[0],
            "waiting": _WAITING[0],
            "kv_tokens": _TOTAL[0],
            "kv_used_tokens": _USED[0],
        },
        priority_sign=-1,
        # Its `/health` may make the engine generate a token.
        health_every_us=5_000_000,
        # The scheduler writes its numbers once in 40 decode steps (decode_log_interval): at 100 ms a step in four
        # seconds.
        frozen_after_us=5_000_000,
    )  # fmt: skip

    def read(self, page: Page) -> Reading:
        """What a page says."""
        total = page.count(*_TOTAL, key=_group)
        used = page.count(*_USED, key=_group)
        usages = page.samples(*_USAGE)
        if used is None and total is not None and usages:
            groups = len({_group(sample) for sample in usages})
            used = round((page.total(*_USAGE, key=_group) or 0.0) * total / groups)
        waiting = page.count(*_WAITING, key=_group)
        others = sum(page.count(*names, key=_group) or 0 for names in (_GRAMMAR, _PAUSED))
        sizes = [round(sample.value) for sample in page.samples(*_PAGE_SIZE)]
        contexts = [round(sample.value) for sample in page.samples(*_CONTEXT)]
        return Reading(
            running=page.count(*_RUNNING, key=_group),
            waiting=None if waiting is None else waiting + others,
            kv_tokens=total,
            kv_used_tokens=used,
            block_tokens=max(sizes, default=None),
            context_tokens=min(contexts, default=None),
            preemptions_total=page.count(*_RETRACTED, key=_group),
            gap_seconds_total=page.total(*(f"{name}_sum" for name in _GAP)),
            gaps_total=page.count(*(f"{name}_count" for name in _GAP)),
            prompt_tokens_total=page.count(*_PROMPT),
            output_tokens_total=page.count(*_OUTPUT),
            started_s=page.total(*_STARTED),
        )

    async def facts(self, get_json: GetJson) -> Facts:
        """What stays: `/v1/models`, and its arguments where the server tells them."""
        model = first_model(await get_json("/v1/models"))
        info: dict[str, Any] = {}
        for path in _SERVER_INFO:
            try:
                found = await get_json(path)
            except EngineUnreachable:
                continue  # an older or a newer server: the other path has it
            if isinstance(found, dict) and "max_total_num_tokens" in found:
                info = found
                break
        states = info.get("internal_states")
        inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        most = whole(info.get("max_running_requests")) or whole(inner.get("effective_max_running_requests_per_dp"))
        return Facts(
            model=str(model.get("id", "")),
            context_tokens=whole(model.get("max_model_len")) or whole(info.get("context_length")),
            kv_tokens=whole(info.get("max_total_num_tokens")),
            block_tokens=whole(info.get("page_size")),
            max_sequences=most,
            chunk_tokens=whole(info.get("chunked_prefill_size")),
        )

    async def count_tokens(self, question: dict[str, Any], post_json: PostJson) -> int | None:
        """By `/tokenize`, which takes prompts only: messages stay an estimate."""
        if "prompt" not in question:
            return None
        answer = await post_json("/tokenize", question)
        return whole(answer.get("count")) if isinstance(answer, dict) else None


def _group(sample: Sample) -> str:
    """Whose number it is: ranks of tensor and pipeline parallelism tell what their data-parallel group does."""
    return sample.labels.get("dp_rank", "")
