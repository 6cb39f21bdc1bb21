"""Whether a call could ever run, or is refused at once: by what its body says, and by what the engine counts.

What no capacity would help is told before anything is asked of the engine. Pure. Must not know what is inside now.
Start reading at `refuse`.
"""

from __future__ import annotations

from sluice_engine.core.fit import MAX_CHOICES
from sluice_engine.errors import sentence
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.errors import Reason, Refusal
from sluice_sidecar.estimates.estimate import MOST_OUTPUT_TOKENS, Asked
from sluice_sidecar.estimates.prompt import MOST_BYTES_PER_TOKEN, TokenRatio

# From this share of what fits at most, an estimate that is off by a half may keep out what would have fitted.
COUNTED_FROM_SHARE = 0.25


def refuse(asked: Asked, limits: Limits) -> Refusal | None:
    """The refusal of what could never run, however few tokens its prompts turn out to be; None of what may."""
    if asked.num_choices > MAX_CHOICES:
        # An engine that took them all would be given more than was priced.
        problem = (
            f"the prompts and n of this request make more choices than the {MAX_CHOICES} that one call may ask for"
        )
        return Refusal(Reason.BAD_REQUEST, sentence(problem), param="n")
    if asked.max_tokens is not None and limits.unfit_reason(1, asked.max_tokens) is not None:
        # What was asked beyond the bound was read as the bound: no number is told that nobody sent.
        least = "" if asked.max_tokens < MOST_OUTPUT_TOKENS else "at least "
        problem = (
            f"an answer of {least}{asked.max_tokens} output tokens ({asked.max_tokens_param}) can never fit: the "
            f"model's context length is {limits.max_length_tokens} tokens and the whole KV cache holds "
            f"{limits.pool_tokens}"
        )
        return Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, sentence(problem), param=asked.max_tokens_param)
    prompt = asked.prompts[asked.largest]
    if prompt.tokens is not None:
        return refuse_counted(asked, limits, prompt.tokens)
    return refuse_counted(asked, limits, max(1, prompt.text_bytes // MOST_BYTES_PER_TOKEN), at_least=True)


def refuse_counted(asked: Asked, limits: Limits, tokens: int, *, at_least: bool = False) -> Refusal | None:
    """The refusal where its largest prompt is of so many tokens, or `at_least` of so many; None where that fits."""
    problem = limits.unfit_reason(tokens, asked.max_tokens or 1)
    if problem is None:
        return None
    if at_least:
        problem = problem.replace("prompt (", "prompt (at least ", 1)
    return Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, sentence(problem), param=asked.param)


def worth_counting(asked: Asked, limits: Limits, ratio: TokenRatio) -> bool:
    """Whether the engine is asked to count: the prompt is so large that the error of an estimate would decide."""
    prompt = asked.prompts[asked.largest]
    # Without text there is nothing to count: the field is missing or of a wrong type, which the engine says best.
    if prompt.tokens is not None or not prompt.text_bytes:
        return False
    tokens = ratio.tokens(prompt)
    most = min(limits.max_length_tokens, limits.pool_tokens)
    return tokens >= COUNTED_FROM_SHARE * most or refuse_counted(asked, limits, tokens) is not None


def most_prompt_tokens(max_tokens: int, limits: Limits) -> int:
    """The longest prompt that fits beside such an answer."""
    return min(limits.max_length_tokens - max_tokens, limits.pool_tokens - max_tokens + 1)
