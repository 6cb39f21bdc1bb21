"""A verdict in sentences, for the person at the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from sluice_operator.cli.verdict import Verdict
from sluice_operator.resource.host_memory import HostMemory

_WIDTH, _INDENT = 100, 17


def explain(verdict: Verdict) -> list[str]:
    """The verdict in sentences."""
    what = "is set" if verdict.chunk_is_set else "follows from the promise"
    if not verdict.chunk_is_set and verdict.prefill_chunk_tokens > verdict.chunk_ceiling_tokens:
        what = "one block, the least there is"
    by = "" if verdict.is_measured else "by the planning profile "
    lines = [f"{verdict.name}: {by}the promise {'can' if verdict.feasible else 'cannot'} be kept"]

    def tell(subject: str, text: str) -> None:
        lines.append(f"{f'  {subject}':<{_INDENT}}{text}")

    within, prompt = ms(verdict.inter_token_latency_us), verdict.reference_prompt_tokens
    tell("step times", verdict.source)
    if not verdict.is_measured:
        tell("", "an assumption, not a measurement of your machine; --table FILE judges by a measured one,")
        tell("", "kept by `sluice run` in ~/.cache/sluice/step-times")
    tell("chunk ceiling", f"{verdict.chunk_ceiling_tokens:,} prefill tokens beside a decode within {within}")
    if verdict.is_measured:
        tell("", f"at the end of a prompt of {prompt:,} tokens; nearer to its start more fits into a step")
    takes = f"such a step takes {ms(verdict.chunk_step_us)}"
    tell("chunk", f"{verdict.prefill_chunk_tokens:,} tokens ({what}); {takes}")
    if not verdict.derives and not verdict.chunk_is_set:
        tell(
            "",
            "which this runtime.type does not derive: set scheduling.prefillChunkTokens to it, or it does as it likes",
        )
    if (long := verdict.chunked) is not None:
        tell(
            "chunking",
            f"a prompt of {long.prompt_tokens:,} tokens takes {ms(long.whole_us)} alone in one step,",
        )
        tell(
            "",
            f"{ms(long.alone_us)} in {long.chunks:,} chunks, {ms(long.beside_us)} in chunks beside a decode",
        )
    alone = f"{ms(verdict.idle_ttft_us)} for {prompt:,} prompt tokens in an idle pod"
    tell("first token", f"{alone}; promised are {ms(verdict.time_to_first_token_us)}")
    requests = "1 request" if verdict.max_sequences == 1 else f"{verdict.max_sequences:,} requests"
    at_most = f"at most {verdict.token_budget:,} tokens and {requests}"
    tell("a step", f"{at_most}, or fewer where the KV cache holds fewer")
    for subject, text in (*_refused(verdict.refusals), *_short_of_memory(verdict.memory)):
        tell(subject, text)
    for subject, text in _why_not(verdict):
        tell(subject, text)
    return lines


def _why_not(verdict: Verdict) -> Iterator[tuple[str, str]]:
    if verdict.feasible:
        return
    first, *others = textwrap.wrap(verdict.reason, _WIDTH - _INDENT)
    yield "why not", first
    for line in others:
        yield "", line
    if not verdict.is_enforced:
        yield "", "slo.enforcement is Observe: it would run all the same, and SLOFeasible would be False"


def _refused(refusals: Sequence[str]) -> Iterator[tuple[str, str]]:
    for refusal in refusals:
        first, *others = textwrap.wrap(f"the engine would refuse it: {refusal}", _WIDTH - _INDENT)
        yield "start", first
        yield from (("", line) for line in others)


def _short_of_memory(memory: HostMemory | None) -> Iterator[tuple[str, str]]:
    """Nothing where it is enough, as far as can be told."""
    if memory is None or not memory.float32_shortage_bytes:
        return
    parts = {
        "cache.capacity": memory.cache_bytes,
        "cache.hostSwapCapacity": memory.swap_bytes,
        "weights": memory.weights_bytes,
        "the engine itself": memory.engine_bytes,
    }
    limit = f"resources.limits.memory is {_mib(memory.limit_bytes)}"
    if not memory.shortage_bytes:
        more = _mib(memory.float32_shortage_bytes)
        yield "memory", f"{limit}: enough where the CPU computes in bfloat16; where it does"
        yield "", f"not, weights are in float32, and it is {more} too little: a pod would not start, or be killed"
        return
    yield "memory", f"{limit}, {_mib(memory.shortage_bytes)} too little for"
    yield "", " + ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)
    on_top = "" if memory.engine_bytes else "the engine itself comes on top: "
    yield "", f"{on_top}a pod would not start, or be killed"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


def ms(microseconds: int) -> str:
    """A duration, to the millisecond."""
    return f"{microseconds / 1000:,.0f} ms"
