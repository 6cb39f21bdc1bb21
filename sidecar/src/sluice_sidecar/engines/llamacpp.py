"""llama.cpp's server: slots instead of a batch, no word about its KV cache, and a step that holds up its metrics.

Source of names: its `/metrics` page (tests keep one of build 11434) and its README; `kv_cache_*` are of builds before
mid-2025.
"""

from __future__ import annotations

from typing import Any

from sluice_sidecar.engines.dialect import GetJson, PostJson, Traits, first_model, whole
from sluice_sidecar.engines.page import Page
from sluice_sidecar.engines.reading import Facts, Reading

_RUNNING = ("llamacpp:requests_processing",)
_WAITING = ("llamacpp:requests_deferred",)
_USED = ("llamacpp:kv_cache_tokens",)
_GAP_SECONDS = ("llamacpp:tokens_predicted_seconds",)
_OUTPUT = ("llamacpp:tokens_predicted",)
_PROMPT = ("llamacpp:prompt_tokens",)
# Only so that its numbers move with each step.
_STEPS = ("llamacpp:n_decode",)


class LlamaCpp:
    """llama-server, started with `--metrics`."""

    traits = Traits(
        name="llamacpp",
        families=(*_RUNNING, *_WAITING, *_USED, *_GAP_SECONDS, *_OUTPUT, *_PROMPT, *_STEPS),
        required={"running": _RUNNING[0], "waiting": _WAITING[0]},
        # It closes idle connections after five seconds or a hundred calls, whichever is first.
        keep_alive_s=0.0,
        unhealthy="loading",
        # Sums of output tokens are written when a request ends; a large prefill is one step.
        frozen_after_us=5_000_000,
        # Its `--batch-size`.
        default_chunk_tokens=2048,
    )

    def read(self, page: Page) -> Reading:
        """What a page says."""
        return Reading(
            running=page.count(*_RUNNING),
            waiting=page.count(*_WAITING),
            kv_used_tokens=page.count(*_USED),
            block_tokens=1,
            gap_seconds_total=page.total(*_GAP_SECONDS),
            gaps_total=page.count(*_OUTPUT),
            prompt_tokens_total=page.count(*_PROMPT),
            steps_total=page.count(*_STEPS),
        )

    async def facts(self, get_json: GetJson) -> Facts:
        """What stays: `/props` has the slots and the context of one of them.

        Whether the slots share their cells (`--kv-unified`) it does not tell: one slot's context is what is there for
        certain.
        """
        props = await get_json("/props")
        props = props if isinstance(props, dict) else {}
        settings = props.get("default_generation_settings")
        context = whole(settings.get("n_ctx")) if isinstance(settings, dict) else None
        model = first_model(await get_json("/v1/models"))
        return Facts(
            model=str(model.get("id", "")),
            context_tokens=context,
            kv_tokens=context,
            block_tokens=1,
            max_sequences=whole(props.get("total_slots")),
        )

    async def count_tokens(self, question: dict[str, Any], post_json: PostJson) -> int | None:
        """By `/tokenize`; messages are put into the model's template first."""
        text = question.get("prompt")
        if "messages" in question:
            asked = {name: value for name, value in question.items() if name in {"messages", "tools"}}
            templated = await post_json("/apply-template", asked)
            text = templated.get("prompt") if isinstance(templated, dict) else None
        if not isinstance(text, str):
            return None
        answer = await post_json("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return len(tokens) if isinstance(tokens, list) else None
