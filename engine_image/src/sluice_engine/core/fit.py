"""Whether a request can ever fit: the one formula that start-up, entry, gate and simulator share.

A request holds KV for at most prompt + max_tokens − 1 tokens, since the last sampled token never holds state.
"""

from __future__ import annotations

from collections.abc import Iterator

# Choices of one call, over all of its prompts: what the engine takes, and what the gate reckons with.
MAX_CHOICES = 128


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold the KV of `num_tokens`."""
    return -(-num_tokens // block_tokens)


def peak_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Most tokens whose KV a request can ever hold."""
    return prompt_tokens + max_tokens - 1


def largest_output_tokens(prompt_tokens: int, *, max_length_tokens: int, pool_tokens: int) -> int:
    """What `max_tokens` means when it is left out: all that fits. Below 1 when not even the prompt does."""
    return min(max_length_tokens - prompt_tokens, pool_tokens - prompt_tokens + 1)


def unfit_reason(prompt_tokens: int, max_tokens: int, *, max_length_tokens: int, pool_tokens: int) -> str | None:
    """Why a request could never run, not even alone; None when it can.

    `pool_tokens` is the whole pool in tokens (blocks × block_tokens).
    """
    total = prompt_tokens + max_tokens
    peak = peak_tokens(prompt_tokens, max_tokens)
    if total > max_length_tokens:
        return (
            f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) make {total} tokens; "
            f"the model's context length is {max_length_tokens}"
        )
    if peak > pool_tokens:
        return (
            f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) need {peak} tokens of KV cache; "
            f"the whole cache holds {pool_tokens}"
        )
    return None


def chunks_of(num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """(tokens, start) of each chunk in which so many tokens are computed; the last may be smaller."""
    size = max(1, chunk_tokens)
    for start in range(0, num_tokens, size):
        yield min(size, num_tokens - start), start
