"""Clients of a service: the real `openai` client, and what became of each stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream that came to its end."""

    text: str
    chunks: int
    finish_reason: str | None


def client(url: str, *, retries: int = 0) -> openai.AsyncOpenAI:
    """A client of the service at this address."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=300)


async def opened(
    who: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int
) -> openai.AsyncStream[ChatCompletionChunk]:
    """A chat completion that has begun to stream.

    Raises:
        openai.APIError: it was refused.
    """
    said: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    return await who.chat.completions.create(
        model=model, messages=said, max_tokens=max_tokens, temperature=0, stream=True
    )


async def stream(who: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> Stream:
    """One chat completion, streamed to its end.

    Raises:
        openai.APIError: it was refused, cut, or ended in an error event.
    """
    text, chunks, finish_reason = "", 0, None
    async for chunk in await opened(who, model, prompt, max_tokens):
        chunks += 1
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
    return Stream(text, chunks, finish_reason)


async def once(url: str, model: str, prompt: str, max_tokens: int) -> Stream:
    """One chat completion by a client of its own, which comes back when it is told to."""
    async with client(url, retries=5) as who:
        return await stream(who, model, prompt, max_tokens)


@asynccontextmanager
async def streaming(url: str, clients: int) -> AsyncIterator[list[Stream]]:
    """So many clients stream meanwhile, one answer after the other; in the end each waits for its last."""
    ended: list[Stream] = []
    over = asyncio.Event()

    async def keep_streaming(number: int) -> None:
        while not over.is_set():
            ended.append(await once(url, "tiny", f"client {number}", max_tokens=300))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(keep_streaming(number))
        try:
            yield ended
        finally:
            over.set()
