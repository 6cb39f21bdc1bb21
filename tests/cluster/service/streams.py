"""Clients of a service: the real `openai` client, and what became of each stream."""

from __future__ import annotations

from dataclasses import dataclass

import openai


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream that came to its end."""

    text: str
    chunks: int
    finish_reason: str | None


def client(url: str, *, retries: int = 0) -> openai.AsyncOpenAI:
    """A client of the service at this address."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=300)


async def stream(who: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> Stream:
    """One chat completion, streamed to its end.

    Raises:
        openai.APIError: it was refused, cut, or ended in an error event.
    """
    text, chunks, finish_reason = "", 0, None
    answer = await who.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0, stream=True
    )
    async for chunk in answer:
        chunks += 1
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
    return Stream(text, chunks, finish_reason)
