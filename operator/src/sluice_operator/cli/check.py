"""`sluice check`: would this manifest be accepted, and can its promise be kept?

Owns the report. The rules are the CRD's, the derivation is the engine's own.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from sluice_engine.core.fit import chunks_of
from sluice_engine.core.state import DerivedLimits
from sluice_engine.core.step_limits import Capacity, StepLimits, derive, idle_ttft_us
from sluice_engine.core.steptime import ChunkCeiling, PlanningProfile, StepTable, StepTimes
from sluice_engine.errors import EngineError
from sluice_engine.table_file import read_step_table
from sluice_operator.errors import InvalidManifest
from sluice_operator.rendering.foreign.runtime import is_foreign
from sluice_operator.resource import manifest
from sluice_operator.resource.spec import ServiceSpec

# What is not known before a model is loaded: as much as never binds, so that only the promise does.
_UNBOUND_TOKENS = 1 << 22
# The largest decode batch an engine on a GPU measures at its start.
_PLANNING_DECODES = 256
# The example of docs/worked-example.md.
LONG_PROMPT_TOKENS = 12_000

_WIDTH, _INDENT = 100, 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """A long prompt, in one step and in chunks."""

    prompt_tokens: int
    whole_us: int
    """Alone, in one step."""
    chunks: int
    alone_us: int
    """Alone, a step each chunk."""
    beside_us: int
    """The same beside one decode, which goes on in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from one manifest."""

    name: str
    source: str
    """Where the step times come from."""
    is_measured: bool
    """Whether an engine measured them; else they are assumed."""
    feasible: bool
    reason: str
    chunk_ceiling_tokens: int
    """c(1): the most prefill beside one decode within the promise."""
    prefill_chunk_tokens: int
    """What a step will carry: the chunk that is set, or the ceiling, but at least a block."""
    chunk_is_set: bool
    chunk_step_us: int
    """What a step with that chunk beside one decode takes."""
    inter_token_latency_us: int
    token_budget: int
    max_sequences: int
    idle_ttft_us: int
    """First token of a prompt of the reference length in an idle pod."""
    time_to_first_token_us: int
    reference_prompt_tokens: int
    is_enforced: bool
    derives: bool
    """Whether the engine derives its chunk from the promise; another one has to be told."""
    chunked: Chunked | None
    """What chunking a long prompt costs; None where no such step was measured."""

    @property
    def is_kept(self) -> bool:
        """Whether the manifest keeps its own promise, or only observes it."""
        return self.feasible or not self.is_enforced


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A file, or one InferenceService in it, that breaks a rule."""

    where: str
    problems: tuple[str, ...]


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--table", "table_file", metavar="FILE", help="Step times that an engine measured, instead of the planning profile."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(files: tuple[str, ...], table_file: str | None, *, as_json: bool) -> int:
    """Check manifests, and whether they can keep their promise.

    A FILE holds InferenceServices; "-" is standard input. Each is held against the schema, and its promise against
    step times: those of --table, else those of the planning profile, which is an assumption.

    Exit codes: 0 all fine; 1 a manifest breaks its own promise; 2 wrong usage, or a file or rule that is broken.
    """
    times, source = _times(table_file)
    found = [(file, one) for file in files for one in _judged(file, times, source)]
    refused = [one for _, one in found if isinstance(one, Refused)]
    verdicts = [one for _, one in found if isinstance(one, Verdict)]
    if as_json:
        click.echo(json.dumps([_document(file, one) for file, one in found], indent=2))
    elif verdicts:
        click.echo("\n\n".join("\n".join(explain(one)) for one in verdicts))
    for one in refused:
        for problem in one.problems:
            click.echo(f"sluice: {' '.join(f'{one.where}: {problem}'.split())}", err=True)
    if refused:
        return 2
    return 0 if all(one.is_kept for one in verdicts) else 1


def _judged(file: str, times: StepTimes, source: str) -> Iterator[Verdict | Refused]:
    """One answer for each InferenceService of a file, or one for a file that cannot be read."""
    try:
        documents = manifest.documents(file)
    except InvalidManifest as error:
        yield Refused(where=error.where, problems=error.problems)
        return
    for document in documents:
        try:
            yield judge(manifest.read_spec(document, file), times, source)
        except InvalidManifest as error:
            yield Refused(where=error.where, problems=error.problems)


def _document(file: str, one: Verdict | Refused) -> dict[str, Any]:
    if isinstance(one, Refused):
        return {"file": file, "where": one.where, "problems": one.problems, "is_kept": False}
    return {"file": file, **asdict(one), "problems": (), "is_kept": one.is_kept}


def judge(spec: ServiceSpec, times: StepTimes, source: str) -> Verdict:
    """What an engine with these step times would derive from the spec."""
    table = times if isinstance(times, StepTable) else None
    planned = max(_PLANNING_DECODES, spec.scheduling.max_sequences or 0)
    capacity = Capacity(
        num_blocks=_UNBOUND_TOKENS // spec.cache.block_tokens,
        block_tokens=spec.cache.block_tokens,
        max_length_tokens=spec.model.max_length_tokens or _UNBOUND_TOKENS,
        max_decode_requests=table.decode_axis[-1] if table else planned,
        max_prefill_tokens=table.prefill_axis[-1] if table else _UNBOUND_TOKENS,
    )
    slo = spec.live.slo
    derived, limits = derive(slo, spec.scheduling, spec.live.scheduling, times, capacity)
    depth = min(slo.reference_prompt_tokens, capacity.max_length_tokens)
    ceiling = ChunkCeiling(times, slo.inter_token_latency_us, search_up_to_tokens=capacity.max_prefill_tokens)
    return _verdict(spec, source, derived, limits, times, ceiling(1, depth, depth), depth)


def _verdict(  # what it is made of
    spec: ServiceSpec,
    source: str,
    derived: DerivedLimits,
    limits: StepLimits,
    times: StepTimes,
    ceiling: int,
    depth: int,
) -> Verdict:
    slo = spec.live.slo
    # As the engine does it: where not even a block keeps the promise, a block it is.
    chunk = spec.live.scheduling.prefill_chunk_tokens or max(ceiling, spec.cache.block_tokens)
    return Verdict(
        name=spec.name,
        source=source,
        is_measured=isinstance(times, StepTable),
        feasible=derived.feasible,
        reason=derived.reason,
        chunk_ceiling_tokens=ceiling,
        prefill_chunk_tokens=chunk,
        chunk_is_set=spec.live.scheduling.prefill_chunk_tokens is not None,
        chunk_step_us=times.bound_us(1, chunk, depth, chunk * depth),
        inter_token_latency_us=slo.inter_token_latency_us,
        token_budget=derived.token_budget,
        max_sequences=derived.max_sequences,
        idle_ttft_us=idle_ttft_us(slo.reference_prompt_tokens, limits, times),
        time_to_first_token_us=slo.time_to_first_token_us,
        reference_prompt_tokens=slo.reference_prompt_tokens,
        is_enforced=slo.enforcement == "Enforce",
        derives=not is_foreign(spec),
        chunked=_chunked(times, chunk, slo.reference_prompt_tokens),
    )


def _chunked(times: StepTimes, chunk: int, reference_tokens: int) -> Chunked | None:
    prompt = LONG_PROMPT_TOKENS
    if isinstance(times, StepTable):
        prompt = min(reference_tokens, times.prefill_axis[-1])
    steps = list(chunks_of(prompt, chunk))
    if len(steps) < 2:
        return None
    return Chunked(
        prompt_tokens=prompt,
        whole_us=times.bound_us(0, prompt, 0),
        chunks=len(steps),
        alone_us=sum(times.bound_us(0, tokens, 0, tokens * start) for tokens, start in steps),
        beside_us=sum(times.bound_us(1, tokens, 0, tokens * start) for tokens, start in steps),
    )


def explain(verdict: Verdict) -> list[str]:
    """The verdict in sentences."""
    what = "is set" if verdict.chunk_is_set else "follows from the promise"
    if not verdict.chunk_is_set and verdict.prefill_chunk_tokens > verdict.chunk_ceiling_tokens:
        what = "one block, the least there is"
    by = "" if verdict.is_measured else "by the planning profile "
    lines = [f"{verdict.name}: {by}the promise {'can' if verdict.feasible else 'cannot'} be kept"]

    def tell(subject: str, text: str) -> None:
        lines.append(f"{f'  {subject}':<{_INDENT}}{text}")

    within, prompt = _ms(verdict.inter_token_latency_us), verdict.reference_prompt_tokens
    tell("step times", verdict.source)
    if not verdict.is_measured:
        tell("", "an assumption, not a measurement of your machine; --table FILE judges by a measured one,")
        tell("", "kept by `sluice run` in ~/.cache/sluice/step-times")
    tell("chunk ceiling", f"{verdict.chunk_ceiling_tokens:,} prefill tokens beside a decode within {within}")
    if verdict.is_measured:
        tell("", f"at the end of a prompt of {prompt:,} tokens; nearer to its start more fits into a step")
    takes = f"such a step takes {_ms(verdict.chunk_step_us)}"
    tell("chunk", f"{verdict.prefill_chunk_tokens:,} tokens ({what}); {takes}")
    if not verdict.derives and not verdict.chunk_is_set:
        tell(
            "",
            "which this runtime.type does not derive: set scheduling.prefillChunkTokens to it, or it does as it likes",
        )
    if (long := verdict.chunked) is not None:
        tell("chunking", f"a prompt of {long.prompt_tokens:,} tokens takes {_ms(long.whole_us)} alone in one step,")
        tell("", f"{_ms(long.alone_us)} in {long.chunks:,} chunks, {_ms(long.beside_us)} in chunks beside a decode")
    alone = f"{_ms(verdict.idle_ttft_us)} for {prompt:,} prompt tokens in an idle pod"
    tell("first token", f"{alone}; promised are {_ms(verdict.time_to_first_token_us)}")
    requests = "1 request" if verdict.max_sequences == 1 else f"{verdict.max_sequences:,} requests"
    at_most = f"at most {verdict.token_budget:,} tokens and {requests}"
    tell("a step", f"{at_most}, or fewer where the KV cache holds fewer")
    if not verdict.feasible:
        first, *others = textwrap.wrap(verdict.reason, _WIDTH - _INDENT)
        tell("why not", first)
        for line in others:
            tell("", line)
        if not verdict.is_enforced:
            tell("", "slo.enforcement is Observe: it would run all the same, and SLOFeasible would be False")
    return lines


def _times(table_file: str | None) -> tuple[StepTimes, str]:
    if table_file is None:
        profile = PlanningProfile()
        price = profile.per_prefill_token_ns / 1_000_000
        parts = f"{_ms(profile.fixed_us)} + {_ms(profile.decode_us)} for decodes + {price:g} ms a prefill token"
        return profile, f"planning profile: {parts}"
    text = manifest.read_text(table_file)
    try:
        table = read_step_table(text)
    except (EngineError, ValueError, RecursionError) as error:
        raise InvalidManifest(table_file, [f"is no step table: {error}"]) from error
    return table, f"measured: {table.measured_on or table_file}"


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:,.0f} ms"
